"""What a quantized file will look like, to the byte, before any of it is written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bitwright.engine.ggml_types import fallback_type, fits_row, row_bytes, tensor_type
from bitwright.engine.gguf_file import DEFAULT_ALIGNMENT, TensorInfo, padded
from bitwright.engine.gguf_header import PlannedFile, PlannedTensor, plan_file, planned_tensor
from bitwright.engine.gguf_values import (
    BOOL,
    FLOAT64,
    INT32,
    INT64,
    UINT16,
    UINT32,
    KvEntry,
    scalar_kv,
    string_kv,
)
from bitwright.engine.model_file import ModelFile
from bitwright.engine.shards import (
    SPLIT_COUNT,
    SPLIT_KEYS,
    SPLIT_NO,
    SPLIT_TENSORS,
    base_name,
    shard_name,
)
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import ConfigError, InputError

QUANTIZATION_VERSION = "general.quantization_version"
FILE_TYPE = "general.file_type"
GGML_QNT_VERSION = 2  # of the pinned build
OWN_PREFIX = "bitwright."
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Provenance:
    """Entries 'bitwright.*' of the new file.

    Text that depends on the layout (its hash) must always have the same length, or the predicted
    size would not be the written one.
    """

    entries: tuple[tuple[str, str | int | float], ...]


def tensor_file_bytes(info: TensorInfo, type_name: str, alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes that a tensor takes in a file at that type, padding included.

    Raises:
        InputError: the type does not fit its rows.
    """
    return padded(info.n_rows * row_bytes(type_name, info.n_per_row), alignment)


def resolve_types(model: ModelFile, layout: Mapping[str, str]) -> dict[str, str]:
    """The type of every tensor of the new file: the layout's, else the one it has.

    Raises:
        InputError: the layout names a tensor that the model lacks, or an unknown type.
        ConfigError: it changes a tensor that is never quantized, or a type does not fit the row.
    """
    unknown = [name for name in layout if not model.has(name)]
    if unknown:
        raise InputError(
            f"the layout names {len(unknown)} tensor(s) that {model.name} does not have"
            f" ({_listed(unknown)}): it was made for another model"
        )
    types = {t.name: tensor_type(layout.get(t.name, t.type)).name for t in model.tensors}
    changed = [t for t in model.tensors if types[t.name] != t.type]
    fixed = [t.name for t in changed if not is_quantizable(t, model.arch)]
    if fixed:
        raise ConfigError(
            f"the layout gives {len(fixed)} tensor(s) a type that must stay as they are"
            f" ({_listed(fixed)}): norms, routers, convolutions and the like are never quantized,"
            " leave them out"
        )
    misfits = [
        f"{t.name}={types[t.name]} → {fallback_type(types[t.name], t.n_per_row)}"
        for t in changed
        if not fits_row(types[t.name], t.n_per_row)
    ]
    if misfits:
        raise ConfigError(
            f"{len(misfits)} tensor(s) have rows that their type's blocks do not divide; llama.cpp"
            f" would use another type, so name it yourself: {_listed(misfits)}"
        )
    return types


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def plan_quantized(
    model: ModelFile,
    layout: Mapping[str, str],
    provenance: Provenance | None,
    *,
    ftype: int = 0,
    keep_split: bool = False,
) -> tuple[PlannedFile, ...]:
    """The files to write, as llama_model_quantize lays them out, then the provenance.

    Metadata: the model's own without file type, quantization version and split keys; then those
    two; then split keys, if any; then the provenance. Tensors: in the order of `ModelFile`; kept
    shards keep the order of their files.
    """
    types = resolve_types(model, layout)
    own = _provenance_kv(provenance)
    kv = (*_model_kv(model, ftype, replaced={entry.key for entry in own}),)
    if not keep_split or len(model.shards) == 1:
        return (plan_file((*kv, *own), _planned(model.tensors, types), model.alignment),)
    plans = []
    for index, shard in enumerate(model.shards):
        split = (
            scalar_kv(SPLIT_NO, UINT16, index),
            scalar_kv(SPLIT_COUNT, UINT16, len(model.shards)),
            scalar_kv(SPLIT_TENSORS, INT32, len(model.tensors)),
        )
        entries = (*kv, *split, *own) if index == 0 else split
        alignment = model.alignment if index == 0 else DEFAULT_ALIGNMENT
        plans.append(plan_file(entries, _planned(shard.tensors, types), alignment))
    return tuple(plans)


def _model_kv(model: ModelFile, ftype: int, replaced: set[str]) -> Iterable[KvEntry]:
    left_out = SPLIT_KEYS | {QUANTIZATION_VERSION, FILE_TYPE} | replaced
    for entry in model.shards[0].kv.values():
        if entry.key not in left_out:
            yield entry
    yield scalar_kv(QUANTIZATION_VERSION, UINT32, GGML_QNT_VERSION)
    yield scalar_kv(FILE_TYPE, UINT32, ftype)


def _planned(tensors: Iterable[TensorInfo], types: Mapping[str, str]) -> tuple[PlannedTensor, ...]:
    return tuple(planned_tensor(t.name, t.shape, types[t.name]) for t in tensors)


def _provenance_kv(provenance: Provenance | None) -> tuple[KvEntry, ...]:
    entries = provenance.entries if provenance else ()
    foreign = [key for key, _ in entries if not key.startswith(OWN_PREFIX)]
    if foreign or len(dict(entries)) != len(entries):
        raise ConfigError(
            f"provenance keys begin with {OWN_PREFIX!r} and occur once; given:"
            f" {_listed([key for key, _ in entries])}"
        )
    return tuple(_own_kv(key, value) for key, value in entries)


def _own_kv(key: str, value: str | float) -> KvEntry:
    """Numbers get the widest type, so that their size never depends on their value."""
    if isinstance(value, str):
        return string_kv(key, value)
    type_id = BOOL if isinstance(value, bool) else INT64 if isinstance(value, int) else FLOAT64
    return scalar_kv(key, type_id, value)


def predict_size(
    model: ModelFile,
    layout: Mapping[str, str],
    provenance: Provenance | None,
    *,
    keep_split: bool = False,
) -> int:
    """Bytes of the file (of all shards together) that `write_quantized` would write."""
    plans = plan_quantized(model, layout, provenance, keep_split=keep_split)
    return sum(plan.size_bytes for plan in plans)


def output_paths(out: Path, n_files: int) -> tuple[Path, ...]:
    """``out`` itself, or the shard names made from it."""
    if n_files == 1:
        return (out,)
    prefix = base_name(out)
    return tuple(out.with_name(shard_name(prefix, index, n_files)) for index in range(n_files))
