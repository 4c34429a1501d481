"""Read, write and check importance matrices.

The GGUF form of llama.cpp's llama-imatrix (tools/imatrix/imatrix.cpp) is read and written here;
the old .dat form is in imatrix_legacy.py. Which of the two a file is, its content decides.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from bitwright.engine import imatrix_legacy
from bitwright.engine.atomic import write_atomic
from bitwright.engine.gguf_file import MAGIC, MAX_NAME_BYTES, GgufFile, TensorInfo, read_gguf
from bitwright.engine.gguf_header import plan_file, planned_tensor
from bitwright.engine.gguf_values import UINT32, scalar_kv, string_kv, strings_kv
from bitwright.engine.imatrix import Floats, Imatrix, ImatrixEntry, mean_squares
from bitwright.engine.imatrix_legacy import LegacyEntry
from bitwright.engine.imatrix_merge import merge_imatrices
from bitwright.engine.model_file import ModelFile, other_kind
from bitwright.errors import InputError

__all__ = [
    "Imatrix",
    "ImatrixEntry",
    "check_imatrix",
    "merge_imatrices",
    "read_imatrix",
    "write_imatrix",
]

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = (
    f"imatrix.{key}" for key in ("datasets", "chunk_count", "chunk_size")
)
MAX_FOREIGN_SHARE = 0.1  # entries for tensors that the model lacks


def read_imatrix(path: Path | str, chunk_size: int | None = None) -> Imatrix:
    """Read an importance matrix of either format.

    Args:
        chunk_size: tokens per chunk of an old-format file, which does not store it; needed only
            to merge such a file by tokens.

    Raises:
        InputError: damaged, no importance matrix, or values that are negative or not finite.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    except OSError as error:
        raise InputError(f"imatrix {path} cannot be read: {error.strerror}") from error
    imatrix = _read_gguf(path) if head == MAGIC else _read_legacy(path, chunk_size)
    for name, entry in imatrix.entries.items():
        if not (np.isfinite(entry.sums).all() and np.isfinite(entry.counts).all()):
            raise InputError(f"imatrix {path}: entry {name} has values that are not finite")
        if entry.sums.min() < 0 or entry.counts.min() < 0:
            raise InputError(f"imatrix {path}: entry {name} has negative values: make it again")
    return imatrix


def _read_gguf(path: Path) -> Imatrix:
    file = read_gguf(path)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    names = sorted({n.removesuffix(SUMS).removesuffix(COUNTS) for n in tensors})
    if not names or not all(n.endswith((SUMS, COUNTS)) for n in tensors):
        what = other_kind(file) or "something else: give the output of llama-imatrix"
        raise InputError(f"{path} is a GGUF but no importance matrix; it is {what}")
    return Imatrix(
        entries=MappingProxyType({name: _read_entry(file, tensors, name) for name in names}),
        chunk_count=_number(file, CHUNK_COUNT),
        chunk_size=_number(file, CHUNK_SIZE),
        datasets=_texts(file, DATASETS),
    )


def _number(file: GgufFile, key: str) -> int:
    """A count of the metadata. Files without it cannot be used by llama-quantize either."""
    value = file.kv[key].value if key in file.kv else None
    if not isinstance(value, int):
        raise InputError(
            f"imatrix {file.path} lacks the metadata {key}: make it again with llama-imatrix or"
            " `bitwright imatrix`"
        )
    return value


def _texts(file: GgufFile, key: str) -> tuple[str, ...]:
    value = file.kv[key].value if key in file.kv else ()
    return tuple(str(text) for text in value) if isinstance(value, tuple) else ()


def _read_entry(file: GgufFile, tensors: Mapping[str, TensorInfo], name: str) -> ImatrixEntry:
    pair = tensors.get(name + SUMS), tensors.get(name + COUNTS)
    sums_info, counts_info = pair
    if sums_info is None or counts_info is None:
        lost = COUNTS if counts_info is None else SUMS
        raise InputError(f"imatrix {file.path}: entry {name} has no {lost}: make it again")
    if {sums_info.type, counts_info.type} != {"F32"}:
        raise InputError(f"imatrix {file.path}: entry {name} is not F32: make it again")
    n_matrices = counts_info.n_elements
    if sums_info.n_elements % n_matrices:
        raise InputError(
            f"imatrix {file.path}: entry {name} has {sums_info.n_elements} sums for"
            f" {n_matrices} matrices: make it again"
        )
    counts = np.rint(_floats(file, counts_info))
    return ImatrixEntry(_floats(file, sums_info).reshape(n_matrices, -1), counts)


