"""A good feasible layout in milliseconds: round the relaxation, then fill and swap.

The better this first layout, the smaller the core that the exact search must look through.
"""

import numpy as np
from numpy.typing import NDArray

# Swaps improve quickly, then in crumbs; the exact search does the rest.
MAX_SWAPS = 400

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def first_layout(
    owner: Ints, reduced: Floats, cost: Floats, use: Floats, limit: Floats
) -> Ints | None:
    """Indices (T,) of a feasible choice, or None if rounding does not find one.

    ``owner`` (n,) ascending; ``use`` (K, n) and ``limit`` (K,) the constraints. With one
    constraint a choice is always found if there is one.
    """
    rounded = _least(reduced, use[0], owner)
    if (use[:, rounded].sum(axis=1) <= limit).all():
        return _swapped(owner, cost, use[0], float(limit[0]), rounded) if len(limit) == 1 else rounded
    if len(limit) > 1:
        return None
    smallest = _least(use[0], cost, owner)
    if use[0, smallest].sum() > limit[0]:
        return None
    lowered = _lowered(reduced, use[0], float(limit[0]), rounded, smallest)
    return _swapped(owner, cost, use[0], float(limit[0]), lowered)


def _least(first: Floats, second: Floats, owner: Ints) -> Ints:
    """Per tensor the option with the least ``first``, ties by ``second``, then by position."""
    order = np.lexsort((np.arange(len(owner)), second, first, owner))
    return order[np.unique(owner[order], return_index=True)[1]].astype(np.int64)


def _lowered(reduced: Floats, size: Floats, limit: float, chosen: Ints, smallest: Ints) -> Ints:
    """Take tensors to their smallest option, cheapest by reduced cost first, until it fits."""
    saved, loss = size[chosen] - size[smallest], reduced[smallest] - reduced[chosen]
    order = np.argsort(loss / np.maximum(saved, 1.0), kind="stable")
    over = size[chosen].sum() - limit
    count = int(np.searchsorted(np.cumsum(saved[order]), over)) + 1
    result = chosen.copy()
    result[order[:count]] = smallest[order[:count]]
    return result


def _swapped(owner: Ints, cost: Floats, size: Floats, limit: float, chosen: Ints) -> Ints:
    """Best single change or best pair of changes that fits, while the cost falls."""
    result = chosen.copy()
    slack = limit - float(size[result].sum())
    for _ in range(MAX_SWAPS):
        saving = cost - cost[result][owner]
        growth = size - size[result][owner]
        moves = _best_moves(owner, saving, growth, slack)
        if moves is None:
            break
        for j in moves:
            result[owner[j]] = j
        slack = limit - float(size[result].sum())
    return result


def _best_moves(owner: Ints, change: Floats, growth: Floats, slack: float) -> tuple[int, ...] | None:
    """The change(s) that lower the cost most: one option, or two of different tensors.

    Options sorted by growth with a running minimum of the cost change answer "the best partner
    that still fits" for every option at once.
    """
    order = np.argsort(growth, kind="stable")
    best_so_far = np.minimum.accumulate(change[order])
    is_new = np.concatenate([[True], best_so_far[1:] < best_so_far[:-1]])
    where = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
    fits = np.searchsorted(growth[order], slack - growth, side="right") - 1
    partner = order[where[np.maximum(fits, 0)]]
    # Partner of the same tensor: not a pair. "No change" is an option too, so singles are covered.
    possible = (fits >= 0) & (owner[partner] != owner)
    total = np.where(possible, change + change[partner], np.inf)
    j = int(np.argmin(total))
    scale = float(np.abs(change).max(initial=0.0))
    if not total[j] < -1e-15 * scale:
        return None
    return (j, int(partner[j]))
