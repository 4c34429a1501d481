"""The knapsack with one constraint, exactly and in integers: bytes.

Lagrange multiplier and bound come from the convex hulls of the tensors' options (the linear
relaxation's closed form). Options whose reduced cost exceeds the distance between that bound and
the best known choice drop out. Over what is left a dynamic program runs tensor by tensor, the
most undecided first; each partial choice is bounded by the relaxation of the tensors still to
come and dropped when it cannot win. HiGHS needs minutes for what models are made of (hundreds
of tensors of equal size), this needs milliseconds: see ``benchmarks/solver_speed.py``.

Sources: Sinha & Zoltners 1979 (relaxation), Pisinger 1995 (core, dynamic program with bounds).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Beyond this many partial choices the worst are dropped, and the proven bound says so.
MAX_STATES = 10_000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all tensors, flat; ``owner`` (n,) ascending, every tensor has at least one."""

    owner: Ints
    cost: Floats
    size: Ints


@dataclass(frozen=True, slots=True)
class Choice:
    """One option per tensor (T,); no choice costs less than ``bound``."""

    chosen: Ints
    bound: float
    core_options: int
    max_states: int


@dataclass(frozen=True, slots=True)
class Hull:
    """Smallest option of each tensor, and the steps up from there, best saving per byte first."""

    smallest: Ints  # (T,) option
    owner: Ints  # (S,) tensor of each step
    to: Ints  # (S,) option reached
    size: Ints  # (S,) > 0
    cost: Floats  # (S,) < 0


def least_cost(options: Options, budget: int, relative_gap: float) -> Choice | None:
    """The choice of least Σ cost with Σ size ≤ ``budget``; None if the smallest exceed it.

    The result is within ``relative_gap`` of the optimum unless ``bound`` says otherwise.
    Of equal options of one tensor the first wins, so the caller's order breaks ties.
    """
    keep = undominated(options)
    few, room = _above_smallest(options, keep, budget)
    if room < 0:
        return None
    hull = hull_steps(few)
    chosen, multiplier = _rounded(few, hull, room)
    priced = few.cost + multiplier * few.size
    floor = least_per_tensor(priced, few.owner)
    bound = float(floor.sum() - multiplier * room)
    chosen = _swapped(few, room, chosen)
    cost = float(few.cost[chosen].sum())
    if cost - bound <= relative_gap * abs(cost):
        return Choice(keep[chosen], min(bound, cost), 0, 0)
    reduced = priced - floor[few.owner]
    core = np.flatnonzero(reduced <= cost - bound)
    if len(core) == len(floor):  # nothing is undecided, and rounding hides the rest
        return Choice(keep[chosen], bound, len(core), 0)
    found = _Search(few, core, reduced, room, relative_gap / 2).run(chosen)
    return Choice(keep[found.chosen], found.bound, len(core), found.max_states)


def _above_smallest(options: Options, keep: Ints, budget: int) -> tuple[Options, int]:
    """The kept options with sizes above their tensor's smallest, and the bytes left for that.

    Smaller numbers round less once they are priced. What is left is lowered to a multiple of the
    sizes' common step (blocks, padding): a few bytes that nothing can use would keep the bound
    from closing.
    """
    owner, size = options.owner[keep], options.size[keep]
    least = np.minimum.reduceat(size, _starts(owner))
    growth = size - least[owner]
    room, step = budget - int(least.sum()), int(np.gcd.reduce(growth))
    return Options(owner, options.cost[keep], growth), room // step * step if step else room


def undominated(options: Options) -> Ints:
    """Indices of the options that cost less than every smaller or equal one of their tensor.

    Of equal ones the first stays; the result is in ascending size within each tensor.
    """
    order = np.lexsort((options.cost, options.size, options.owner))
    owner, cost = options.owner[order], options.cost[order]
    starts = _starts(owner)
    place = np.arange(len(owner)) - starts[owner]
    table = np.full((len(starts), int(place.max()) + 2), np.inf)
    table[owner, place + 1] = cost
    below = np.minimum.accumulate(table, axis=1)[owner, place]
    kept: Ints = order[cost < below]
    return kept


