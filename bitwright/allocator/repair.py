"""A good choice under several limits, by exchanging pairs of options near the relaxation.

Cost above the relaxation's bound is Σ reduced cost + Σ multiplier · slack, exactly. So only
options of small reduced cost can be in a good choice, and what is left to find is a combination
whose slacks are small and not negative. All pairs of such options are looked at at once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.allocator.knapsack import Floats, Ints

PAIRED = 220  # options of least reduced cost beside the chosen ones, tried in pairs
ROUNDS = 80
KICK = 3  # options changed at random where no pair helps
PENALTY = 30.0  # of a unit above a limit, in multiples of what a unit under it costs


@dataclass(frozen=True, slots=True)
class Priced:
    """Options with their reduced cost (n,) ≥ 0, use (K, n), and prices (K,) of slack and excess."""

    owner: Ints
    reduced: Floats
    use: Floats
    limit: Floats
    slack_price: Floats
    excess_price: Floats

    def penalty(self, excess: Floats) -> Floats:
        """Price of being off the limits by ``excess`` (..., K)."""
        return (
            np.maximum(excess, 0.0) @ self.excess_price
            + np.maximum(-excess, 0.0) @ self.slack_price
        )


def make_priced(
    owner: Ints, reduced: Floats, use: Floats, limit: Floats, multipliers: Floats
) -> Priced:
    """Price excess above slack, also where a multiplier is zero."""
    steps = np.abs(use - use[:, np.searchsorted(owner, owner)])
    unit = np.array([np.median(row[row > 0]) if (row > 0).any() else 1.0 for row in steps])
    usual = float(np.median(reduced[reduced > 0])) if (reduced > 0).any() else 1.0
    floor = np.maximum(multipliers, usual / unit)
    return Priced(owner, reduced, use, limit, multipliers, PENALTY * floor)


def repaired(priced: Priced, start: Ints, rng: np.random.Generator, enough: float) -> Ints | None:
    """The best choice (T,) found within all limits, from ``start`` (T,); None if none was found.

    Stops at a cost above the bound of ``enough``. Deterministic for a generator.
    """
    chosen, best, best_cost = start.copy(), None, np.inf
    near = np.argsort(priced.reduced, kind="stable")
    for _ in range(ROUNDS):
        excess = priced.use[:, chosen].sum(axis=1) - priced.limit
        above = float(priced.reduced[chosen].sum())
        cost = above + float(priced.slack_price @ np.maximum(-excess, 0.0))
        if (excess <= 0).all() and cost < best_cost:
            best, best_cost = chosen.copy(), cost
            if cost <= enough:
                break
        taken = np.isin(near, chosen, assume_unique=True)
        options = near[~taken][:PAIRED]
        if not len(options):
            break
        better = _best_pair(priced, chosen, options, excess)
        if better is None:  # a local optimum: go elsewhere from the best that is known
            chosen = (chosen if best is None else best).copy()
            kicked = rng.choice(options, min(KICK, len(options)), replace=False)
            chosen[priced.owner[kicked]] = kicked
        else:
            chosen[priced.owner[better]] = better
    return best


def _best_pair(priced: Priced, chosen: Ints, options: Ints, excess: Floats) -> Ints | None:
    """The one or two options whose exchange lowers the whole price most; None if none does."""
    owner = priced.owner[options]
    was = chosen[owner]
    change = priced.reduced[options] - priced.reduced[was]
    use = (priced.use[:, options] - priced.use[:, was]).T
    now = float(priced.penalty(excess))
    single = change + priced.penalty(excess + use)
    pairs: NDArray[np.float64] = (
        change[:, None] + change + priced.penalty(excess + use[:, None] + use)
    )
    pairs[owner[:, None] == owner] = np.inf
    np.fill_diagonal(pairs, single)
    flat = int(np.argmin(pairs))
    i, j = divmod(flat, len(options))
    if not pairs[i, j] < now * (1 - 1e-12):
        return None
    return options[[i]] if i == j else options[[i, j]]
