"""What the solver may choose from: the types offered to each tensor, and all that is fixed.

A tensor is fixed when it is never quantized, pinned, tiny, or cannot be measured; otherwise it is
offered the types of the ladder that its rows can take and its importance allows, each once.
"""

from collections.abc import Collection, Mapping, Sequence

from bitwright.allocator.option_set import (
    PINNED,
    PLAIN,
    TINY,
    UNMEASURED,
    OptionSet,
    Substitution,
    listed,
)
from bitwright.allocator.pins import Pinned, resolve_pins
from bitwright.allocator.rules import Rules, load_rules
from bitwright.allocator.sizes import FileSizes, file_sizes
from bitwright.engine.ggml_types import FLOAT, TYPES, fallback_type, tensor_type
from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_coverage import require_covered, uncovered
from bitwright.engine.model_file import ModelFile
from bitwright.engine.quantized_file import Provenance
from bitwright.engine.tensors import is_quantizable, role
from bitwright.errors import ConfigError

__all__ = ["OptionSet", "Substitution", "build_options"]

PER_LAYER = "per_layer_token_embd"


def build_options(
    model: ModelFile,
    *,
    ladder: Sequence[str],
    pins: Mapping[str, str] | None = None,
    imatrix: Imatrix | None = None,
    assume_imatrix: bool = False,
    measured: Collection[str] | None = None,
    provenance: Provenance | None = None,
    keep_split: bool = False,
    safe_type: str | None = None,
) -> OptionSet:
    """Work out what may be chosen, before anything is computed.

    Args:
        ladder: types that may be used, in any order.
        pins: exact tensor name or glob → type; the last match holds.
        assume_imatrix: an imatrix covering everything will be there when the file is written.
        measured: tensors whose damage is known; None when nothing is measured yet and all will be.
        safe_type: type of tensors that cannot be measured, unless names.toml has one for the
            role; default: its 'other'.

    Raises:
        ConfigError: a pin that cannot hold, or one that needs importance which is not there.
        InputError: a ladder type that does not exist.
    """
    rules = load_rules()
    if safe_type is not None:
        rules = rules.model_copy(update={"unmeasured": {**rules.unmeasured, "other": safe_type}})
    pinned = resolve_pins(pins or {}, model)
    if not assume_imatrix or imatrix is not None:
        require_covered(pinned.types, imatrix)
    steps = sorted({tensor_type(t).name for t in ladder}, key=lambda t: (TYPES[t].bpw, t))
    if not steps:
        raise ConfigError("the ladder holds no types: name at least one")
    builder = _Builder(model, tuple(steps), rules, imatrix, assume_imatrix, measured)
    for info in model.tensors:
        builder.add(info, pinned.types.get(info.name))
    return builder.finish(pinned, file_sizes(model, provenance, keep_split=keep_split))


