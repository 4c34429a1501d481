"""Open a GGUF and check its container before anything trusts it.

The file comes from somewhere else: every count, length and offset is compared with the bytes
that are really there before it is used. Only the header is read.

Limits: 64 MiB of header, 16,384 metadata entries, 100,000 tensors, names below 64 bytes,
no nested arrays, versions 2 and 3, little-endian.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from types import MappingProxyType

from bitwright.engine.ggml_types import type_of_id
from bitwright.engine.gguf_cursor import Cursor, mapped
from bitwright.engine.gguf_values import UINT32, KvEntry, decode_name, read_kv
from bitwright.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 64 << 20
MAX_KV = 16_384
MAX_TENSORS = 100_000
MAX_NAME_BYTES = 63
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
LEAST_KV_BYTES = 8 + 1 + 4 + 1  # key length, key, type, value
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, dimensions, type, offset

# How files that are often given in the place of a GGUF begin: start → what it is, what to do.
FOREIGN = {
    b"version https://git-lfs": (
        "a Git LFS pointer: the model was not downloaded, run `git lfs pull`"
    ),
    b"PK\x03\x04": "a zip or PyTorch file: convert it with llama.cpp's convert_hf_to_gguf.py",
    b"FUGG": "a big-endian GGUF: convert it with gguf-convert-endian",
}
HTML_STARTS = (b"<!doctype", b"<html", b"<?xml")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        shape: ggml order, so shape[0] is the length of a row.
        type: canonical type name.
        offset: where the data starts, in bytes from the start of its file.
        size_bytes: bytes of data, without padding.
        shard: index of its file among the shards.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int
    shard: int = 0

    @property
    def n_per_row(self) -> int:
        """Elements of one row."""
        return self.shape[0] if self.shape else 1

    @property
    def n_rows(self) -> int:
        """Rows of all matrices together."""
        return self.n_elements // self.n_per_row

    @property
    def n_matrices(self) -> int:
        """Matrices (experts) in the tensor; 1 for two dimensions."""
        return _product(self.shape[2:])

    @property
    def n_elements(self) -> int:
        """Elements of the whole tensor."""
        return _product(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked container. ``data_offset`` and ``size_bytes`` are in bytes."""

    path: Path
    version: int
    alignment: int
    kv: Mapping[str, KvEntry]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    size_bytes: int


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def padded(n: int, alignment: int) -> int:
    """``n`` rounded up to a multiple of ``alignment``."""
    return (n + alignment - 1) // alignment * alignment


def read_gguf(path: Path) -> GgufFile:
    """Read and check a file's header.

    Raises:
        InputError: not a GGUF of a supported version, cut short, damaged, or with tensors that
            overlap, are misaligned, or have unknown types. The message names the first fault.
    """
    with mapped(path) as buffer:
        return parse_gguf(buffer, path)


def parse_gguf(buffer: mmap | bytes, path: Path) -> GgufFile:
    """Parse the bytes of a whole file. See `read_gguf`."""
    size_bytes = len(buffer)
    cursor = Cursor(buffer, str(path), min(size_bytes, MAX_HEADER_BYTES))
    version = _read_version(cursor, size_bytes)
    n_tensors, n_kv = _read_counts(cursor)
    kv: dict[str, KvEntry] = {}
    for _ in range(n_kv):
        entry = read_kv(cursor)
        if entry.key in kv:
            raise InputError(f"{path}: metadata key {entry.key} occurs twice: get the file again")
        kv[entry.key] = entry
    alignment = _alignment(kv, path)
    relative = [_read_tensor(cursor) for _ in range(n_tensors)]
    data_offset = padded(cursor.pos, alignment) if n_tensors else cursor.pos
    tensors = _placed(relative, data_offset, alignment, path)
    _check_end(tensors, size_bytes, path)
    return GgufFile(
        path, version, alignment, MappingProxyType(kv), tensors, data_offset, size_bytes
    )


