"""Pins: types that the user decides, by exact tensor name or by glob."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bitwright.allocator.option_set import listed
from bitwright.engine.ggml_types import fits_row, tensor_type
from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import PACKABLE
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True)
class Pinned:
    """Tensor → type, and a line for each pin: what it matched, what a later one took over."""

    types: Mapping[str, str]
    notes: tuple[str, ...]


def resolve_pins(pins: Mapping[str, str], model: ModelFile) -> Pinned:
    """Apply pins in their order; where several match a tensor, the last one holds.

    A glob leaves tensors that are never quantized alone; naming only such tensors is an error.

    Raises:
        ConfigError: a pin matches nothing, names tensors that stay as they are, or gives a type
            that does not exist or does not fit the rows (the message says which types do).
    """
    by: dict[str, str] = {}
    types: dict[str, str] = {}
    notes: list[str] = []
    for pattern, wanted in pins.items():
        kind = _pin_type(pattern, wanted)
        matched, kept = _matches(pattern, model)
        _check_rows(pattern, kind, matched)
        over = dict.fromkeys(by[t.name] for t in matched if t.name in by)
        notes.append(_note(pattern, kind, len(matched), kept, list(over)))
        for info in matched:
            types[info.name], by[info.name] = kind, pattern
    return Pinned(types, tuple(notes))


def _pin_type(pattern: str, wanted: str) -> str:
    try:
        kind = tensor_type(wanted).name
    except InputError as error:
        raise ConfigError(f"the pin {pattern!r} = {wanted!r}: {error}") from None
    if kind not in PACKABLE:
        raise ConfigError(
            f"the pin {pattern!r} asks for {kind}, which llama.cpp cannot pack: use one of"
            f" {', '.join(sorted(PACKABLE))}"
        )
    return kind


def _matches(pattern: str, model: ModelFile) -> tuple[list[TensorInfo], int]:
    """Quantizable tensors that the pin means, and how many others it would match as well."""
    found = [t for t in model.tensors if t.name == pattern]
    found = found or [t for t in model.tensors if fnmatchcase(t.name, pattern)]
    if not found:
        raise ConfigError(
            f"the pin {pattern!r} matches no tensor of {model.name}: give an exact name or a glob"
            " such as 'blk.*.ffn_down.weight' (`bitwright inspect --json` lists the tensors)"
        )
    quantizable = [t for t in found if is_quantizable(t, model.arch)]
    if not quantizable:
        raise ConfigError(
            f"the pin {pattern!r} names only tensors that are never quantized"
            f" ({listed([t.name for t in found])}): norms, routers, convolutions and the like"
            " stay as they are, remove the pin"
        )
    return quantizable, len(found) - len(quantizable)


def _check_rows(pattern: str, kind: str, matched: list[TensorInfo]) -> None:
    misfits = [t for t in matched if not fits_row(kind, t.n_per_row)]
    if not misfits:
        return
    fitting = sorted(
        (name for name in PACKABLE if all(fits_row(name, t.n_per_row) for t in misfits)),
        key=lambda name: (tensor_type(name).bpw, name),
    )
    rows = ", ".join(str(n) for n in sorted({t.n_per_row for t in misfits}))
    raise ConfigError(
        f"the pin {pattern!r} = {kind} does not fit {len(misfits)} tensor(s) with rows of {rows}"
        f" ({listed([t.name for t in misfits])}): {kind} has blocks of"
        f" {tensor_type(kind).block_size}; these fit: {', '.join(fitting)}"
    )


def _note(pattern: str, kind: str, n_matched: int, n_kept: int, over: list[str]) -> str:
    note = f"pin {pattern!r} = {kind} matches {n_matched} tensor(s)"
    if n_kept:
        note += f", and {n_kept} that are never quantized and stay as they are"
    if over:
        note += f"; it overrides the earlier pin(s) {', '.join(map(repr, over))} where both match"
    return note