def hull_steps(options: Options) -> Hull:
    """Lower convex hull of (size, cost) of each tensor, as steps sorted by cost per byte.

    Needs undominated options. Equal slopes keep the tensors' order, so the result is unique.
    """
    starts = _starts(options.owner)
    rows: list[tuple[int, int, int]] = []
    size, cost = options.size.tolist(), options.cost.tolist()
    for tensor, (first, stop) in enumerate(
        zip(starts.tolist(), [*starts.tolist()[1:], len(size)], strict=True)
    ):
        corner = [first]
        for j in range(first + 1, stop):
            while len(corner) > 1 and _above(size, cost, corner[-2], corner[-1], j):
                corner.pop()
            corner.append(j)
        rows += [(tensor, a, b) for a, b in pairwise(corner)]
    owner, low, high = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    step_size = options.size[high] - options.size[low]
    step_cost = options.cost[high] - options.cost[low]
    order = np.argsort(step_cost / step_size, kind="stable")
    return Hull(starts, owner[order], high[order], step_size[order], step_cost[order])


def _above(size: list[int], cost: list[float], a: int, b: int, c: int) -> bool:
    """Whether corner b lies on or above the line from a to c."""
    return (cost[b] - cost[a]) * (size[c] - size[a]) >= (cost[c] - cost[a]) * (size[b] - size[a])


def least_per_tensor(values: NDArray[np.float64] | Ints, owner: Ints) -> Floats:
    """Least value (T,) of each tensor's options."""
    return np.minimum.reduceat(values.astype(np.float64), _starts(owner))


def _starts(owner: Ints) -> Ints:
    return np.flatnonzero(np.diff(owner, prepend=-1))


def _rounded(options: Options, hull: Hull, budget: int) -> tuple[Ints, float]:
    """Take steps while they fit; the multiplier: the next one's saving per byte."""
    room = budget - int(options.size[hull.smallest].sum())
    fit = int(np.searchsorted(np.cumsum(hull.size), room, side="right"))
    chosen = hull.smallest.copy()
    chosen[hull.owner[:fit]] = hull.to[:fit]  # of repeated tensors the last, highest step stays
    multiplier = 0.0 if fit == len(hull.to) else float(-hull.cost[fit] / hull.size[fit])
    return chosen, multiplier


def _swapped(options: Options, budget: int, chosen: Ints, max_swaps: int = 60) -> Ints:
    """Best single change or pair of changes that fits, while the cost falls.

    A better first choice leaves a smaller core. Options sorted by growth with a running minimum
    of the change in cost answer "the best partner that still fits" for all options at once.
    """
    owner, result = options.owner, chosen.copy()
    for _ in range(max_swaps):
        change = options.cost - options.cost[result][owner]
        growth = options.size - options.size[result][owner]
        slack = budget - int(options.size[result].sum())
        order = np.argsort(growth, kind="stable")
        ordered = change[order]
        is_best = ordered < np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
        best = np.maximum.accumulate(np.where(is_best, np.arange(len(order)), 0))
        fits = np.searchsorted(growth[order], slack - growth, side="right") - 1
        partner = order[best[np.maximum(fits, 0)]]
        # The options now chosen change nothing, so single changes are pairs too.
        total = np.where((fits >= 0) & (owner[partner] != owner), change + change[partner], np.inf)
        j = int(np.argmin(total))
        if not total[j] < -1e-14 * np.abs(options.cost[result]).sum():
            break
        result[owner[j]] = j
        result[owner[partner[j]]] = partner[j]
    return result


@dataclass(frozen=True, slots=True)
class _Found:
    chosen: Ints
    bound: float
    max_states: int


@dataclass(frozen=True, slots=True)
class _Rest:
    """Relaxation of the tensors not decided yet: cost of the first k steps at ``size[k]``."""

    size: Ints
    cost: Floats
    slope: Floats  # of step k; 0 after the last
    steps: Ints  # (S,) which of the hull's steps these are


