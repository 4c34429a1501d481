"""The knapsack with further linear constraints, by HiGHS.

The linear relaxation gives a multiplier for each constraint; with them every option has a
reduced cost, which is what it costs above a proven bound. Only options whose reduced cost does
not exceed the distance between bound and best known choice are given to branch and bound.
HiGHS works in floating point: each choice is checked again, the bytes in integers.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, hstack, identity

from bitwright.allocator.knapsack import Choice, Floats, Ints, Options, least_per_tensor
from bitwright.allocator.repair import make_priced, repaired

# The core's objective runs from 0 to about this: HiGHS's absolute gap of 1e-6 is 1e-10 of it.
CORE_SCALE = 1e4
# Measured limits are met to this part; bytes exactly.
LIMIT_TOLERANCE = 1e-9
TIGHTENINGS = 8
OFFSET_GAP = 1e-3
GROWTH = 30.0  # of the core's margin while it holds no choice at all
NODES = 250  # of branch and bound in one core; a number of nodes is the same on every machine
FEW = 5  # the first core holds one more option for every fifth tensor


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Constraints ``use`` (K, n) ≤ ``limit`` (K,), row 0 being bytes, and what multipliers prove.

    ``reduced`` (n,) is ≥ 0, and 0 for one option of each tensor; no choice costs less than
    ``bound``.
    """

    options: Options
    use: Floats
    limit: Floats
    multipliers: Floats
    reduced: Floats
    bound: float

    def cost(self, chosen: Ints) -> float:
        """Σ cost of a choice (T,)."""
        return float(self.options.cost[chosen].sum())

    def broken(self, chosen: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which constraints a choice breaks."""
        slack = LIMIT_TOLERANCE * np.abs(self.limit)
        slack[0] = 0.0  # sums of whole bytes are exact in float64 up to 2**53
        return np.asarray(self.use[:, chosen].sum(axis=1) > self.limit + slack)


def least_cost_within(
    options: Options,
    budget: int,
    use: Floats,
    limit: Floats,
    relative_gap: float,
    time_limit_s: float,
) -> Choice | None:
    """Least Σ cost with Σ size ≤ ``budget`` and Σ ``use`` (K, n) ≤ ``limit`` (K,); None if none."""
    all_use = np.concatenate([options.size[None].astype(np.float64), use])
    relaxed = relax(options, all_use, np.concatenate([[float(budget)], limit]))
    if relaxed is None:
        return None
    best = _first_choice(relaxed, relative_gap)
    everything = float(relaxed.reduced.max())
    margin = _first_margin(relaxed.reduced, len(np.unique(options.owner)))
    if best is not None:
        margin = min(relaxed.cost(best) - relaxed.bound, everything)
    bound, core = relaxed.bound, 0
    while best is None or relaxed.cost(best) - bound > relative_gap * abs(relaxed.cost(best)):
        found, below, core = _search_core(relaxed, margin, relative_gap, time_limit_s)
        if found is not None and (best is None or relaxed.cost(found) < relaxed.cost(best)):
            best = found
        # What lies outside the core costs at least `margin` above the relaxation's bound.
        outside = np.inf if margin >= everything else relaxed.bound + margin
        bound = max(bound, min(below, outside))
        if margin >= everything or (best is not None and relaxed.cost(best) <= outside):
            break
        wanted = margin * GROWTH if best is None else relaxed.cost(best) - relaxed.bound
        margin = min(max(wanted, everything * 1e-6), everything)
    return None if best is None else Choice(best, bound, core, 0)


def relax(options: Options, use: Floats, limit: Floats) -> Relaxed | None:
    """Solve the linear relaxation; None if not even fractions of types satisfy it.

    The bound is computed again from the multipliers and holds for any that are ≥ 0: tolerances
    of the LP solver can weaken it, but not make it wrong.
    """
    owner, cost = options.owner, options.cost
    cost_unit = _unit(cost - least_per_tensor(cost, owner)[owner])
    units = np.array([_unit(row - least_per_tensor(row, owner)[owner]) for row in use])
    result = linprog(  # type: ignore[call-overload]  # the stubs know no sparse matrices
        cost / cost_unit,
        A_ub=csr_matrix(use / units[:, None]),
        b_ub=limit / units,
        A_eq=_one_each(owner),
        b_eq=np.ones(int(owner[-1]) + 1),
        bounds=(0, 1),
        method="highs",
    )
    if result.status == 2:
        return None
    found = np.zeros(len(limit)) if result.status else np.maximum(-result.ineqlin.marginals, 0)
    multipliers = found * cost_unit / units
    least = np.stack([least_per_tensor(row, owner) for row in use])
    priced = cost + multipliers @ (use - least[:, owner])  # smaller numbers round less
    floor = least_per_tensor(priced, owner)
    bound = float(floor.sum() - multipliers @ (limit - least.sum(axis=1)))
    return Relaxed(options, use, limit, multipliers, priced - floor[owner], bound)


def least_use(owner: Ints, use: Floats, others: Floats, limits: Floats) -> float | None:
    """Least Σ ``use`` of fractional choices with Σ ``others`` (K, n) ≤ ``limits`` (K,)."""
    unit = _unit(use)
    units = np.array([_unit(row) for row in others])
    result = linprog(  # type: ignore[call-overload]  # the stubs know no sparse matrices
        use / unit,
        A_ub=csr_matrix(others / units[:, None]),
        b_ub=limits / units,
        A_eq=_one_each(owner),
        b_eq=np.ones(int(owner[-1]) + 1),
        bounds=(0, 1),
        method="highs",
    )
    return None if result.status else float(result.fun) * unit


def _first_choice(relaxed: Relaxed, relative_gap: float) -> Ints | None:
    """Per tensor the option that the multipliers make cheapest, repaired to keep all limits."""
    owner = relaxed.options.owner
    order = np.lexsort((relaxed.options.size, relaxed.reduced, owner))
    chosen: Ints = order[np.searchsorted(owner, np.arange(int(owner[-1]) + 1))]
    priced = make_priced(owner, relaxed.reduced, relaxed.use, relaxed.limit, relaxed.multipliers)
    enough = relative_gap * abs(relaxed.bound)
    found = repaired(priced, chosen, np.random.default_rng(0), enough)
    return None if found is None or relaxed.broken(found).any() else found


def _search_core(
    relaxed: Relaxed, margin: float, relative_gap: float, time_limit_s: float
) -> tuple[Ints | None, float, int]:
    """The best choice (T,) of the options with reduced cost ≤ ``margin``, or None.

    Also a lower bound for all of them, and their number. A choice that breaks a constraint once
    it is rounded is searched again with that constraint tightened; the first bound stays.
    """
    core = np.flatnonzero(relaxed.reduced <= margin)
    owner, use = relaxed.options.owner[core], relaxed.use[:, core]
    least = np.stack([least_per_tensor(row, owner) for row in use])
    step, room = use - least[:, owner], relaxed.limit - least.sum(axis=1)
    units = np.array([_unit(row) for row in step])
    scale = CORE_SCALE / max(margin, 1e-300)
    price, slack_price = relaxed.reduced[core] * scale, relaxed.multipliers * units * scale
    # Half of the gap for the search, the other half for what rounding and the core leave out.
    slack = relative_gap / 2 * abs(relaxed.bound) * scale
    below = np.inf
    for _ in range(TIGHTENINGS):
        taken, floor = _branch_and_bound(
            price, slack_price, step / units[:, None], room / units, owner, slack, time_limit_s
        )
        below = min(below, relaxed.bound + floor / scale)
        if taken is None:
            break
        broken = relaxed.broken(core[taken])
        if not broken.any():
            return core[taken], below, len(core)
        room = room - np.where(broken, units * 1e-6, 0.0)
    return None, below, len(core)


def _branch_and_bound(
    price: Floats,
    slack_price: Floats,
    step: Floats,
    room: Floats,
    owner: Ints,
    allowance: float,
    time_limit_s: float,
) -> tuple[Ints | None, float]:
    """Minimise price·x + slack_price·(room - step·x): the choice or None, and a lower bound.

    With the slacks as variables the objective is the cost above the relaxation's bound: numbers
    from 0 up, small where it matters. ``allowance`` is how far from the optimum the search may
    end; HiGHS knows only a relative gap, so a constant of 1 / `OFFSET_GAP` allowances is added.
    """
    if (room < 0).any():
        return None, np.inf
    options, slacks = len(price), len(room)
    rows = hstack([csr_matrix(step), identity(slacks), csr_matrix((slacks, 1))])
    one_each = hstack([_one_each(owner), csr_matrix((int(owner[-1]) + 1, slacks + 1))])
    offset = allowance / OFFSET_GAP
    upper = np.concatenate([np.ones(options), np.full(slacks, np.inf), [1.0]])
    lower = np.concatenate([np.zeros(options + slacks), [1.0]])
    with _silent_stdout():
        result = milp(
            np.concatenate([price, slack_price, [offset]]),
            constraints=[LinearConstraint(rows, room, room), LinearConstraint(one_each, 1, 1)],
            integrality=np.concatenate([np.ones(options), np.zeros(slacks + 1)]),
            bounds=Bounds(lower, upper),
            options={"mip_rel_gap": OFFSET_GAP, "time_limit": time_limit_s, "node_limit": NODES},
        )
    bound = 0.0 if result.mip_dual_bound is None else float(result.mip_dual_bound) - offset
    if result.x is None:
        return None, np.inf if result.status == 2 else bound
    return np.flatnonzero(result.x[:options] > 0.5), bound


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints some lines to stdout whatever its options say; results belong there alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _first_margin(reduced: Floats, tensors: int) -> float:
    """Reduced cost under which lie few more options than tensors: enough room to round well."""
    count = tensors + max(tensors // FEW, 3 * FEW)
    return float(np.sort(reduced)[min(count, len(reduced) - 1)])


def _one_each(owner: Ints) -> csr_matrix:
    entries = (np.ones(len(owner)), (owner, np.arange(len(owner))))
    return csr_matrix(entries, shape=(int(owner[-1]) + 1, len(owner)))


def _unit(values: Floats) -> float:
    """A scale that brings most of the values near 1."""
    used = np.abs(values[values != 0])
    return float(np.median(used)) if len(used) else 1.0
