"""Build the header of a GGUF: the bytes before the tensor data, and where each tensor will lie.

Byte for byte what llama.cpp writes for the same metadata and tensors (version 3, little-endian).
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bitwright.engine.ggml_types import TYPES, row_bytes
from bitwright.engine.gguf_file import DEFAULT_ALIGNMENT, MAGIC, padded
from bitwright.engine.gguf_values import KvEntry, pack_string
from bitwright.engine.tensors import n_dims

VERSION = 3


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written: its type in the new file, and its size in bytes without padding."""

    name: str
    shape: tuple[int, ...]
    type: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written.

    Attributes:
        header: everything before the data, padding included.
        tensors: in the order of their data.
        size_bytes: bytes of the whole file, the padding after each tensor included.
    """

    header: bytes
    tensors: tuple[PlannedTensor, ...]
    alignment: int
    size_bytes: int


def planned_tensor(name: str, shape: tuple[int, ...], type_name: str) -> PlannedTensor:
    """Size a tensor.

    Raises:
        InputError: the type does not fit the row.
    """
    n_rows = 1
    for size in shape[1:]:
        n_rows *= size
    return PlannedTensor(
        name, shape, type_name, n_rows * row_bytes(type_name, shape[0] if shape else 1)
    )


def plan_file(
    kv: Iterable[KvEntry],
    tensors: Sequence[PlannedTensor],
    alignment: int = DEFAULT_ALIGNMENT,
) -> PlannedFile:
    """Lay out a file with that metadata and those tensors."""
    entries = tuple(kv)
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(entries))]
    parts += [pack_string(entry.key) + entry.raw for entry in entries]
    offset = 0
    for tensor in tensors:
        parts.append(_table_line(tensor, offset))
        offset += padded(tensor.size_bytes, alignment)
    header = b"".join(parts)
    header += bytes(padded(len(header), alignment) - len(header))
    return PlannedFile(header, tuple(tensors), alignment, len(header) + offset)


def _table_line(tensor: PlannedTensor, offset: int) -> bytes:
    shape = (tensor.shape or (1,))[: n_dims(tensor.shape)]
    return (
        pack_string(tensor.name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", TYPES[tensor.type].id, offset)
    )
