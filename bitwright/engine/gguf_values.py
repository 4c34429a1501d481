"""The metadata of a GGUF: key → typed value, kept as the bytes of the file.

Values are decoded when they are asked for, so that a vocabulary of 200,000 tokens costs nothing
until someone reads it, and so that metadata is carried from file to file unchanged.
Source: the GGUF specification (docs/gguf.md of ggml).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from bitwright.engine.gguf_cursor import Cursor
from bitwright.errors import InputError

# type id → struct format of one item
SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
UINT16, INT32, UINT32 = 2, 5, 4
BOOL, STRING, ARRAY, INT64, FLOAT64 = 7, 8, 9, 11, 12
TYPE_BYTES = 4
ARRAY_HEAD_BYTES = 16  # value type, item type, count

MAX_KEY_BYTES = 65535


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One metadata entry.

    Attributes:
        type_id: the value's type; 9 for arrays.
        raw: the bytes of the file from the value's type to its end.
    """

    key: str
    type_id: int
    raw: bytes

    @property
    def value(self) -> object:
        """The decoded value: int, float, bool, str, or a tuple of one of them.

        Decoded anew at each access. Bytes that are no UTF-8 become U+FFFD here; ``raw`` has them.
        """
        return kv_value(self)

    @property
    def n_items(self) -> int:
        """Length of an array; 1 for scalars and strings."""
        if self.type_id != ARRAY:
            return 1
        return int.from_bytes(self.raw[8:16], "little")


def kv_value(entry: KvEntry) -> object:
    """Decode an entry. See `KvEntry.value`."""
    if entry.type_id == STRING:
        return entry.raw[TYPE_BYTES + 8 :].decode("utf-8", "replace")
    if entry.type_id != ARRAY:
        return struct.unpack("<" + SCALARS[entry.type_id], entry.raw[TYPE_BYTES:])[0]
    item_type = int.from_bytes(entry.raw[4:8], "little")
    if item_type == STRING:
        return tuple(_strings(entry.raw, entry.n_items))
    return struct.unpack(f"<{entry.n_items}{SCALARS[item_type]}", entry.raw[ARRAY_HEAD_BYTES:])


def _strings(raw: bytes, count: int) -> Iterator[str]:
    pos = ARRAY_HEAD_BYTES
    for _ in range(count):
        start = pos + 8
        pos = start + int.from_bytes(raw[pos:start], "little")
        yield raw[start:pos].decode("utf-8", "replace")


def read_kv(cursor: Cursor) -> KvEntry:
    """Read one entry, checking every length, decoding none.

    Raises:
        InputError: the key or the value does not fit, or its type is unknown or nested.
    """
    key = _read_key(cursor)
    start = cursor.pos
    type_id = cursor.u32(f"the type of {key}")
    if type_id == ARRAY:
        _skip_array(cursor, key)
    elif type_id == STRING:
        cursor.skip(cursor.u64(f"the length of {key}"), f"the text of {key}")
    else:
        cursor.skip(_item_bytes(cursor, type_id, key), f"the value of {key}")
    size_bytes = cursor.pos - start
    cursor.pos = start
    return KvEntry(key, type_id, cursor.take(size_bytes, key))


def _read_key(cursor: Cursor) -> str:
    length = cursor.u64("the length of a key")
    if not 0 < length <= MAX_KEY_BYTES:
        raise InputError(
            f"{cursor.name}: a metadata key at byte {cursor.pos} is {length} bytes long; keys have"
            f" 1 to {MAX_KEY_BYTES}: the file is damaged, get it again"
        )
    return decode_name(cursor, cursor.take(length, "a key"))


def decode_name(cursor: Cursor, name: bytes) -> str:
    """Text of a key or tensor name, which must be valid UTF-8 without control characters.

    Raises:
        InputError: it is not.
    """
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if not text.isprintable():
        raise InputError(
            f"{cursor.name}: the name {name[:40]!r} before byte {cursor.pos} is no valid text:"
            " the file is damaged, get it again"
        )
    return text


def _item_bytes(cursor: Cursor, type_id: int, key: str) -> int:
    if type_id not in SCALARS:
        raise InputError(
            f"{cursor.name}: {key} has value type {type_id}, which GGUF does not define here:"
            " the file is damaged or newer than this version of bitwright"
        )
    return struct.calcsize("<" + SCALARS[type_id])


def _skip_array(cursor: Cursor, key: str) -> None:
    item_type = cursor.u32(f"the item type of {key}")
    count = cursor.u64(f"the length of {key}")
    if item_type == STRING:
        cursor.skip_strings(count, key)
        return
    if item_type == ARRAY:
        raise InputError(f"{cursor.name}: {key} is an array of arrays, which llama.cpp cannot read")
    cursor.skip(count * _item_bytes(cursor, item_type, key), f"the array {key}")


def string_kv(key: str, value: str) -> KvEntry:
    """An entry with a text."""
    return KvEntry(key, STRING, struct.pack("<I", STRING) + pack_string(value))


def scalar_kv(key: str, type_id: int, value: float) -> KvEntry:
    """An entry with a number (or bool) of the given type id."""
    return KvEntry(key, type_id, struct.pack("<I" + SCALARS[type_id], type_id, value))


def strings_kv(key: str, values: tuple[str, ...]) -> KvEntry:
    """An entry with an array of texts."""
    head = struct.pack("<IIQ", ARRAY, STRING, len(values))
    return KvEntry(key, ARRAY, head + b"".join(pack_string(v) for v in values))


def pack_string(text: str) -> bytes:
    """A GGUF string: 64-bit length in bytes, then the bytes."""
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data