def _floats(file: GgufFile, info: TensorInfo) -> Floats:
    values = np.fromfile(file.path, dtype="<f4", count=info.n_elements, offset=info.offset)
    return values.astype(np.float32, copy=False)


def _read_legacy(path: Path, chunk_size: int | None) -> Imatrix:
    """Old entries are mean × chunks; with a chunk size they become sums over rows again."""
    read = imatrix_legacy.read_legacy(path)
    rows = np.float32(chunk_size or 1)
    with np.errstate(over="ignore", invalid="ignore"):  # read_imatrix refuses what comes of it
        entries = {
            name: ImatrixEntry(
                (entry.values * rows)[None, :],
                np.array([max(entry.n_chunks, 1)], np.float32) * rows,
            )
            for name, entry in read.entries.items()
        }
    return Imatrix(
        entries=MappingProxyType(entries),
        chunk_count=read.chunk_count,
        chunk_size=chunk_size or 0,
        datasets=(read.dataset,) if read.dataset else (),
        counts_known=False,
    )


def write_imatrix(
    imatrix: Imatrix, path: Path | str, format: Literal["gguf", "dat"] = "gguf"
) -> None:
    """Write an importance matrix that llama.cpp's tools read. Atomic; replaces an old file.

    The old format ('dat') loses the counts of experts, and with them which were never seen.

    Raises:
        StorageError: it cannot be written there.
        InputError: nothing in it that the old format can hold.
    """
    write_atomic(Path(path), _gguf_bytes(imatrix) if format == "gguf" else _legacy_bytes(imatrix))


def _gguf_bytes(imatrix: Imatrix) -> bytes:
    kv = (
        string_kv("general.type", "imatrix"),
        strings_kv(DATASETS, imatrix.datasets),
        scalar_kv(CHUNK_COUNT, UINT32, imatrix.chunk_count),
        scalar_kv(CHUNK_SIZE, UINT32, imatrix.chunk_size),
    )
    arrays: dict[str, Floats] = {}
    for name in sorted(imatrix.entries):
        if len((name + SUMS).encode()) > MAX_NAME_BYTES:
            raise InputError(f"the name {name} is too long for the GGUF form: write the .dat form")
        arrays[name + SUMS] = imatrix.entries[name].sums
        arrays[name + COUNTS] = imatrix.entries[name].counts[:, None]
    planned = [planned_tensor(name, a.shape[::-1], "F32") for name, a in arrays.items()]
    plan = plan_file(kv, planned)
    parts = [plan.header]
    for values in arrays.values():
        data = np.ascontiguousarray(values, "<f4").tobytes()
        parts += [data, bytes(-len(data) % plan.alignment)]
    return b"".join(parts)


def _legacy_bytes(imatrix: Imatrix) -> bytes:
    per_chunk = max(imatrix.chunk_size, 1)
    entries = {}
    for name in sorted(imatrix.entries):
        entry = imatrix.entries[name]
        if entry.counts.any():
            n_chunks = int(-(-int(entry.counts.max()) // per_chunk))
            values = mean_squares(entry).ravel() * np.float32(n_chunks)
            entries[name] = LegacyEntry(values, n_chunks)
    dataset = imatrix.datasets[-1] if imatrix.datasets else ""
    return imatrix_legacy.legacy_bytes(entries, imatrix.chunk_count, dataset)


def check_imatrix(imatrix: Imatrix, model: ModelFile) -> None:
    """Refuse an importance matrix of another model, by names and sizes.

    Raises:
        InputError: an entry has another size than its tensor, or too many tensors are unknown.
    """
    foreign = [name for name in imatrix.entries if not model.has(name)]
    for name, entry in imatrix.entries.items():
        if not model.has(name):
            continue
        info = model.tensor(name)
        expected = info.n_per_row * info.n_matrices
        if entry.sums.size != expected or len(entry.counts) not in (1, info.n_matrices):
            raise InputError(
                f"the imatrix has {entry.sums.size} values for {name}, but {model.name} needs"
                f" {expected}: it was made for another model, make one for this model"
            )
    if not imatrix.entries or len(foreign) > MAX_FOREIGN_SHARE * len(imatrix.entries):
        raise InputError(
            f"{len(foreign)} of {len(imatrix.entries)} entries of the imatrix name tensors that"
            f" {model.name} does not have{f' ({foreign[0]}, …)' if foreign else ''}: it was made"
            " for another model, make one for this model"
        )
