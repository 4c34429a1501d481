"""The exact solver: one type per tensor, least damage, within the bytes.

A multiple-choice knapsack. The linear relaxation (HiGHS) gives multipliers; with them every
option has a reduced cost, which is what taking it costs over a proven lower bound. Options whose
reduced cost exceeds the distance between bound and best known layout cannot be in a better one,
so only a small core is left for branch and bound (HiGHS again). Sizes are compared in integers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, hstack, identity

from bitwright.allocator.incumbent import first_layout
from bitwright.errors import BudgetError

# "Optimal" means: proven to be within this part of the optimum. Float64 sums of a thousand
# damages are good to about 1e-13, HiGHS's own gap (1e-6 absolute) is scaled below it.
RELATIVE_GAP = 1e-9
# The core's objective runs from 0 to about this, so that HiGHS's absolute tolerances are 1e-10 of it.
CORE_SCALE = 1e4

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limit:
    """A further linear constraint: Σ over chosen options of ``use`` (n,) must be ≤ ``limit``."""

    label: str
    use: Floats
    limit: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Options of all tensors, flat: option j belongs to tensor ``owner[j]`` (ascending).

    ``cost`` (n,) is what the solver minimises, e.g. Σ_c w_c·damage_c in nats; ``size_bytes`` (n,)
    is the padded contribution to the file; ``budget_bytes`` is what the options may use together.
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
    """The chosen option of each tensor (T,), with proof: optimum ≥ ``bound``."""

    chosen: Ints
    cost: float
    size_bytes: int
    unused_bytes: int
    bound: float
    proven: bool
    core_options: int

    @property
    def gap(self) -> float:
        """Distance to the proven bound, as a part of the cost."""
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-300)


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A problem without dominated options, with multipliers (K,) and what they prove."""

    keep: Ints  # indices into the problem's options
    owner: Ints
    cost: Floats
    use: Floats  # (K, n); row 0 is size_bytes
    limit: Floats  # (K,)
    multipliers: Floats  # (K,), ≥ 0
    reduced: Floats  # (n,), ≥ 0, the least of each tensor is 0
    bound: float


