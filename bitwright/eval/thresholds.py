"""Which type is safe: shown under a threshold, shown over it, or undecided between.

The threshold is a KLD. It is given, or learnt from files whose damage and executed scores are both
known: the KLD at which a category has lost the declared share of its score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.eval.statistics import Interval

Floats = NDArray[np.float64]
State = Literal["under", "over", "undecided"]

TINY_NATS = 1e-9
LOW, HIGH = 0.025, 0.975


@dataclass(frozen=True, slots=True)
class Step:
    """One rung of a ladder: a type, its bits per weight, and the damage's interval in nats."""

    type: str
    bpw: float
    kld: Interval


@dataclass(frozen=True, slots=True)
class SafeType:
    """One group's ladder on one category.

    ``lowest_safe``: the lowest type of an unbroken run of types shown under the threshold, from
    the top; ``first_over``: the highest type shown over it; ``undecided``: types between.
    """

    lowest_safe: str | None
    first_over: str | None
    undecided: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The KLD at which a category has lost the declared share of its score.

    ``reached`` is False where no file lost that much: then ``kld_nats`` is the largest KLD that
    was measured, up to which nothing broke. ``low`` and ``high`` hold 95 % of the resamples of
    the items.
    """

    kld_nats: float
    low: float
    high: float
    reached: bool


def state_of(kld: Interval, threshold_nats: float) -> State:
    """Shown under: the interval's upper end is below; shown over: its lower end is above."""
    if kld.high is not None and kld.high < threshold_nats:
        return "under"
    if kld.low is not None and kld.low > threshold_nats:
        return "over"
    return "undecided"


def safe_type(steps: Sequence[Step], threshold_nats: float) -> SafeType:
    """The verdict on one ladder, in any order.

    A type is safe only if all above it are: a lucky low type under an unsafe one is noise.
    """
    ordered = sorted(steps, key=lambda step: -step.bpw)
    states = [state_of(step.kld, threshold_nats) for step in ordered]
    n_safe = next((i for i, state in enumerate(states) if state != "under"), len(states))
    over = next((i for i, state in enumerate(states) if state == "over"), None)
    return SafeType(
        ordered[n_safe - 1].type if n_safe else None,
        None if over is None else ordered[over].type,
        tuple(step.type for step in ordered[n_safe:over]),
    )


def safe_for_all(
    ladder: Mapping[str, Sequence[Step]], thresholds_nats: Mapping[str, float]
) -> tuple[str | None, dict[str, SafeType]]:
    """The lowest type that is safe for every category, and each category's own verdict."""
    verdicts = {c: safe_type(steps, thresholds_nats[c]) for c, steps in ladder.items()}
    bpw = {step.type: step.bpw for steps in ladder.values() for step in steps}
    safe = [v.lowest_safe for v in verdicts.values()]
    known = [name for name in safe if name is not None]
    if not known or len(known) < len(safe):
        return None, verdicts
    return max(known, key=lambda name: bpw[name]), verdicts


def straddles(steps: Sequence[Step], threshold_nats: float) -> bool:
    """Whether the ladder's answer still depends on an interval that holds the threshold."""
    return bool(safe_type(steps, threshold_nats).undecided)


def calibrate(
    kld_nats: Sequence[float],
    scores: Floats,
    reference: Floats,
    max_loss: float,
    rng: np.random.Generator,
    resamples: int = 1000,
) -> Calibration:
    """Learn the threshold from files of one model.

    Args:
        kld_nats: (f,) mean KLD of each file on the category.
        scores: (f, n) what each file scored on each item.
        reference: (n,) what the reference scored.
        max_loss: share of the reference's score that may be lost.
    """
    x = np.log(np.maximum(np.asarray(kld_nats, dtype=np.float64), TINY_NATS))
    order = np.argsort(x, kind="stable")
    x, ranked = x[order], scores[order]
    value, reached = _crossing(x, ranked.mean(axis=1), float(reference.mean()), max_loss)
    n_items = len(reference)
    drawn = rng.multinomial(n_items, np.full(n_items, 1.0 / n_items), resamples) / n_items
    means, reference_means = drawn @ ranked.T, drawn @ reference
    found = [
        _crossing(x, row, float(mean), max_loss)[0]
        for row, mean in zip(means, reference_means, strict=True)
    ]
    low, high = np.quantile(found, [LOW, HIGH])
    return Calibration(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)), reached)


def _crossing(
    x: Floats, means: Floats, reference_mean: float, max_loss: float
) -> tuple[float, bool]:
    """Where the loss, made monotone over ``x``, reaches ``max_loss``; else the last x.

    Before the first file the loss is taken to grow in proportion to the KLD, from none at none.
    """
    if reference_mean == 0.0:
        return float(x[-1]), False
    loss = monotone((reference_mean - means) / abs(reference_mean))
    over = np.flatnonzero(loss >= max_loss)
    if not len(over):
        return float(x[-1]), False
    i = int(over[0])
    if i == 0:
        return float(x[0] + np.log(max_loss / loss[0])), True
    if loss[i] == loss[i - 1]:
        return float(x[i]), True
    part = (max_loss - loss[i - 1]) / (loss[i] - loss[i - 1])
    return float(x[i - 1] + part * (x[i] - x[i - 1])), True


def monotone(values: Floats) -> Floats:
    """The nearest rising sequence in least squares (pool adjacent violators)."""
    level: list[float] = []
    count: list[int] = []
    for value in values:
        level.append(float(value))
        count.append(1)
        while len(level) > 1 and level[-2] >= level[-1]:
            total = count[-2] + count[-1]
            level[-2] = (level[-2] * count[-2] + level[-1] * count[-1]) / total
            count[-2] = total
            level.pop()
            count.pop()
    return np.repeat(level, count)
