"""The exact solver: one type per tensor, least damage, within the bytes.

A multiple-choice knapsack. With the file's bytes as the only constraint that binds, an exact
dynamic program solves it (``knapsack``); with further linear constraints, HiGHS (``branching``).
Both prove their result: no choice costs less than ``bound``.
"""

import math
from dataclasses import dataclass

import numpy as np

from bitwright.allocator.branching import LIMIT_TOLERANCE, least_cost_within, least_use
from bitwright.allocator.knapsack import Floats, Ints, Options, least_cost, least_per_tensor
from bitwright.errors import BudgetError

# "Optimal" means: proven to be within this part of the optimum, far below any damage's error.
RELATIVE_GAP = 1e-9
# With limits that bind, the last digits cost minutes: many tensors are proven to this part only.
# Damages are known to a tenth at best.
LIMITED_GAP = 5e-4
FEW_TENSORS = 30  # up to which even limits are solved to RELATIVE_GAP


@dataclass(frozen=True, slots=True)
class Limit:
    """A further linear constraint: Σ ``use`` (n,) over the chosen options is ≤ ``limit``."""

    label: str
    use: Floats
    limit: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Options of all tensors, flat: option j, of type ``types[j]``, is for tensor ``owner[j]``.

    ``owner`` (n,) ascends and every tensor has an option; ``cost`` (n,) is minimised, for example
    Σ_c w_c·damage_c in nats; ``size_bytes`` (n,) is the option's padded contribution to the file,
    and ``budget_bytes`` what the options may use together.
    """

    tensors: tuple[str, ...]
    owner: Ints
    types: tuple[str, ...]
    cost: Floats
    size_bytes: Ints
    budget_bytes: int
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen option of each tensor (T,) as an index into the problem's options.

    ``proven``: ``cost`` is within `RELATIVE_GAP` of ``bound``, below which no choice lies; within
    `LIMITED_GAP` where there are limits and more than `FEW_TENSORS` tensors.
    """

    chosen: Ints
    cost: float
    size_bytes: int
    unused_bytes: int
    bound: float
    proven: bool

    @property
    def gap(self) -> float:
        """Distance to the proven bound, as a part of the cost."""
        return (self.cost - self.bound) / abs(self.cost) if self.cost > self.bound else 0.0


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """The choice of least cost within the bytes and all limits.

    Deterministic. Of a tensor's options with equal cost the smallest wins, then the first by
    name; tensors with the same options get the larger types in the order of their names.
    ``time_limit_s`` is for each run of HiGHS, so only for problems whose limits bind; where it
    ends the search, ``proven`` is False and ``gap`` says how much better a choice could be.

    Raises:
        BudgetError: no choice satisfies the constraints; the message says which one, and the
            smallest feasible value of it.
    """
    _check(problem)
    _refuse_hopeless(problem)
    order = _tie_order(problem)
    options = Options(problem.owner[order], problem.cost[order], problem.size_bytes[order])
    found = least_cost(options, problem.budget_bytes, RELATIVE_GAP)
    if found is not None and not _within_limits(problem, order[found.chosen]):
        use = np.stack([one.use[order] for one in problem.limits])
        limit = np.array([one.limit for one in problem.limits], dtype=np.float64)
        found = least_cost_within(
            options, problem.budget_bytes, use, limit, _gap_with_limits(problem), time_limit_s
        )
    if found is None:
        raise BudgetError(explain_conflict(problem))
    chosen = _in_name_order(problem, order[found.chosen])
    cost, size = float(problem.cost[chosen].sum()), int(problem.size_bytes[chosen].sum())
    bound = min(found.bound, cost)
    proven = cost - bound <= _gap_with_limits(problem) * abs(cost)
    return Solution(chosen, cost, size, problem.budget_bytes - size, bound, proven)


def _check(problem: Problem) -> None:
    """Programming errors of the caller, not of the user."""
    arrays = (problem.cost, *(one.use for one in problem.limits))
    if not all(np.isfinite(one).all() for one in arrays):
        raise ValueError("costs and limits must be finite: drop options without a price")
    if not np.array_equal(np.unique(problem.owner), np.arange(len(problem.tensors))):
        raise ValueError("every tensor needs at least one option")
    if (np.diff(problem.owner) < 0).any():
        raise ValueError("options must be in the order of their tensors")


