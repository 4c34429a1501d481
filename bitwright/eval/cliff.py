"""Where a damage curve breaks: two straight pieces of log KLD over bpw against smooth curves.

A cliff is a bend: under it, log KLD rises faster per bit taken away than above it. A straight line
and a parabola explain many curves without one, so a cliff is only reported where the bent line has
the lower BIC (Schwarz, 1978) by `CLEAR`. The interval of the break point holds every place where
an F test of the bent line does not reject it (profile likelihood: Seber & Wild, "Nonlinear
Regression", 1989, §5.4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution

Floats = NDArray[np.float64]

CLEAR = 6.0  # difference of BIC that counts as strong evidence (Kass & Raftery, 1995)
MIN_SIZES = 7  # a bent line has four parameters, and its scatter must be known too
GRID = 400
# No measured curve follows a line better than this (in log KLD), whatever its standard errors say;
# it also keeps a perfect fit from having no scatter at all.
MODEL_NOISE = 0.03


@dataclass(frozen=True, slots=True)
class Cliff:
    """The verdict on one curve.

    ``break_bpw`` with ``low``/``high`` (95 %) and the two slopes, in nats of log KLD per bpw, are
    None unless ``found``. ``evidence``: BIC of the best smooth curve less that of the bent line.
    """

    found: bool
    reason: str
    break_bpw: float | None = None
    low: float | None = None
    high: float | None = None
    slope_above: float | None = None
    slope_below: float | None = None
    evidence: float | None = None


@dataclass(frozen=True, slots=True)
class _Bent:
    break_bpw: float
    coefficients: Floats  # level, slope above, how much steeper below
    rss: float


def find_cliff(
    bpw: Sequence[float],
    kld_nats: Sequence[float],
    se: Sequence[float | None] | None = None,
    *,
    confidence: float = 0.95,
) -> Cliff:
    """Fit one curve; points without a positive KLD say nothing in logarithms and are left out.

    ``se``: standard errors of the KLDs, to weigh the points; None where one is not known.
    """
    x, y, weight = _points(bpw, kld_nats, se)
    if len(x) < MIN_SIZES:
        return Cliff(False, f"no verdict: {len(x)} sizes measured, {MIN_SIZES} needed")
    smooth = min(
        _bic(_fit(np.vander(x, degree + 1), y, weight)[1], len(x), degree + 1) for degree in (1, 2)
    )
    fits = [_bent(c, x, y, weight) for c in _places(x)]
    best = min(fits, key=lambda fit: fit.rss)
    evidence = smooth - _bic(best.rss, len(x), 4)
    slope_above = float(best.coefficients[1])
    slope_below = slope_above - float(best.coefficients[2])
    if evidence < CLEAR:
        return Cliff(False, "no cliff found: a smooth curve fits as well", evidence=float(evidence))
    if slope_below > slope_above or slope_below >= 0.0:
        return Cliff(
            False, "no cliff found: the curve is flatter below its bend", evidence=float(evidence)
        )
    free = len(x) - 4
    limit = best.rss * (1.0 + float(f_distribution.ppf(confidence, 1, free)) / free)
    inside = [fit.break_bpw for fit in fits if fit.rss <= limit]
    return Cliff(
        True,
        "cliff found",
        best.break_bpw,
        min(inside),
        max(inside),
        slope_above,
        slope_below,
        float(evidence),
    )


def _points(
    bpw: Sequence[float], kld: Sequence[float], se: Sequence[float | None] | None
) -> tuple[Floats, Floats, Floats]:
    """bpw (n,) ascending, log KLD (n,) and weights (n,) that average 1."""
    errors = [None] * len(bpw) if se is None else list(se)
    rows = sorted(
        (x, math.log(k), (e or 0.0) / k)
        for x, k, e in zip(bpw, kld, errors, strict=True)
        if k > 0.0 and math.isfinite(k)
    )
    x, y, relative = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    weight = 1.0 / (relative**2 + MODEL_NOISE**2)
    return x, y, weight / weight.mean() if len(x) else weight


def _places(x: Floats) -> Floats:
    """Where a bend is tried: at least two points lie on either side of it."""
    return np.linspace(x[1], x[-2], GRID)


def _bent(place: float, x: Floats, y: Floats, weight: Floats) -> _Bent:
    below = np.maximum(place - x, 0.0)
    coefficients, rss = _fit(np.stack([np.ones_like(x), x - place, below], 1), y, weight)
    return _Bent(float(place), coefficients, rss)


def _fit(design: Floats, y: Floats, weight: Floats) -> tuple[Floats, float]:
    """Weighted least squares: coefficients and the weighted sum of squared residuals."""
    root = np.sqrt(weight)
    solved = np.linalg.lstsq(design * root[:, None], y * root, rcond=None)[0]
    coefficients = np.asarray(solved, dtype=np.float64)
    residual = (y - design @ coefficients) * root
    return coefficients, float(residual @ residual)


def _bic(rss: float, n: int, parameters: int) -> float:
    return n * math.log(rss / n + MODEL_NOISE**2) + parameters * math.log(n)