def _read_version(cursor: Cursor, size_bytes: int) -> int:
    """Recognise what the file is before any count in it is believed."""
    if size_bytes == 0:
        raise InputError(f"{cursor.name} is empty (0 bytes): get the file again")
    head = cursor.buffer[:512]
    if head[:4] != MAGIC:
        raise InputError(f"{cursor.name} is not a GGUF file: it is {_what_it_is(head)}")
    cursor.skip(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise InputError(
            f"{cursor.name} is a big-endian file, and this is a little-endian host:"
            " convert it with gguf-convert-endian"
        )
    if version not in VERSIONS:
        raise InputError(
            f"{cursor.name}: GGUF version {version} is not supported, only"
            f" {' and '.join(map(str, VERSIONS))} are: convert the model again"
        )
    return version


def _what_it_is(head: bytes) -> str:
    for start, meaning in FOREIGN.items():
        if head.startswith(start):
            return meaning
    if head.lstrip().lower().startswith(HTML_STARTS):
        return "an HTML page, probably an error or login page saved by a download: get it again"
    if head[8:10] == b'{"':
        return "a safetensors file: convert it with llama.cpp's convert_hf_to_gguf.py"
    return f"something that begins with {head[:8]!r}: name a file that begins with {MAGIC!r}"


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    n_tensors = cursor.u64("the number of tensors")
    n_kv = cursor.u64("the number of metadata entries")
    cursor.need_items(n_kv, LEAST_KV_BYTES, "metadata entries")
    cursor.need_items(n_tensors, LEAST_TENSOR_BYTES, "tensors")
    for count, limit, what in (
        (n_kv, MAX_KV, "metadata entries"),
        (n_tensors, MAX_TENSORS, "tensors"),
    ):
        if count > limit:
            raise InputError(
                f"{cursor.name} has {count} {what}; bitwright reads at most {limit}:"
                " if the file is genuine, report it"
            )
    return n_tensors, n_kv


def _alignment(kv: Mapping[str, KvEntry], path: Path) -> int:
    entry = kv.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.type_id != UINT32 or not isinstance(value, int) or not _is_power_of_two(value):
        raise InputError(
            f"{path}: general.alignment is {value!r}; it must be a 32-bit power of two up to"
            f" {MAX_ALIGNMENT}: convert the model again"
        )
    return value


def _is_power_of_two(number: int) -> bool:
    return 0 < number <= MAX_ALIGNMENT and number & (number - 1) == 0


def _read_tensor(cursor: Cursor) -> TensorInfo:
    """One line of the tensor table; the offset is still relative to the data section."""
    length = cursor.u64("the length of a tensor name")
    if not 0 < length <= MAX_NAME_BYTES:
        raise InputError(
            f"{cursor.name}: a tensor name at byte {cursor.pos} is {length} bytes long; names have"
            f" 1 to {MAX_NAME_BYTES}: the file is damaged, get it again"
        )
    name = decode_name(cursor, cursor.take(length, "a tensor name"))
    n_dims = cursor.u32(f"the dimensions of tensor {name}")
    if n_dims > MAX_DIMS:
        raise InputError(
            f"{cursor.name}: tensor {name} has {n_dims} dimensions; ggml has at most {MAX_DIMS}:"
            " the file is damaged, get it again"
        )
    shape = tuple(cursor.u64(f"the shape of tensor {name}") for _ in range(n_dims))
    kind = type_of_id(cursor.u32(f"the type of tensor {name}"), name)
    offset = cursor.u64(f"the offset of tensor {name}")
    if 0 in shape or _product(shape) >= 1 << 62:
        raise InputError(f"{cursor.name}: tensor {name} has the impossible shape {shape}")
    blocks, rest = divmod(shape[0] if shape else 1, kind.block_size)
    if rest:
        raise InputError(
            f"{cursor.name}: tensor {name} is {kind.name} with rows of {shape[0] if shape else 1},"
            f" no multiple of {kind.block_size}: convert the model again"
        )
    size_bytes = blocks * kind.block_bytes * _product(shape[1:])
    return TensorInfo(name, shape, kind.name, offset, size_bytes)


def _placed(
    relative: list[TensorInfo], data_offset: int, alignment: int, path: Path
) -> tuple[TensorInfo, ...]:
    """Absolute offsets. llama.cpp wants the data in table order without gaps, and so do we."""
    seen: set[str] = set()
    placed = []
    expected = 0
    for tensor in relative:
        if tensor.name in seen:
            raise InputError(f"{path}: tensor {tensor.name} occurs twice: convert the model again")
        if tensor.offset != expected:
            fault = "is misaligned" if tensor.offset % alignment else "overlaps or leaves a gap"
            raise InputError(
                f"{path}: tensor {tensor.name} {fault}: it starts at byte {tensor.offset} of the"
                f" data, expected {expected}: the file is damaged, get it again"
            )
        seen.add(tensor.name)
        expected += padded(tensor.size_bytes, alignment)
        start = data_offset + tensor.offset
        placed.append(TensorInfo(tensor.name, tensor.shape, tensor.type, start, tensor.size_bytes))
    return tuple(placed)


def _check_end(tensors: tuple[TensorInfo, ...], size_bytes: int, path: Path) -> None:
    """Name the first tensor that is not all there. Padding after the last one may be missing."""
    for tensor in tensors:
        if tensor.offset + tensor.size_bytes > size_bytes:
            needed = tensors[-1].offset + tensors[-1].size_bytes
            raise InputError(
                f"{path} is cut short: tensor {tensor.name} ends at byte"
                f" {tensor.offset + tensor.size_bytes}, and the whole file needs {needed} bytes,"
                f" but it has {size_bytes}: download it again"
            )