def _refuse_hopeless(problem: Problem) -> None:
    """Check each constraint alone against the least that any choice needs."""
    least = int(least_per_tensor(problem.size_bytes, problem.owner).sum())
    if least > problem.budget_bytes:
        raise BudgetError(
            f"{problem.budget_bytes:,} bytes are left for {len(problem.tensors)} tensors whose "
            f"smallest types take {least:,}: raise the budget by "
            f"{least - problem.budget_bytes:,} bytes"
        )
    for one in problem.limits:
        floor = float(least_per_tensor(one.use, problem.owner).sum())
        if floor > one.limit + LIMIT_TOLERANCE * abs(one.limit):
            raise BudgetError(
                f"{one.label} is limited to {one.limit:.6g}, but no choice of types goes below "
                f"{floor:.6g}: relax it at least to that"
            )


def _within_limits(problem: Problem, chosen: Ints) -> bool:
    return all(
        float(one.use[chosen].sum()) <= one.limit + LIMIT_TOLERANCE * abs(one.limit)
        for one in problem.limits
    )


def _tie_order(problem: Problem) -> Ints:
    """Options by tensor, then size, cost and name: the first of equals is the one to prefer."""
    rank = {name: i for i, name in enumerate(sorted(set(problem.types)))}
    names = np.array([rank[name] for name in problem.types])
    order: Ints = np.lexsort((names, problem.cost, problem.size_bytes, problem.owner))
    return order


def _in_name_order(problem: Problem, chosen: Ints) -> Ints:
    """Let tensors with identical options trade places: the larger types to the first names."""
    starts = np.searchsorted(problem.owner, np.arange(len(problem.tensors) + 1))
    uses = np.stack([problem.cost, problem.size_bytes, *(one.use for one in problem.limits)])
    alike: dict[tuple[tuple[str, ...], bytes], list[int]] = {}
    for t in range(len(problem.tensors)):
        span = slice(int(starts[t]), int(starts[t + 1]))
        alike.setdefault((problem.types[span], uses[:, span].tobytes()), []).append(t)
    result = chosen.copy()
    for members in alike.values():
        sizes = problem.size_bytes[starts[members[0]] : starts[members[0] + 1]]
        places = sorted(chosen[members] - starts[members], key=lambda place: -int(sizes[place]))
        by_name = sorted(members, key=lambda t: problem.tensors[t])
        result[by_name] = starts[by_name] + np.array(places)
    return result


def _gap_with_limits(problem: Problem) -> float:
    few = not problem.limits or len(problem.tensors) <= FEW_TENSORS
    return RELATIVE_GAP if few else LIMITED_GAP


def explain_conflict(problem: Problem) -> str:
    """Which limits stand against the bytes, and the nearest value of each that can be met.

    The values come from the linear relaxation, so they may be missed by a type or two of one
    tensor; each keeps everything but the limit it is for.
    """
    bytes_use = problem.size_bytes.astype(np.float64)
    rows = [("the size in bytes", bytes_use, float(problem.budget_bytes))]
    rows += [(one.label, one.use, one.limit) for one in problem.limits]
    nearest = []
    for k, (label, use, limit) in enumerate(rows):
        others = rows[:k] + rows[k + 1 :]
        value = least_use(
            problem.owner, use, np.stack([r[1] for r in others]), np.array([r[2] for r in others])
        )
        if value is not None:
            shown = f"{math.ceil(value):,}" if k == 0 else f"{value:.6g}"
            given = f"{limit:,.0f}" if k == 0 else f"{limit:.6g}"
            nearest.append(f"{label} at {shown} (not {given})")
    labels = ", ".join(one.label for one in problem.limits)
    sentence = (
        f"no choice of types keeps within {problem.budget_bytes:,} bytes and {labels} at once, "
        "though each can be met alone"
    )
    if not nearest:
        return f"{sentence}: no single one of them can be relaxed to help, relax several"
    return f"{sentence}: relax one of them; nearest that can be met: {'; '.join(nearest)}"
