"""At which size a category breaks, from the same items scored at every size.

Each size is compared with the reference item by item. *Unharmed*: the upper end of the drop's
interval lies under the declared loss. *Harmed*: worse than the reference in a paired test, Holm's
correction over the sizes, and not shown to be unharmed. Everything else is undecided.

Right-or-wrong items: McNemar's exact test (Biometrika, 1947) and the interval of Agresti & Min
("Simple improved confidence intervals for comparing matched proportions", 2005), which does not
collapse where no item changed. Graded items: Student's t on the paired differences.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

from bitwright.eval.pairing import holm, mcnemar
from bitwright.eval.thresholds import monotone

Floats = NDArray[np.float64]
State = Literal["unharmed", "harmed", "undecided"]

CONFIDENCE = 0.95
RESAMPLES = 2000
SURE = 0.95  # share of the resamples in which a category has to break first, to be named
MOST_ITEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class SizeScores:
    """What each size scored on a category's items, beside the reference.

    ``reference`` (n,) and ``scores`` (f, n): 1 or 0 for right or wrong, or a graded value where
    more is better (likelihoods may be negative). ``bpw`` (f,) in any order.
    """

    category: str
    bpw: Floats
    reference: Floats
    scores: Floats

    @property
    def n_items(self) -> int:
        """Items of the category."""
        return len(self.reference)

    @property
    def graded(self) -> bool:
        """Whether some value is neither 0 nor 1."""
        both = np.concatenate([self.reference, self.scores.ravel()])
        return not bool(np.isin(both, (0.0, 1.0)).all())


@dataclass(frozen=True, slots=True)
class Paired:
    """A mean difference with its 95 % interval and two-sided p.

    ``variance`` of one item's difference; ``changed``: share of right-or-wrong items that differ,
    None for graded items.
    """

    value: float
    low: float
    high: float
    p: float
    variance: float
    changed: float | None


@dataclass(frozen=True, slots=True)
class Drop:
    """Reference less size, mean over the items, with its interval, p and verdict.

    ``p_holm`` is corrected over the sizes of the category. ``more_items``: how many further items
    would decide an undecided size if the rates stay as they are; None where it is decided, or
    where no number would.
    """

    bpw: float
    value: float
    low: float
    high: float
    p: float
    p_holm: float
    state: State
    more_items: int | None

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Breakage:
    """The interval of sizes in which a category breaks; None where an end is not established.

    ``drops`` from the largest size to the smallest. ``more_items``: the fewest further items that
    would decide the sizes between.
    """

    category: str
    last_unharmed_bpw: float | None
    first_harmed_bpw: float | None
    n_items: int
    reference: float
    drops: tuple[Drop, ...]
    more_items: int | None

    @property
    def verdict(self) -> str:
        """The result as a phrase."""
        low, high = self.first_harmed_bpw, self.last_unharmed_bpw
        if low is not None and high is not None:
            return f"breaks between {high:.2f} and {low:.2f} bpw"
        if low is not None:
            return f"breaks above {low:.2f} bpw; no size is shown unharmed"
        if high is not None:
            more = "" if self.drops[-1].state == "unharmed" else ", not established below"
            return f"unharmed down to {high:.2f} bpw{more}"
        return "not established"


@dataclass(frozen=True, slots=True)
class FirstToBreak:
    """Which category breaks at the largest size; ``category`` None where that is undecided.

    ``probabilities``: share of the resamples of the items in which each category is the first;
    what is missing to 1 are resamples in which nothing breaks. ``probability``: of the leader.
    """

    category: str | None
    leader: str | None
    probability: float
    probabilities: Mapping[str, float]
    break_bpw: Mapping[str, tuple[float | None, float | None]]


def breakage(scores: SizeScores, max_loss: float) -> Breakage:
    """The verdict on one category; ``max_loss`` is the share of the reference's score.

    A size is compared on all items; sizes above the first harmed one give the unharmed end.
    """
    order = np.argsort(-scores.bpw, kind="stable")
    reference = float(scores.reference.mean())
    margin = max_loss * abs(reference)
    pairs = [compare_paired(scores.reference, scores.scores[i], scores.graded) for i in order]
    corrected = holm([pair.p for pair in pairs])
    drops = [
        _drop(float(scores.bpw[i]), pair, p_holm, margin, scores.n_items, len(order))
        for i, pair, p_holm in zip(order, pairs, corrected, strict=True)
    ]
    harmed = next((i for i, d in enumerate(drops) if d.state == "harmed"), None)
    above = [d for d in drops[:harmed] if d.state == "unharmed"]
    last = above[-1].bpw if above else None
    between = [d for d in drops[:harmed] if last is None or d.bpw < last]
    needed = [d.more_items for d in between if d.more_items is not None]
    return Breakage(
        scores.category,
        last,
        None if harmed is None else drops[harmed].bpw,
        scores.n_items,
        reference,
        tuple(drops),
        min(needed, default=None),
    )


def compare_paired(reference: Floats, size: Floats, graded: bool) -> Paired:
    """Reference less size on the same items, with interval and test."""
    difference = reference - size
    n = len(difference)
    value = float(difference.mean())
    if graded:
        return _student(difference, value)
    worse, better = int((difference > 0).sum()), int((difference < 0).sum())
    z = float(ndtri((1.0 + CONFIDENCE) / 2.0))
    # Half an observation in each of the four cells.
    centre = (worse - better) / (n + 2)
    spread = (worse + better + 1.0) / (n + 2) - centre**2
    half = z * math.sqrt(spread / (n + 2))
    p = mcnemar(reference, size)
    return Paired(value, centre - half, centre + half, p, spread, (worse + better) / n)


def _student(difference: Floats, value: float) -> Paired:
    n = len(difference)
    if n < 2:
        return Paired(value, -math.inf, math.inf, 1.0, math.inf, None)
    variance = float(difference.var(ddof=1))
    error = math.sqrt(variance / n)
    if error == 0.0:
        return Paired(value, value, value, 1.0 if value == 0.0 else 0.0, 0.0, None)
    half = float(stdtrit(n - 1, (1.0 + CONFIDENCE) / 2.0)) * error
    p = 2.0 * float(stdtr(n - 1, -abs(value) / error))
    return Paired(value, value - half, value + half, p, variance, None)


def _drop(
    bpw: float, pair: Paired, p_holm: float, margin: float, n_items: int, n_sizes: int
) -> Drop:
    state: State = "undecided"
    if pair.high < margin:
        state = "unharmed"
    elif pair.value > 0.0 and p_holm < 1.0 - CONFIDENCE:
        state = "harmed"
    more = more_items(pair, margin, n_items, n_sizes) if state == "undecided" else None
    return Drop(bpw, pair.value, pair.low, pair.high, pair.p, p_holm, state, more)


def more_items(pair: Paired, margin: float, n_items: int, n_sizes: int) -> int | None:
    """Further items that would decide a size, if its rates stay as they are; None for no number.

    Sizes are tried 5 % apart. The test for harm is taken with the smallest p that Holm's
    correction over ``n_sizes`` asks for.
    """
    if not math.isfinite(pair.variance):
        return None
    z_harm = float(ndtri(1.0 - (1.0 - CONFIDENCE) / 2.0 / n_sizes))
    n = n_items
    while (n := max(n + 1, math.ceil(1.05 * n))) <= MOST_ITEMS:
        high, error = _bound(pair, n)
        if high < margin or pair.value > z_harm * error:
            return n - n_items
    return None


def _bound(pair: Paired, n: int) -> tuple[float, float]:
    """(upper end of the interval, standard error) of the same rates on ``n`` items."""
    z = float(ndtri((1.0 + CONFIDENCE) / 2.0))
    if pair.changed is None:
        error = math.sqrt(pair.variance / n)
        return pair.value + z * error, error
    centre = pair.value * n / (n + 2)
    spread = (pair.changed * n + 1.0) / (n + 2) - centre**2
    error = math.sqrt(spread / (n + 2))
    return centre + z * error, error


def first_to_break(
    found: Sequence[SizeScores],
    max_loss: float,
    rng: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
    sure: float = SURE,
) -> FirstToBreak:
    """Resample each category's items and see whose score falls by ``max_loss`` at the most bpw.

    The place is interpolated on the loss made monotone over the sizes. Ties are shared.
    """
    places = np.stack([_break_places(s, max_loss, rng, resamples) for s in found], axis=1)
    first = places.max(axis=1, keepdims=True)
    leads = (places == first) & np.isfinite(first)
    shares = (leads / np.maximum(leads.sum(axis=1, keepdims=True), 1)).mean(axis=0)
    probabilities = {s.category: float(p) for s, p in zip(found, shares, strict=True)}
    leader = max(probabilities, key=lambda c: probabilities[c])
    top = probabilities[leader]
    return FirstToBreak(
        leader if top >= sure else None,
        leader if top > 0.0 else None,
        top,
        probabilities,
        {s.category: _bounds(places[:, k]) for k, s in enumerate(found)},
    )


def _bounds(places: Floats) -> tuple[float | None, float | None]:
    """95 % of the resampled break points, in bpw; None where that end never breaks."""
    low, high = np.quantile(places, [0.025, 0.975], method="nearest")
    return tuple(float(v) if math.isfinite(v) else None for v in (low, high))  # type: ignore[return-value]


def _break_places(
    scores: SizeScores, max_loss: float, rng: np.random.Generator, resamples: int
) -> Floats:
    """(resamples,) bpw at which the loss reaches ``max_loss``; -inf where it never does."""
    order = np.argsort(-scores.bpw, kind="stable")
    x = scores.bpw[order]
    n = scores.n_items
    counts = rng.multinomial(n, np.full(n, 1.0 / n), resamples) / n
    means, reference = counts @ scores.scores[order].T, counts @ scores.reference
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = (reference[:, None] - means) / np.abs(reference[:, None])
    return np.array([_place(x, loss, max_loss) for loss in losses])


def _place(x: Floats, loss: Floats, max_loss: float) -> float:
    if not np.isfinite(loss).all():
        return -math.inf
    rising = monotone(loss)
    over = np.flatnonzero(rising >= max_loss)
    if not len(over):
        return -math.inf
    i = int(over[0])
    if i == 0:
        return float(x[0])
    part = (max_loss - rising[i - 1]) / (rising[i] - rising[i - 1])
    return float(x[i - 1] + part * (x[i] - x[i - 1]))
