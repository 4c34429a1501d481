"""What may be chosen for one model, what is fixed, and what every choice weighs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bitwright.allocator.sizes import FileSizes
from bitwright.engine.ggml_types import TYPES, fallback_type
from bitwright.engine.model_file import ModelFile
from bitwright.errors import BudgetError

SHOWN = 5

# Why a tensor is no free choice.
PLAIN, PINNED, TINY, UNMEASURED = "never quantized", "pinned", "tiny", "not measured"


@dataclass(frozen=True, slots=True)
class Substitution:
    """A ladder type that a tensor's rows cannot take, and what is offered in its place."""

    tensor: str
    wanted: str
    used: str


@dataclass(frozen=True, slots=True)
class OptionSet:
    """Choices and sizes of one model.

    Attributes:
        tensors: those that are chosen for, in the model's order.
        offered: their types, from few to many bits, at least one each.
        fixed: tensor → type of all others, those that are never quantized included.
        reasons: fixed tensor → why.
        ladder: what was asked for, from few to many bits.
        notes: what the user should know about pins, replaced types and fixed tensors.
    """

    model: ModelFile
    tensors: tuple[str, ...]
    offered: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, str]
    reasons: Mapping[str, str]
    ladder: tuple[str, ...]
    substitutions: tuple[Substitution, ...]
    notes: tuple[str, ...]
    sizes: FileSizes

    @property
    def fixed_quantizable(self) -> dict[str, str]:
        """Fixed tensors without those that are never quantized."""
        return {n: t for n, t in self.fixed.items() if self.reasons[n] != PLAIN}

    def complete(self, types: Mapping[str, str]) -> dict[str, str]:
        """A layout of all quantizable tensors, in the model's order: ``types`` over what is fixed.

        Tensors in neither keep their own type.
        """
        given = {**self.fixed, **types}
        return {n: given.get(n, self.model.tensor(n).type) for n in self.sizes.alignment}

    def option_bytes(self, name: str, type_name: str) -> int:
        """Bytes of one tensor in the file at that type, padding included."""
        return self.sizes.tensor_bytes(name, type_name)

    def layout_bytes(self, types: Mapping[str, str]) -> int:
        """Whole-file bytes of ``complete(types)``: what `predict_size` gives for it."""
        return self.sizes.total_bytes(self.complete(types))

    @property
    def fixed_bytes(self) -> int:
        """Whole-file bytes that no choice changes."""
        free = sum(self.option_bytes(n, self.model.tensor(n).type) for n in self.tensors)
        return self.layout_bytes({}) - free

    @property
    def smallest_bytes(self) -> int:
        """Whole-file bytes of the smallest layout."""
        return self.layout_bytes(self.smallest_layout())

    @property
    def largest_bytes(self) -> int:
        """Whole-file bytes when every tensor has its largest type."""
        return self.layout_bytes({n: self._by_size(n)[-1] for n in self.tensors})

    def smallest_layout(self) -> dict[str, str]:
        """Every tensor at its smallest type, fixed ones as they are."""
        return self.complete({n: self._by_size(n)[0] for n in self.tensors})

    def _by_size(self, name: str) -> list[str]:
        return sorted(self.offered[name], key=lambda t: self.option_bytes(name, t))

    def nearest(self, name: str, type_name: str) -> str:
        """What a tensor gets when all are asked to take one ladder type.

        That type, else its replacement, else the next larger one offered, else the largest.
        """
        offered = self.offered[name]
        for wanted in (type_name, fallback_type(type_name, self.model.tensor(name).n_per_row)):
            if wanted in offered:
                return wanted
        larger = [t for t in offered if TYPES[t].bpw >= TYPES[type_name].bpw]
        return larger[0] if larger else offered[-1]

    def require_feasible(self, budget_bytes: int) -> None:
        """Check that some layout fits.

        Raises:
            BudgetError: with the smallest possible size and what it is made of.
        """
        least = self.smallest_bytes
        if budget_bytes >= least:
            return
        raise BudgetError(
            f"the budget of {budget_bytes:,} bytes ({self._bpw(budget_bytes):.3f} bpw) is"
            f" {least - budget_bytes:,} bytes under the smallest layout of {self.model.name}:"
            f" {least:,} bytes ({self._bpw(least):.3f} bpw). It holds {self._floor_parts()}."
            " Raise the budget, or take a ladder with smaller types, or fewer pins"
        )

    def freedom_notes(self, budget_bytes: int) -> tuple[str, ...]:
        """What to say of a budget that leaves no choice, or more bytes than can be used."""
        least, most = self.smallest_bytes, self.largest_bytes
        if budget_bytes >= most:
            return (
                f"the largest layout takes {most:,} bytes: {budget_bytes - most:,} bytes of the"
                " budget stay unused",
            )
        if budget_bytes < least + self._smallest_step():
            return (
                f"no freedom: the smallest layout takes {least:,} bytes, and the budget allows no"
                " larger type anywhere",
            )
        return ()

    def _smallest_step(self) -> int:
        steps = []
        for name in self.tensors:
            sizes = sorted({self.option_bytes(name, t) for t in self.offered[name]})
            steps += [large - small for small, large in pairwise(sizes)][:1]
        return min(steps, default=1)

    def _bpw(self, size_bytes: int) -> float:
        return 8 * size_bytes / sum(t.n_elements for t in self.model.tensors)

    def _floor_parts(self) -> str:
        parts = [f"{self.sizes.header_bytes:,} bytes of metadata"]
        free = sum(self.option_bytes(n, self._by_size(n)[0]) for n in self.tensors)
        parts.append(f"{free:,} bytes of {len(self.tensors)} tensors at their smallest types")
        parts.append(
            f"{self.sizes.plain_bytes:,} bytes of"
            f" {sum(why == PLAIN for why in self.reasons.values())} tensors that are {PLAIN}"
        )
        for reason in (PINNED, TINY, UNMEASURED):
            names = [n for n, why in self.reasons.items() if why == reason]
            if names:
                size = sum(self.option_bytes(n, self.fixed[n]) for n in names)
                largest = sorted(names, key=lambda n: -self.option_bytes(n, self.fixed[n]))
                shown = [f"{n}={self.fixed[n]}" for n in largest]
                parts.append(f"{size:,} bytes of {len(names)} {reason} ({listed(shown)})")
        return "; ".join(parts)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
