"""Tokens where they count: measure on only for tensors whose type is still open.

Each round measures one more piece of text, for the tensors whose type would change within their
intervals and whose possible loss matters; the rest keep what they have. A tensor that stands
between two types of nearly equal merit never gets decided and need not be: what ends the race is
the loss that the open decisions could cost together.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.allocator.knapsack import Floats, Ints
from bitwright.allocator.solver import Problem

Flags = NDArray[np.bool_]

LEVEL = 0.9  # of the intervals that decide
TOLERANCE = 0.02  # of the layout's predicted damage: what all open decisions may cost together
CURVE_SIGMAS = 1.64  # either way: the same level for prices from the type curve
PRICE_GAP = 1e-9  # relative: how closely the price of a byte is found


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known after a round.

    ``problem``: the solver's, from the current values. ``low``, ``high`` (T,): ends of each
    tensor's interval as factors of its value, low ≤ 1 ≤ high; they scale all its costs.
    """

    problem: Problem
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Decisions:
    """Types at the price of a byte, and what is open.

    chosen: option of each tensor (T,), an index into the problem's options. open: its type
    changes within the interval. regret: most that a wrong type could cost, nats (T,).
    cost: predicted damage of the choice, nats. price: nats per byte.
    """

    chosen: Ints
    open: Flags
    regret: Floats
    cost: float
    price: float

    @property
    def possible_loss(self) -> float:
        """Of all open decisions together, nats."""
        return float(self.regret.sum())


@dataclass(frozen=True, slots=True)
class RaceLimits:
    """When to stop: text is used up in any case. ``tokens`` counts each probe's.

    tolerance: part of the predicted damage that open decisions may cost together.
    """

    tolerance: float = TOLERANCE
    tokens: int | None = None
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class RaceResult:
    """How it ended.

    undecided: tensors whose type is open, the dearest first, with their possible loss in nats;
    those within the tolerance are included. by_curve: the same for tensors whose type depends on
    the type curve, which more text for their probe does not decide. reason: why it stopped.
    tokens: spent; tokens_all: what all tensors on all text would have cost.
    """

    undecided: tuple[tuple[str, float], ...]
    possible_loss: float
    predicted: float
    rounds: int
    tokens: int
    tokens_all: int
    elapsed_s: float
    stable: bool
    reason: str
    by_curve: tuple[tuple[str, float], ...] = ()


def byte_price(problem: Problem) -> float:
    """Nats that a byte is worth at this budget: the Lagrange multiplier of the file's bytes.

    0 when every tensor's best type fits. Found by bisection: bytes fall as the price rises.
    """
    sizes, costs = problem.size_bytes.astype(np.float64), problem.cost
    if _bytes_at(problem, 0.0) <= problem.budget_bytes:
        return 0.0
    steps = np.diff(np.unique(sizes))
    high = float(costs.max() - costs.min()) / float(steps.min()) if len(steps) else 1.0
    low = high * 1e-18
    while high / low > 1 + PRICE_GAP:
        middle = float(np.sqrt(low * high))
        if _bytes_at(problem, middle) <= problem.budget_bytes:
            high = middle
        else:
            low = middle
    return high


def _bytes_at(problem: Problem, price: float) -> int:
    """Bytes of the best options at a price, the smallest of equals."""
    starts = np.searchsorted(problem.owner, np.arange(len(problem.tensors)))
    value = problem.cost + price * problem.size_bytes
    best = np.minimum.reduceat(value, starts)[problem.owner]
    sizes = np.where(value <= best, problem.size_bytes, np.iinfo(np.int64).max)
    return int(np.minimum.reduceat(sizes, starts).sum())


def _cheapest(problem: Problem, scale: Floats, price: float) -> tuple[Ints, Floats]:
    """Best option of each tensor at a price, its costs scaled, and what it comes to; (T,) each."""
    value = problem.cost * scale[problem.owner] + price * problem.size_bytes
    order = np.lexsort((problem.size_bytes, value, problem.owner))
    first = np.searchsorted(problem.owner[order], np.arange(len(problem.tensors)))
    chosen: Ints = order[first]
    return chosen, value[chosen]