class _Builder:
    """Collects choices, fixed tensors and what there is to say about them."""

    def __init__(
        self,
        model: ModelFile,
        ladder: tuple[str, ...],
        rules: Rules,
        imatrix: Imatrix | None,
        assume_imatrix: bool,
        measured: Collection[str] | None,
    ) -> None:
        self.model, self.ladder, self.rules = model, ladder, rules
        self.imatrix, self.assume_imatrix, self.measured = imatrix, assume_imatrix, measured
        self.offered: dict[str, tuple[str, ...]] = {}
        self.fixed: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.substitutions: list[Substitution] = []
        self.without_importance: list[str] = []

    def add(self, info: TensorInfo, pin: str | None) -> None:
        """Decide whether a tensor is chosen for, and among which types."""
        if not is_quantizable(info, self.model.arch):
            self._fix(info, info.type, PLAIN)
        elif pin is not None:
            self._fix(info, pin, PINNED)
        elif info.type in FLOAT and info.n_elements < self.rules.tiny.below_weights:
            self._fix(info, self.rules.tiny.type, TINY)
        elif self.measured is not None and info.name not in self.measured:
            self._fix(info, self._safe(info), UNMEASURED)
        else:
            self.offered[info.name] = self._offer(info)

    def _fix(self, info: TensorInfo, type_name: str, reason: str) -> None:
        self.fixed[info.name], self.reasons[info.name] = type_name, reason

    def _safe(self, info: TensorInfo) -> str:
        by_role = self.rules.unmeasured
        wanted = tensor_type(by_role.get(role(info.name), by_role["other"])).name
        return _no_larger(info, fallback_type(wanted, info.n_per_row))

    def _offer(self, info: TensorInfo) -> tuple[str, ...]:
        allowed = [t for t in self.ladder if self._importance_allows(info.name, t)]
        if len(allowed) < len(self.ladder):
            self.without_importance.append(info.name)
        if not allowed:
            return (self._safe(info),)
        found: dict[str, None] = {}
        for wanted in allowed:
            used = fallback_type(wanted, info.n_per_row)
            if used != wanted:
                self.substitutions.append(Substitution(info.name, wanted, used))
            found[_no_larger(info, used)] = None
        return tuple(sorted(found, key=lambda t: (TYPES[t].bpw, t)))

    def _importance_allows(self, name: str, type_name: str) -> bool:
        if self.imatrix is None and self.assume_imatrix:
            return True
        return not uncovered({name: type_name}, self.imatrix)

    def finish(self, pinned: Pinned, sizes: FileSizes) -> OptionSet:
        """The record, with its notes."""
        notes = (
            *pinned.notes,
            *self._fixed_notes(),
            *self._importance_notes(),
            *self._substitution_notes(),
            *self._embedding_notes(sizes),
        )
        return OptionSet(
            model=self.model,
            tensors=tuple(self.offered),
            offered=self.offered,
            fixed=self.fixed,
            reasons=self.reasons,
            ladder=self.ladder,
            substitutions=tuple(self.substitutions),
            notes=notes,
            sizes=sizes,
        )

    def _fixed_notes(self) -> list[str]:
        tiny = [n for n, why in self.reasons.items() if why == TINY]
        unmeasured = [
            f"{n}={self.fixed[n]}" for n, why in self.reasons.items() if why == UNMEASURED
        ]
        notes = []
        if tiny:
            notes.append(
                f"{len(tiny)} tensor(s) of fewer than {self.rules.tiny.below_weights:,} weights"
                f" go to {self.rules.tiny.type}: {listed(tiny)}"
            )
        if unmeasured:
            notes.append(
                f"{len(unmeasured)} tensor(s) are not executed by calibration text and were not"
                f" measured; they get a safe type: {listed(unmeasured)}"
            )
        return notes

    def _importance_notes(self) -> list[str]:
        if not self.without_importance:
            return []
        return [
            f"{len(self.without_importance)} tensor(s) have no importance, or too little, and are"
            f" not offered the types that need it: {listed(self.without_importance)}"
        ]

    def _substitution_notes(self) -> list[str]:
        groups: dict[tuple[str, str], list[str]] = {}
        for one in self.substitutions:
            groups.setdefault((one.wanted, one.used), []).append(one.tensor)
        return [
            f"{wanted} does not fit the rows of {len(names)} tensor(s), which are offered {used}"
            f" instead ({TYPES[wanted].bpw:.2f} → {TYPES[used].bpw:.2f} bpw): {listed(names)}"
            for (wanted, used), names in groups.items()
        ]

    def _embedding_notes(self, sizes: FileSizes) -> list[str]:
        notes = []
        if self.model.is_tied:
            notes.append(
                "tied: the token embedding is also the output head; it is stored and counted once"
            )
        for name in self.model.by_name:
            if role(name) == PER_LAYER and name in sizes.alignment:
                share = self.model.tensor(name).size_bytes / self.model.size_bytes
                types = self.offered.get(name) or (self.fixed[name],)
                notes.append(
                    f"per-layer embedding {name}: {share:.1%} of the model's bytes, may become"
                    f" {', '.join(types)}"
                )
        return notes


def _no_larger(info: TensorInfo, type_name: str) -> str:
    """The type, or the tensor's own where it is quantized already to as many bits or fewer."""
    own = TYPES[info.type]
    return own.name if own.is_quantized and own.bpw <= TYPES[type_name].bpw else type_name