class _Search:
    """Dynamic program over the core; its state is what one run needs to trace back a choice."""

    def __init__(
        self, options: Options, core: Ints, reduced: Floats, budget: int, relative_gap: float
    ) -> None:
        starts = _starts(options.owner[core])
        groups = np.split(core, starts[1:])
        self.options, self.budget, self.relative_gap = options, budget, relative_gap
        self.fixed = np.array([g[0] for g in groups if len(g) == 1], dtype=np.int64)
        undecided = [g for g in groups if len(g) > 1]
        undecided.sort(key=lambda g: float(np.partition(reduced[g], 1)[1]))
        self.groups = undecided
        self.flat = np.concatenate(undecided)
        rank = np.repeat(np.arange(len(undecided)), [len(g) for g in undecided])
        self.hull = hull_steps(Options(rank, options.cost[self.flat], options.size[self.flat]))
        self.trail: list[tuple[Ints, Ints]] = []  # per tensor: parent state, option taken

    def run(self, chosen: Ints) -> _Found:
        """Improve on ``chosen`` or prove that nothing does by more than the gap."""
        best_cost = float(self.options.cost[chosen].sum())
        best, dropped, most = chosen, np.inf, 1
        size = np.array([self.options.size[self.fixed].sum()], dtype=np.int64)
        cost = np.array([self.options.cost[self.fixed].sum()])
        for depth, group in enumerate(self.groups):
            rest = self._rest(depth)
            parent = np.repeat(np.arange(len(size)), len(group))
            option = np.tile(group, len(size))
            size = (size[:, None] + self.options.size[group]).ravel()
            cost = (cost[:, None] + self.options.cost[group]).ravel()
            left = self.budget - size
            at = np.searchsorted(rest.size, left, side="right") - 1
            whole = np.where(at >= 0, cost + rest.cost[at], np.inf)
            least = whole + rest.slope[at] * (left - rest.size[at])
            j = int(np.argmin(whole))
            if whole[j] < best_cost:
                best_cost = float(whole[j])
                best = self._trace(depth, int(parent[j]), int(option[j]), rest.steps[: at[j]])
            alive = np.flatnonzero(least < best_cost - self.relative_gap * abs(best_cost))
            alive = alive[_pareto(size[alive], cost[alive])]
            if len(alive) > MAX_STATES:
                alive = alive[np.argsort(least[alive], kind="stable")]
                dropped = min(dropped, float(least[alive[MAX_STATES]]))
                alive = np.sort(alive[:MAX_STATES])
            size, cost, most = size[alive], cost[alive], max(most, len(alive))
            self.trail.append((parent[alive], option[alive]))
            if not len(alive):
                break
        proven = best_cost - self.relative_gap * abs(best_cost)
        return _Found(best, min(proven, dropped), most)

    def _rest(self, depth: int) -> _Rest:
        steps = np.flatnonzero(self.hull.owner > depth)
        smallest = self.flat[self.hull.smallest[depth + 1 :]]
        size = np.concatenate([[self.options.size[smallest].sum()], self.hull.size[steps]])
        cost = np.concatenate([[self.options.cost[smallest].sum()], self.hull.cost[steps]])
        slope = np.append(self.hull.cost[steps] / self.hull.size[steps], 0.0)
        return _Rest(np.cumsum(size), np.cumsum(cost), slope, steps)

    def _trace(self, depth: int, state: int, option: int, steps: Ints) -> Ints:
        """The whole choice: decided tensors by their trail, the rest by the relaxation's steps."""
        chosen = np.zeros(int(self.options.owner[-1]) + 1, dtype=np.int64)
        for options in (self.fixed, self.flat[self.hull.smallest], self.flat[self.hull.to[steps]]):
            chosen[self.options.owner[options]] = options
        chosen[self.options.owner[option]] = option
        for parent, taken in reversed(self.trail[:depth]):
            chosen[self.options.owner[taken[state]]] = taken[state]
            state = int(parent[state])
        return chosen


def _pareto(size: Ints, cost: Floats) -> Ints:
    """Indices of the states that cost less than every smaller one, in ascending size."""
    order = np.lexsort((cost, size))
    ordered = cost[order]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(ordered)[:-1]])
    kept: Ints = order[ordered < best_before]
    return kept