def solve(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """The layout of least cost within all constraints.

    Deterministic: of two options of one tensor with equal cost the smaller wins, then the first
    named; tensors with identical options get the larger types in name order.

    Raises:
        BudgetError: no choice satisfies the constraints; the message says which one, and the
            smallest feasible value of it.
    """
    refuse_hopeless(problem)
    relaxed = relax(problem)
    best = first_layout(relaxed.owner, relaxed.reduced, relaxed.cost, relaxed.use, relaxed.limit)
    bound, core_options = relaxed.bound, 0
    margin = _first_margin(relaxed) if best is None else _cost(relaxed, best) - relaxed.bound
    everything = float(relaxed.reduced.max(initial=0.0))
    while best is None or not _closed(_cost(relaxed, best), bound):
        found, core_bound, core_options = search_core(relaxed, margin, time_limit_s)
        better = found is not None and (best is None or _cost(relaxed, found) < _cost(relaxed, best))
        best = found if better else best
        distance = np.inf if best is None else _cost(relaxed, best) - relaxed.bound
        if distance <= margin or margin >= everything:
            bound = max(bound, min(core_bound, relaxed.bound + margin))
            break
        margin = min(distance, everything) if best is not None else margin * 8 + 1e-300
    if best is None:
        raise BudgetError(_conflict(problem))
    return _solution(problem, relaxed, best, bound, core_options)


def refuse_hopeless(problem: Problem) -> None:
    """Check each constraint alone: the least that any choice needs.

    Raises:
        BudgetError: the constraint, what it allows, and the smallest feasible value.
    """
    least = int(_per_tensor_min(problem.size_bytes, problem.owner).sum())
    if least > problem.budget_bytes:
        raise BudgetError(
            f"the tensors to be chosen may use {problem.budget_bytes:,} bytes, but their smallest "
            f"types take {least:,}: raise the budget by {least - problem.budget_bytes:,} bytes"
        )
    for limit in problem.limits:
        floor = float(_per_tensor_min(limit.use, problem.owner).sum())
        if floor > limit.limit + 1e-9 * abs(limit.limit):
            raise BudgetError(
                f"{limit.label} is limited to {limit.limit:.6g}, but no choice of types goes below "
                f"{floor:.6g}: relax it at least to that"
            )


def relax(problem: Problem) -> Relaxed:
    """Solve the linear relaxation; keep its multipliers and the bound that they prove.

    The bound is recomputed from the multipliers in float64 and holds for any that are ≥ 0, so
    the tolerance of the LP solver weakens it but cannot make it wrong.

    Raises:
        BudgetError: not even fractions of types satisfy all constraints together.
    """
    keep = undominated(problem)
    owner, cost = problem.owner[keep], problem.cost[keep]
    rows = [problem.size_bytes.astype(np.float64), *(one.use for one in problem.limits)]
    use = np.stack(rows)[:, keep]
    limit = np.array([float(problem.budget_bytes), *(one.limit for one in problem.limits)])
    cost_unit, use_unit = _unit(_spread(cost, owner)), [_unit(_spread(row, owner)) for row in use]
    scale = np.array(use_unit)[:, None]
    result = linprog(
        cost / cost_unit,
        A_ub=csr_matrix(use / scale),
        b_ub=limit / scale[:, 0],
        A_eq=_one_each(owner),
        b_eq=np.ones(len(problem.tensors)),
        bounds=(0, 1),
        method="highs",
    )
    if result.status == 2:
        raise BudgetError(_conflict(problem))
    marginals = np.zeros(len(limit)) if result.status else -result.ineqlin.marginals
    multipliers = np.maximum(marginals, 0.0) * cost_unit / scale[:, 0]
    priced = cost + multipliers @ use
    floor = _per_tensor_min(priced, owner)
    bound = float(floor.sum() - multipliers @ limit)
    return Relaxed(keep, owner, cost, use, limit, multipliers, priced - floor[owner], bound)


def undominated(problem: Problem) -> Ints:
    """Indices of the options that no other of the same tensor beats or equals on every count.

    Among equals the smaller type wins, then the first named, whatever order they came in.
    """
    uses = np.stack([problem.cost, problem.size_bytes, *(one.use for one in problem.limits)])
    rank = sorted(
        range(len(problem.types)),
        key=lambda j: (problem.owner[j], problem.size_bytes[j], problem.cost[j], problem.types[j]),
    )
    kept: list[int] = []
    first = 0
    for j in rank:
        if kept and problem.owner[kept[-1]] != problem.owner[j]:
            first = len(kept)
        if not (uses[:, kept[first:]] <= uses[:, j : j + 1]).all(axis=0).any():
            kept.append(j)
    return np.array(kept, dtype=np.int64)


def search_core(
    relaxed: Relaxed, margin: float, time_limit_s: float
) -> tuple[Ints | None, float, int]:
    """Branch and bound over the options whose reduced cost is ≤ ``margin``.

    Returns the best choice (T,) or None, a lower bound for every layout of the core, and the
    core's size. HiGHS works with tolerances: a choice that breaks an integer constraint once it
    is rounded is searched again with that constraint tightened, and the first bound kept.
    """
    core = np.flatnonzero(relaxed.reduced <= margin)
    owner, use = relaxed.owner[core], relaxed.use[:, core]
    least = np.stack([_per_tensor_min(row, owner) for row in use])
    step, room = use - least[:, owner], relaxed.limit - least.sum(axis=1)
    units = np.array([_common_step(row) for row in step])
    scale = CORE_SCALE / max(margin, 1e-300)
    below = np.inf
    for _ in range(8):
        taken, floor = _branch_and_bound(
            relaxed.reduced[core] * scale,
            relaxed.multipliers * units * scale,
            step / units[:, None],
            room / units,
            owner,
            time_limit_s,
        )
        below = min(below, relaxed.bound + floor / scale)
        if taken is None:
            break
        excess = use[:, taken].sum(axis=1) - relaxed.limit
        broken = excess > _tolerance(relaxed.limit)
        if not broken.any():
            return core[taken], below, len(core)
        room = room - np.where(broken, units, 0.0)
    return None, below, len(core)


def _branch_and_bound(
    price: Floats,
    slack_price: Floats,
    step: Floats,
    room: Floats,
    owner: Ints,
    time_limit_s: float,
) -> tuple[Ints | None, float]:
    """Minimise price·x + slack_price·(room - step·x); the choice (T,) or None, and a lower bound.

    With the slack as a variable the objective is the cost above the relaxation's bound: numbers
    from 0 up, near 0 where it matters.
    """
    if (room < 0).any():
        return None, np.inf
    slacks, options = len(room), len(price)
    rows = hstack([csr_matrix(step), identity(slacks)])
    one_each = hstack([_one_each(owner), csr_matrix((int(owner[-1]) + 1, slacks))])
    result = milp(
        np.concatenate([price, slack_price]),
        constraints=[LinearConstraint(rows, room, room), LinearConstraint(one_each, 1, 1)],
        integrality=np.concatenate([np.ones(options), np.zeros(slacks)]),
        bounds=Bounds(0.0, np.concatenate([np.ones(options), np.full(slacks, np.inf)])),
        options={"mip_rel_gap": 0.0, "time_limit": time_limit_s},
    )
    bound = 0.0 if result.mip_dual_bound is None else float(result.mip_dual_bound)
    if result.x is None:
        return None, np.inf if result.status == 2 else bound
    return np.flatnonzero(result.x[:options] > 0.5), bound


def _closed(cost: float, bound: float) -> bool:
    return cost - bound <= RELATIVE_GAP * abs(cost)


def _cost(relaxed: Relaxed, chosen: Ints) -> float:
    return float(relaxed.cost[chosen].sum())


def _tolerance(limit: Floats) -> Floats:
    """Bytes are exact; the further limits are sums of measured floats."""
    slack = 1e-9 * np.abs(limit)
    slack[0] = 0.0
    return slack


def _first_margin(relaxed: Relaxed) -> float:
    """Reduced cost under which about three options per tensor lie."""
    tensors = int(relaxed.owner[-1]) + 1
    ordered = np.sort(relaxed.reduced)
    return float(ordered[min(3 * tensors, len(ordered) - 1)])


def _per_tensor_min(values: NDArray[np.generic], owner: Ints) -> Floats:
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    return np.minimum.reduceat(values.astype(np.float64), starts)


def _one_each(owner: Ints) -> csr_matrix:
    ones = (np.ones(len(owner)), (owner, np.arange(len(owner))))
    return csr_matrix(ones, shape=(int(owner[-1]) + 1, len(owner)))


def _spread(values: Floats, owner: Ints) -> Floats:
    return (values - _per_tensor_min(values, owner)[owner])[values.argsort()]


def _unit(values: Floats) -> float:
    positive = np.abs(values[values != 0])
    return float(np.median(positive)) if len(positive) else 1.0


def _common_step(values: Floats) -> float:
    """Greatest common divisor of whole numbers; else their largest."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0.0:
        return 1.0
    whole = largest < 2.0**53 and bool((values == np.rint(values)).all())
    return float(np.gcd.reduce(values.astype(np.int64))) if whole else largest


def _solution(
    problem: Problem, relaxed: Relaxed, best: Ints, bound: float, core_options: int
) -> Solution:
    chosen = _in_name_order(problem, relaxed.keep[best])
    cost, size = float(problem.cost[chosen].sum()), int(problem.size_bytes[chosen].sum())
    return Solution(
        chosen=chosen,
        cost=cost,
        size_bytes=size,
        unused_bytes=problem.budget_bytes - size,
        bound=min(bound, cost),
        proven=_closed(cost, bound),
        core_options=core_options,
    )


def _in_name_order(problem: Problem, chosen: Ints) -> Ints:
    """Tensors with identical options trade places: the larger types go to the first names."""
    starts = np.searchsorted(problem.owner, np.arange(len(problem.tensors) + 1))
    alike: dict[bytes, list[int]] = {}
    uses = np.stack([problem.cost, problem.size_bytes, *(one.use for one in problem.limits)])
    for t in range(len(problem.tensors)):
        span = slice(starts[t], starts[t + 1])
        alike.setdefault(repr(problem.types[span]).encode() + uses[:, span].tobytes(), []).append(t)
    result = chosen.copy()
    for members in alike.values():
        by_name = sorted(members, key=lambda t: problem.tensors[t])
        places = sorted((int(chosen[t] - starts[t]) for t in members), reverse=True)
        sizes = problem.size_bytes[starts[members[0]] : starts[members[0] + 1]]
        places.sort(key=lambda place: -int(sizes[place]))
        for t, place in zip(by_name, places, strict=True):
            result[t] = starts[t] + place
    return result


def _conflict(problem: Problem) -> str:
    labels = ", ".join(one.label for one in problem.limits) or "the budget"
    return (
        f"no choice of types keeps within {problem.budget_bytes:,} bytes and {labels} at once, "
        "although each can be met alone: raise the budget or relax a limit"
    )
