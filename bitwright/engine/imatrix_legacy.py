"""The old .dat form of the importance matrix.

A count of entries; each: name, chunks, number of values, values (mean of squares × chunks). Then,
optionally, the chunks of the whole run and the text file's name. No chunk size, no expert counts.
Source: save_imatrix_legacy in llama.cpp's tools/imatrix/imatrix.cpp.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitwright.engine.gguf_cursor import Cursor, mapped
from bitwright.errors import InputError

MAX_NAME_BYTES = 4096
LEAST_ENTRY_BYTES = 4 + 1 + 4 + 4 + 4
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LegacyEntry:
    """One tensor: float32 values (mean of squares × n_chunks), all experts in one row."""

    values: npt.NDArray[np.float32]
    n_chunks: int


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """What an old file says."""

    entries: Mapping[str, LegacyEntry]
    chunk_count: int
    dataset: str


def read_legacy(path: Path) -> LegacyFile:
    """Read an old-format file, believing no length before it was checked.

    Raises:
        InputError: it is no such file, or cut short; the message names the entry.
    """
    with mapped(path) as buffer:
        cursor = Cursor(buffer, f"imatrix {path}", len(buffer))
        n_entries = _size(cursor, "the number of entries")
        cursor.need_items(n_entries, LEAST_ENTRY_BYTES, "entries")
        entries: dict[str, LegacyEntry] = {}
        for number in range(1, n_entries + 1):
            name = _text(cursor, f"the name of entry {number}")
            if name in entries:
                raise InputError(f"{cursor.name}: entry {name} occurs twice: make it again")
            entries[name] = _read_entry(cursor, name)
        if not entries:
            raise InputError(f"{cursor.name} has no entries: make it again")
        chunk_count = _size(cursor, "the chunk count") if cursor.left else 0
        dataset = _text(cursor, "the data set") if cursor.left else ""
    return LegacyFile(entries, chunk_count, dataset)


def _read_entry(cursor: Cursor, name: str) -> LegacyEntry:
    n_chunks = _size(cursor, f"the chunks of entry {name}")
    n_values = _size(cursor, f"the length of entry {name}")
    if n_values < 1:
        raise InputError(f"{cursor.name}: entry {name} has no values: make it again")
    data = cursor.take(4 * n_values, f"entry {name} ({n_values} values)")
    return LegacyEntry(np.frombuffer(data, "<f4").astype(np.float32), n_chunks)


def _size(cursor: Cursor, what: str) -> int:
    value = cursor.u32(what)
    if value > MAX_INT32:
        raise InputError(
            f"{cursor.name}: {what} is negative or absurd ({value}): the file is damaged, or no"
            " importance matrix; make it again"
        )
    return value


def _text(cursor: Cursor, what: str) -> str:
    length = _size(cursor, f"the length of {what}")
    if length > MAX_NAME_BYTES:
        raise InputError(
            f"{cursor.name}: {what} would be {length} bytes long: the file is damaged, or no"
            " importance matrix; make it again"
        )
    return cursor.take(length, what).decode("utf-8", "replace")


def legacy_bytes(entries: Mapping[str, LegacyEntry], chunk_count: int, dataset: str) -> bytes:
    """The bytes of an old-format file, entries sorted by name.

    Raises:
        InputError: there is nothing to write.
    """
    if not entries:
        raise InputError("this imatrix has no data at all: there is nothing to write")
    parts = [struct.pack("<i", len(entries))]
    for name in sorted(entries):
        entry = entries[name]
        text = name.encode()
        parts.append(struct.pack(f"<i{len(text)}s", len(text), text))
        parts.append(struct.pack("<ii", entry.n_chunks, entry.values.size))
        parts.append(entry.values.astype("<f4").tobytes())
    text = dataset.encode()
    parts.append(struct.pack(f"<ii{len(text)}s", chunk_count, len(text), text))
    return b"".join(parts)
