"""Weights into packed bytes: ggml's own row quantizers, with the imatrix, over threads.

The result is bit-identical to what llama_model_quantize writes: its quantizers work row by row,
so any split of the rows gives the same bytes. Memory is bounded by slices of `SLICE_BYTES` of
float32, and ctypes releases the interpreter lock while ggml works.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.ggml_types import BLOCK32, FLOAT, IQ, K, row_bytes, tensor_type
from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.imatrix_file import Imatrix
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tensors import HEADS
from bitwright.errors import EngineError, InputError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

SLICE_BYTES = 64 << 20
ERROR_ROWS = 256
DIGEST_BYTES = 16
# Part of every cache key. 1 (2026-10): first format, packed bytes + BLAKE2b digest.
PACK_VERSION = 1

# What ggml_quantize_chunk can write; it kills the process on any other type.
PACKABLE = frozenset({*FLOAT, *BLOCK32, *K, *IQ, "TQ1_0", "TQ2_0", "MXFP4"})


def quantize_rows(values: Floats, type_name: str, importance: Floats | None = None) -> Bytes:
    """Pack float32 rows (rows, n_per_row) with ggml; returns their bytes, flat.

    `importance` (n_per_row,) weighs the columns' squared errors. Raises InputError for a type that
    cannot be written, does not fit the row, or needs importance; EngineError when ggml's own check
    finds the result broken.
    """
    kind = tensor_type(type_name)
    if kind.name not in PACKABLE:
        raise InputError(f"nothing can be quantized to {kind.name}; choose another type")
    n_rows, n_per_row = values.shape
    packed = np.empty(n_rows * row_bytes(kind.name, n_per_row), np.uint8)
    source = np.ascontiguousarray(values, np.float32)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    if weights is None and lib.quantize_requires_imatrix(kind.id):
        raise InputError(f"{kind.name} cannot be packed without importance; give an imatrix")
    if weights is not None and weights.shape != (n_per_row,):
        raise InputError(f"importance has shape {weights.shape}, the rows need ({n_per_row},)")
    address = None if weights is None else weights.ctypes.data
    lib.quantize_chunk(
        kind.id, source.ctypes.data, packed.ctypes.data, 0, n_rows, n_per_row, address
    )
    if not lib.validate_row_data(kind.id, packed.ctypes.data, packed.nbytes):
        raise EngineError(
            f"packing to {kind.name} gave invalid blocks: the weights or the importance hold NaN, "
            "infinite or huge values; check the model file and the imatrix"
        )
    return packed


def to_float32(raw: Bytes, type_name: str, n_elements: int) -> Floats:
    """The values of packed bytes, flat (n_elements,); exact for F32, F16 and BF16."""
    kind = tensor_type(type_name)
    source = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    if source.nbytes != row_bytes(kind.name, n_elements):
        raise InputError(
            f"{n_elements} values of {kind.name} take {row_bytes(kind.name, n_elements)} bytes, "
            f"{source.nbytes} were given"
        )
    if kind.name == "F32":
        return source.view(np.float32)
    convert = lib.dequantizer(kind.id)
    if convert is None:
        raise InputError(f"{kind.name} cannot be turned into numbers; convert the model again")
    values = np.empty(n_elements, np.float32)
    convert(source.ctypes.data, values.ctypes.data, n_elements)
    return values


def row_slices(info: TensorInfo) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row in the whole tensor, rows) in file order; never across two matrices."""
    rows_per_matrix = info.n_rows // info.n_matrices
    step = max(1, SLICE_BYTES // (4 * info.n_per_row))
    for matrix in range(info.n_matrices):
        for row in range(0, rows_per_matrix, step):
            rows = min(step, rows_per_matrix - row)
            yield matrix, matrix * rows_per_matrix + row, rows


def convert_rows(
    raw: Bytes, info: TensorInfo, first: int, rows: int, type_name: str, importance: Floats | None
) -> Bytes:
    """Rows first … first+rows of a tensor's bytes `raw`, from its file type to `type_name`.

    InputError when they hold NaN or infinite weights: some packers turn those into zeros.
    """
    stride = row_bytes(info.type, info.n_per_row)
    source = raw[first * stride : (first + rows) * stride]
    values = to_float32(source, info.type, rows * info.n_per_row)
    if not np.isfinite(values).all():
        raise InputError(
            f"{info.name} holds NaN or infinite weights (rows {first} to {first + rows - 1}): the "
            "model file is damaged; get it again"
        )
    return quantize_rows(values.reshape(rows, info.n_per_row), type_name, importance)


class Packer:
    """Packs a model's tensors with one imatrix; whole tensors are cached in `cache_dir`."""

    def __init__(
        self,
        model: ModelFile,
        imatrix: Imatrix | None,
        *,
        cache_dir: Path | None = None,
        threads: int = 1,
    ) -> None:
        self.model = model
        self.imatrix = imatrix
        self.cache_dir = cache_dir
        self.threads = max(1, threads)

    def pack(self, name: str, type_name: str) -> Bytes:
        """The whole tensor at `type_name`, flat bytes, as llama_model_quantize would write it."""
        info = self.model.tensor(name)
        kind = tensor_type(type_name).name
        if kind == info.type:
            return np.array(self.model.raw(name))
        path = self._cache_path(name, kind)
        size = row_bytes(kind, info.n_per_row) * info.n_rows
        if path is not None and (cached := _read_cached(path, size)) is not None:
            return cached
        packed = np.concatenate(list(self.pack_slices(name, kind)))
        if path is not None:
            _write_cached(path, packed)
        return packed

    def pack_slices(self, name: str, type_name: str) -> Iterator[Bytes]:
        """The same bytes in order, at most `SLICE_BYTES` of float32 at a time."""
        info = self.model.tensor(name)
        kind = tensor_type(type_name).name
        raw = self.model.raw(name)
        if kind == info.type:
            stride = row_bytes(kind, info.n_per_row)
            for _, first, rows in row_slices(info):
                yield np.array(raw[first * stride : (first + rows) * stride])
            return
        importance = self.importance(name, kind)
        with ThreadPoolExecutor(self.threads) as pool:
            for matrix, first, rows in row_slices(info):
                weights = None if importance is None else importance[matrix]
                parts = np.array_split(np.arange(first, first + rows), min(self.threads, rows))
                jobs = [
                    pool.submit(convert_rows, raw, info, int(p[0]), len(p), kind, weights)
                    for p in parts
                ]
                yield np.concatenate([job.result() for job in jobs])

    def importance(self, name: str, type_name: str) -> Floats | None:
        """Importance (n_matrices, n_per_row) for packing, None for none; InputError if needed."""
        info = self.model.tensor(name)
        found = self._data(info)
        kind = tensor_type(type_name)
        if found is not None or not kind.needs_imatrix:
            return found
        if name not in HEADS:
            raise InputError(
                f"{name} at {kind.name} needs an imatrix and there is no data for this tensor; "
                "give an imatrix that covers it, or a type of 3 bits or more such as Q3_K"
            )
        # llama.cpp allows these tensors without data, but ggml itself does not: neutral weights.
        if lib.quantize_requires_imatrix(kind.id):
            return np.ones((info.n_matrices, info.n_per_row), np.float32)
        return None

    def _data(self, info: TensorInfo) -> Floats | None:
        """The imatrix's means for the tensor; InputError when they are of another size."""
        entry = None if self.imatrix is None else self.imatrix.entries.get(info.name)
        if self.imatrix is None or entry is None:
            return None
        if entry.sums.size != info.n_matrices * info.n_per_row:
            raise InputError(
                f"the imatrix has {entry.sums.size} values for {info.name}, the tensor needs "
                f"{info.n_matrices} × {info.n_per_row}: it was made for another model"
            )
        return self.imatrix.importance(info.name, info.n_per_row)

    def relative_error(self, name: str, type_name: str, *, max_rows: int = ERROR_ROWS) -> float:
        """Σ importance·(w−ŵ)² / Σ importance·w² over at most `max_rows` evenly spread rows.

        Without data for the tensor the importance is one everywhere. 0.0 for an all-zero tensor.
        """
        info = self.model.tensor(name)
        found = self._data(info)
        ones = np.ones(info.n_per_row, np.float32)
        rows_per_matrix = info.n_rows // info.n_matrices
        count = min(max_rows, info.n_rows)
        picked = np.linspace(0, info.n_rows - 1, count).round().astype(np.int64)
        stride = row_bytes(info.type, info.n_per_row)
        raw = self.model.raw(name).reshape(info.n_rows, stride)
        error = total = 0.0
        for matrix in np.unique(picked // rows_per_matrix):
            rows = raw[picked[picked // rows_per_matrix == matrix]]
            weights = ones if found is None else found[matrix]
            w = to_float32(rows, info.type, rows.shape[0] * info.n_per_row)
            w = w.reshape(-1, info.n_per_row)
            packed = quantize_rows(w, type_name, weights)
            difference = w - to_float32(packed, type_name, w.size).reshape(w.shape)
            error += float((np.square(difference, dtype=np.float64) @ weights).sum())
            total += float((np.square(w, dtype=np.float64) @ weights).sum())
        return error / total if total > 0 else 0.0

    def _cache_path(self, name: str, type_name: str) -> Path | None:
        if self.cache_dir is None:
            return None
        importance = self.importance(name, type_name)
        key = hashlib.sha256()
        parts = (PACK_VERSION, lib.backend_version(), self.model.sha256(), name, type_name)
        key.update(repr(parts).encode())
        key.update(b"" if importance is None else importance.tobytes())
        return self.cache_dir / f"{key.hexdigest()}.packed"


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _read_cached(path: Path, size: int) -> Bytes | None:
    """The cached bytes; None when absent, or damaged, which only means packing again."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    packed = np.frombuffer(content, np.uint8, count=min(size, len(content)))
    whole = len(content) == size + DIGEST_BYTES and _digest(packed) == content[size:]
    return packed if whole else None


def _write_cached(path: Path, packed: Bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(packed.data)
        file.write(_digest(packed))
    temporary.replace(path)
