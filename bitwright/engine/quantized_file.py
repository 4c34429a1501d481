"""Write a quantized model: temporary file → fsync → re-read → rename, tensor by tensor."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from bitwright.engine.atomic import (
    check_folder,
    check_space,
    publish,
    remove_leftovers,
    storage_errors,
    temp_path,
)
from bitwright.engine.block_scales import first_bad_block
from bitwright.engine.file_plan import (
    Provenance,
    output_paths,
    plan_quantized,
    predict_size,
    tensor_file_bytes,
)
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.gguf_file import padded, read_gguf
from bitwright.engine.gguf_header import PlannedFile, PlannedTensor
from bitwright.engine.model_file import ModelFile
from bitwright.errors import EngineError, InputError, StorageError

__all__ = ["Packer", "Provenance", "predict_size", "tensor_file_bytes", "write_quantized"]

SLICE_BYTES = 16 << 20

Progress = Callable[[int, int, str], None]  # bytes done, bytes of all files, tensor


class Packer(Protocol):
    """What the writer needs: a tensor's packed bytes, in order, a bounded slice at a time."""

    def pack_slices(self, name: str, type_name: str) -> Iterator[npt.NDArray[np.uint8]]:
        """Packed rows of the tensor at that type."""


def write_quantized(
    model: ModelFile,
    layout: Mapping[str, str],
    out: Path,
    *,
    packer: Packer,
    ftype: int,
    provenance: Provenance | None,
    keep_split: bool = False,
    overwrite: bool = False,
    protect: Sequence[Path] = (),
    progress: Progress | None = None,
) -> tuple[Path, ...]:
    """Write the model with the types of a layout, and return the files.

    Tensors that the layout leaves out, and those that have their type already, are copied. Without
    provenance the file is what llama_model_quantize writes for the same types. On any failure the
    final path is absent, or the old file is untouched.

    Args:
        ftype: number of the file type, for general.file_type.
        keep_split: write as many shards as the model has, named after ``out``.
        protect: other inputs (imatrix, corpora) that must not be overwritten.

    Raises:
        ConfigError, InputError: the layout does not fit the model.
        StorageError: ``out`` is an input, exists, or cannot be written.
        EngineError: the written file differs from the plan, or holds values that are not finite.
    """
    plans = plan_quantized(model, layout, provenance, ftype=ftype, keep_split=keep_split)
    paths = output_paths(out, len(plans))
    total = sum(plan.size_bytes for plan in plans)
    inputs = (*(shard.path for shard in model.shards), *protect)
    for path in paths:
        _check_target(path, inputs, overwrite=overwrite)
    with storage_errors(out), ExitStack() as cleanup:
        for path in paths:
            remove_leftovers(path)
        check_space(out, total)
        writer = _Writer(model, packer, total, progress)
        for path, plan in zip(paths, plans, strict=True):
            temp = temp_path(path)
            cleanup.callback(temp.unlink, missing_ok=True)
            writer.write(temp, plan)
            verify_file(temp, plan)
        for path in paths:
            _check_target(path, inputs, overwrite=overwrite)
            publish(temp_path(path), path)
    return paths


def _check_target(path: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse to write over an input, however its path is spelled or linked."""
    check_folder(path)
    if not os.path.lexists(path):
        return
    for given in inputs:
        if given.exists() and path.exists() and path.samefile(given):
            raise StorageError(
                f"the output {path} is the same file as the input {given}: choose another name"
            )
    if not overwrite:
        raise StorageError(f"{path} exists already: choose another name, or pass --overwrite")


class _Writer:
    """Writes planned files one after the other and counts the bytes for the progress."""

    def __init__(
        self, model: ModelFile, packer: Packer, total: int, progress: Progress | None
    ) -> None:
        self.model = model
        self.packer = packer
        self.total = total
        self.progress = progress
        self.done = 0

    def write(self, path: Path, plan: PlannedFile) -> None:
        """Write one file and flush it to the disk."""
        with path.open("wb") as file:
            file.write(plan.header)
            self.done += len(plan.header)
            for tensor in plan.tensors:
                self._write_tensor(file, tensor, plan.alignment)
            file.flush()
            os.fsync(file.fileno())

    def _write_tensor(self, file: BinaryIO, tensor: PlannedTensor, alignment: int) -> None:
        written = 0
        for part in self._slices(tensor):
            file.write(part.data)
            written += part.nbytes
        if written != tensor.size_bytes:
            raise EngineError(
                f"packing {tensor.name} to {tensor.type} gave {written} bytes instead of"
                f" {tensor.size_bytes}: this is a fault of bitwright, report it"
            )
        padding = padded(written, alignment) - written
        file.write(bytes(padding))
        self.done += written + padding
        if self.progress:
            self.progress(self.done, self.total, tensor.name)

    def _slices(self, tensor: PlannedTensor) -> Iterator[npt.NDArray[np.uint8]]:
        if tensor.type != self.model.tensor(tensor.name).type:
            for packed in self.packer.pack_slices(tensor.name, tensor.type):
                yield np.ascontiguousarray(packed)
            return
        raw = self.model.raw(tensor.name)
        for start in range(0, raw.size, SLICE_BYTES):
            yield raw[start : start + SLICE_BYTES]


def verify_file(path: Path, plan: PlannedFile) -> None:
    """Re-read a written file: size, every name, shape and type as planned, no scale NaN or Inf.

    Raises:
        EngineError: with the first difference.
    """
    size_bytes = path.stat().st_size
    if size_bytes != plan.size_bytes:
        raise EngineError(f"{path} has {size_bytes} bytes instead of {plan.size_bytes}")
    try:
        tensors = read_gguf(path).tensors
    except InputError as error:
        raise EngineError(f"the written file cannot be read again: {error}") from error
    if len(tensors) != len(plan.tensors):
        raise EngineError(f"{path} has {len(tensors)} tensors instead of {len(plan.tensors)}")
    for found, planned in zip(tensors, plan.tensors, strict=True):
        if (found.name, found.type, found.size_bytes) != (
            *(planned.name, planned.type),
            planned.size_bytes,
        ):
            raise EngineError(
                f"{path}: {found.name} was written as {found.type}, the layout says"
                f" {planned.name}={planned.type}: the file was discarded"
            )
        raw = np.memmap(path, np.uint8, "r", found.offset, (found.size_bytes,))
        _check_finite(raw, found.name, found.type)


def _check_finite(raw: npt.NDArray[np.uint8], name: str, type_name: str) -> None:
    block_bytes = TYPES[type_name].block_bytes
    step = SLICE_BYTES // block_bytes * block_bytes
    for start in range(0, raw.size, step):
        bad = first_bad_block(raw[start : start + step], type_name)
        if bad is not None:
            raise EngineError(
                f"tensor {name} ({type_name}) has a scale that is NaN or infinite in block"
                f" {start // block_bytes + bad}: the weights or the imatrix are broken, check them"
            )
