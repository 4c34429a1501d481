"""The imatrices that a study may pack with: the task:general mix as one of its variables.

The share of the target is a continuous variable for the study, but each share packs the model
anew, so it is taken to the nearest of a few. The rest keeps the proportions that were declared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwright.engine.imatrix import Imatrix
from bitwright.workflows.context import RunContext
from bitwright.workflows.spec import Mix
from bitwright.workflows.stage_imatrix import Imatrices, mixed_imatrix

TASK = "task"
SAME = 0.01  # shares as near as this are one


@dataclass(frozen=True, slots=True)
class ChosenMix:
    """The imatrices to go on with, their key, and what was measured (None without candidates).

    mix: that of the task imatrix.
    """

    imatrices: Imatrices
    key: str
    record: Mapping[str, Any] | None
    mix: Mix


@dataclass(frozen=True, slots=True)
class Mixes:
    """Imatrices by name, the declared one first, and what each is made of.

    shares: name → the target's share, 0 to 1.
    """

    imatrices: Mapping[str, Imatrix]
    parts: Mapping[str, Mix]
    shares: Mapping[str, float]

    @property
    def vary(self) -> bool:
        """Whether there is more than the declared one."""
        return len(self.imatrices) > 1

    @property
    def others(self) -> tuple[str, ...]:
        """The names of all but the declared one."""
        return tuple(name for name in self.imatrices if name != TASK)

    def nearest(self, share: float) -> str:
        """The name of the imatrix whose share is nearest; of equals the first."""
        return min(self.shares, key=lambda name: abs(self.shares[name] - share))


def make_mixes(ctx: RunContext, task: Imatrix, declared: Mix) -> Mixes:
    """The declared task imatrix, and one per share that a study is to try beside it."""
    target, study = ctx.spec.target, ctx.spec.study
    parts = {TASK: dict(declared)}
    if study.trials or study.minutes:
        parts |= other_mixes(declared, ctx.spec.imatrix.general, target, study.imatrix_shares)
    imatrices = {
        name: task if name == TASK else mixed_imatrix(ctx, mix) for name, mix in parts.items()
    }
    return Mixes(imatrices, parts, {name: share_of(mix, target) for name, mix in parts.items()})


def other_mixes(
    declared: Mix, general: Mix, target: str, shares: tuple[float, ...]
) -> dict[str, dict[str, float]]:
    """Name → mix for each share; what is not the target is as declared, or as in ``general``.

    Nothing where there is no other category, and no share that is the declared one.
    """
    rest = _without(declared, target) or _without(general, target)
    found = {}
    for share in shares if rest else ():
        if abs(share - share_of(declared, target)) > SAME:
            parts = {target: share} | {c: (1 - share) * part for c, part in rest.items()}
            found[f"mix-{100 * share:g}"] = {c: part for c, part in parts.items() if part > 0}
    return found


def share_of(mix: Mix, category: str) -> float:
    """The category's part of a mix, 0 to 1."""
    return mix.get(category, 0.0) / sum(mix.values())


def _without(mix: Mix, target: str) -> dict[str, float]:
    others = {c: part for c, part in mix.items() if c != target}
    total = sum(others.values())
    return {c: part / total for c, part in others.items()}
