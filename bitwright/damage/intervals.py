"""How well damages are known, and how well they are known against each other.

Rows of text differ more than tensors do: a row that is easy to damage is so for most of them. What
decides a layout is the tensors' damages relative to each other, so each is estimated as a ratio to
the common course of the blocks (groups of neighbouring rows) it was measured on. That also makes
tensors comparable that were measured on different blocks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

Doubles = NDArray[np.float64]
Ints = NDArray[np.int64]

# Below this part of all blocks a tensor cannot help to describe their common course.
SMALLEST_COUNT = 2


@dataclass(frozen=True, slots=True)
class Blocks:
    """Σ KLD in nats of T tensors over B blocks, NaN where not measured: (T, B); rows: (B,)."""

    sums: Doubles
    rows: Doubles


@dataclass(frozen=True, slots=True)
class Estimate:
    """Damage per row of T tensors.

    nats: (T,). se: standard error of the value itself. paired_se: of the value relative to the
    other tensors', which share their text. n_blocks: (T,) blocks behind it. All nats per row.
    """

    nats: Doubles
    se: Doubles
    paired_se: Doubles
    n_blocks: Ints


@dataclass(frozen=True, slots=True)
class Interval:
    """Ends of an interval for each tensor, nats, (T,)."""

    low: Doubles
    high: Doubles


def estimate(blocks: Blocks) -> Estimate:
    """Damages and both standard errors; NaN where a tensor has fewer than two blocks.

    A tensor measured on a part of the blocks is scaled by what this part means for the tensors
    measured on all of them (a ratio estimate, Cochran, "Sampling Techniques", 1977, §6.3).
    """
    seen = ~np.isnan(blocks.sums) & (blocks.rows > 0)
    course = common_course(blocks, seen)
    n_rows = float(blocks.rows.sum())
    filled = np.where(seen, blocks.sums, 0.0)
    share = seen @ course  # of the common damage, in the blocks that a tensor was measured on
    counts = seen.sum(axis=1).astype(np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = filled.sum(axis=1) / share
        around = np.where(seen, filled - total[:, None] * course, 0.0)
        paired = np.sqrt(_variance(around, counts)) / share
        even = blocks.rows / n_rows
        plain = filled.sum(axis=1) / (seen @ even)
        spread = np.where(seen, filled - plain[:, None] * even, 0.0)
        own = np.sqrt(_variance(spread, counts)) / (seen @ even)
    full = counts == seen.any(axis=0).sum()
    # A tensor with fewer blocks is tied to the course, whose own error it then shares.
    used: NDArray[np.bool_] = blocks.rows > 0
    course_se = _course_error(course, even, used & seen.any(axis=0))
    absolute = np.where(full, own, np.hypot(paired, np.abs(total) * course_se))
    return Estimate(total / n_rows, absolute / n_rows, paired / n_rows, counts)


def common_course(blocks: Blocks, seen: NDArray[np.bool_]) -> Doubles:
    """Part of the common damage that lies in each block, (B,), of sum 1.

    The mean of the shares of those tensors that were measured on every block. Without any, or
    where they were not damaged at all, damage is taken to be even over rows.
    """
    anchors = seen[:, seen.any(axis=0)].all(axis=1)
    sums = blocks.sums[anchors]
    totals = np.nansum(sums, axis=1) if len(sums) else np.zeros(0)
    usable = totals > 0
    even: Doubles = np.where(seen.any(axis=0), blocks.rows, 0.0)
    if not usable.any():
        return even / float(even.sum())
    shares = np.nan_to_num(sums[usable]) / totals[usable, None]
    course: Doubles = np.median(shares, axis=0) if usable.sum() > 2 else shares.mean(axis=0)
    held: Doubles = np.maximum(course, 1e-3 * even / even.sum())
    return held / float(held.sum())


def _variance(residuals: Doubles, counts: Ints) -> Doubles:
    """Of the sum of each tensor's residuals over its blocks."""
    squares: Doubles = np.square(residuals).sum(axis=1)
    usable = counts >= SMALLEST_COUNT
    return np.where(usable, squares * counts / np.maximum(counts - 1, 1), np.nan)


def _course_error(course: Doubles, even: Doubles, seen: NDArray[np.bool_]) -> float:
    """Relative standard error of the common damage itself."""
    count = int(seen.sum())
    if count < SMALLEST_COUNT:
        return float("nan")
    return float(np.sqrt(np.square((course - even)[seen]).sum() * count / (count - 1)))


def interval(nats: Doubles, se: Doubles, n_blocks: Ints, level: float) -> Interval:
    """Two-sided intervals of that level, symmetric on the logarithm.

    Damage is a mean of positive, skewed values, and its logarithm is nearer to normal. Values
    not above zero get a plain interval that starts at zero; an unknown error an endless one.
    """
    factor = student.ppf(0.5 + level / 2, np.maximum(n_blocks - 1, 1))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        reach = factor * se / nats
        positive = nats > 0
        low = np.where(positive, nats * np.exp(-reach), 0.0)
        high = np.where(positive, nats * np.exp(reach), np.maximum(nats, 0) + factor * se)
    unknown = np.isnan(se)
    return Interval(np.where(unknown, 0.0, low), np.where(unknown, np.inf, high))