def decide(standing: Standing) -> Decisions:
    """The types at the current values, and which would change at an interval's end.

    Options are compared at the price of a byte, not by solving anew: the exact solver also fills
    the last bytes of the budget, with moves that any other budget would change.
    """
    problem = standing.problem
    price = byte_price(problem)
    chosen, _ = _cheapest(problem, np.ones(len(problem.tensors)), price)
    regret = np.zeros(len(problem.tensors))
    changes = np.zeros(len(problem.tensors), bool)
    for end in (standing.low, standing.high):
        scale = np.where(np.isfinite(end), end, 1e6)
        best, value = _cheapest(problem, scale, price)
        mine = problem.cost[chosen] * scale + price * problem.size_bytes[chosen]
        # Convex in the scale, so the worst case lies at an end.
        regret = np.maximum(regret, mine - value)
        changes |= best != chosen
    return Decisions(chosen, changes, regret, float(problem.cost[chosen].sum()), price)


def open_by_curve(
    problem: Problem, decisions: Decisions, spread: Floats
) -> tuple[tuple[str, float], ...]:
    """Tensors that another option could suit better if the type curve erred, the dearest first.

    ``spread`` (n,): standard deviation of the logarithm of each option's price, 0 where it was
    measured. Each other option is taken at the low end of its interval against the chosen one at
    the high end of its own; the loss in nats is an upper end, as that of `undecided` is.
    """
    far = CURVE_SIGMAS * spread
    chosen, owner = decisions.chosen, problem.owner
    bytes_nats = decisions.price * problem.size_bytes
    mine = (problem.cost * np.exp(far) + bytes_nats)[chosen]
    loss = mine[owner] - (problem.cost * np.exp(-far) + bytes_nats)
    loss[chosen] = 0.0
    starts = np.searchsorted(owner, np.arange(len(problem.tensors)))
    worst = np.maximum.reduceat(loss, starts)
    found = [(n, float(x)) for n, x in zip(problem.tensors, worst, strict=True) if x > 0]
    return tuple(sorted(found, key=lambda one: -one[1]))


def worth_measuring(decisions: Decisions, tolerance: float) -> Flags:
    """The fewest tensors without which the others' possible loss is half the tolerance."""
    order = np.argsort(decisions.regret, kind="stable")
    allowed = 0.5 * tolerance * decisions.cost
    kept = np.cumsum(decisions.regret[order]) > allowed
    wanted = np.zeros(len(order), bool)
    wanted[order[kept]] = True
    return wanted & decisions.open


def race(
    tensors: Sequence[str],
    round_tokens: Sequence[int],
    measure: Callable[[int, Sequence[str]], None],
    standing: Callable[[], Standing],
    limits: RaceLimits,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> RaceResult:
    """Run rounds until the open decisions may stay open, or a limit or the text ends it.

    ``round_tokens[r]``: tokens that round r costs per tensor; ``measure(r, names)`` measures the
    named tensors on its text; ``standing()`` says what is known then, its problem's tensors
    being ``tensors`` in the same order. The first round is always measured whole.
    """
    started, spent = clock(), 0
    wanted: Sequence[str] = tensors
    decisions: Decisions | None = None
    reason, stable, done = "", False, 0
    for number, tokens in enumerate(round_tokens):
        if number and (reason := _out_of(limits, spent + tokens, clock() - started)):
            break
        measure(number, wanted)
        spent += tokens * len(wanted)
        done = number + 1
        decisions = decide(standing())
        if decisions.possible_loss <= limits.tolerance * decisions.cost:
            reason, stable = "the open decisions may cost less than the tolerance", True
            break
        # At least one tensor stays, the one with most at stake.
        active = worth_measuring(decisions, limits.tolerance)
        active[int(np.argmax(decisions.regret))] = True
        wanted = [name for name, one in zip(tensors, active, strict=True) if one]
    assert decisions is not None, "a race needs a round"
    return RaceResult(
        undecided=_undecided(tensors, decisions),
        possible_loss=decisions.possible_loss,
        predicted=decisions.cost,
        rounds=done,
        tokens=spent,
        tokens_all=sum(round_tokens) * len(tensors),
        elapsed_s=clock() - started,
        stable=stable,
        reason=reason or "all text is used",
    )


def _out_of(limits: RaceLimits, tokens: int, elapsed_s: float) -> str:
    if limits.tokens is not None and tokens > limits.tokens:
        return f"the budget of {limits.tokens:,} tokens is spent"
    if limits.minutes is not None and elapsed_s >= 60 * limits.minutes:
        return f"the budget of {limits.minutes:g} minutes is spent"
    return ""


def _undecided(tensors: Sequence[str], decisions: Decisions) -> tuple[tuple[str, float], ...]:
    found = [
        (name, float(regret))
        for name, regret, is_open in zip(tensors, decisions.regret, decisions.open, strict=True)
        if is_open
    ]
    return tuple(sorted(found, key=lambda one: -one[1]))
