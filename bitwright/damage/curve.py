"""How damage falls from type to type: damage ratio = error ratio ^ exponent · a factor per type.

The packing error of a tensor says most of it (R² above 0.95 on published and own maps), but not
all: bits saved in one place of a block are not felt like bits saved in another. So a few tensors
are measured at several types, and exponent, factors and what they leave open come from those.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitwright.damage.damage_map import DamageMap

Doubles = NDArray[np.float64]
Errors = Mapping[tuple[str, str], float]

MIN_PAIRS = 4  # fewer say nothing about an exponent
FACTOR_WEIGHT = 2.0  # pairs of one type that weigh as much as the belief in a factor of one
SPREAD_WEIGHT = 4.0  # pairs of one type that weigh as much as the spread over all types
FLOOR_FACTOR = 2.0  # below it a damage cannot be told from the noise of decoding twice


@dataclass(frozen=True, slots=True)
class TypeCurve:
    """A fitted curve; the default is the plain ratio of errors.

    offset: type → logarithm of its factor. spread: type → standard deviation of the logarithm of
    a price about the truth; ``spread_else`` for other types. r2: of the log damage ratios, NaN
    when nothing was fitted. n_pairs: measured (tensor, type) pairs behind it.
    """

    exponent: float = 1.0
    offset: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    spread_else: float = 0.0
    r2: float = float("nan")
    n_pairs: int = 0

    def log_ratio(self, log_error_ratio: float, type_name: str, base: str) -> float:
        """Logarithm of the damage at a type over that at the measured type ``base``."""
        step = self.offset.get(type_name, 0.0) - self.offset.get(base, 0.0)
        return self.exponent * log_error_ratio + step

    def log_spread(self, type_name: str) -> float:
        """Standard deviation of the logarithm of a price at that type."""
        return self.spread.get(type_name, self.spread_else)


@dataclass(frozen=True, slots=True)
class CurvePair:
    """Measured: log damage ratio (y) and log error ratio (x) of one tensor at two types."""

    tensor: str
    type: str
    x: float
    y: float


def curve_pairs(damage_map: DamageMap, errors: Errors, span: str = "scored") -> list[CurvePair]:
    """Each tensor measured at further types against its measurement of the largest error.

    Damages are summed over categories; those under the noise floor are left out.
    """
    rows = damage_map.rows[damage_map.rows["span"] == span]
    least = FLOOR_FACTOR * sum(damage_map.noise_floor.values())
    nats: dict[str, dict[str, float]] = {}
    columns = (rows[c].tolist() for c in ("tensor", "type", "kld_nats"))
    for tensor, type_name, kld in zip(*columns, strict=True):
        found = nats.setdefault(tensor, {})
        found[type_name] = found.get(type_name, 0.0) + kld
    pairs = []
    for tensor, by_type in nats.items():
        known = {t: errors.get((tensor, t), 0.0) for t in by_type}
        usable = [t for t in by_type if known[t] > 0 and by_type[t] > least and by_type[t] > 0]
        if len(usable) < 2:
            continue
        base = max(usable, key=lambda t: (known[t], t))
        for other in usable:
            if other != base:
                x = np.log(known[other] / known[base])
                y = np.log(by_type[other] / by_type[base])
                pairs.append(CurvePair(tensor, other, float(x), float(y)))
    return pairs


def fit_curve(damage_map: DamageMap, errors: Errors, span: str = "scored") -> TypeCurve:
    """The curve of a map's own pairs; the plain one where there are fewer than `MIN_PAIRS`.

    The exponent is the median slope through the origin, so that single tensors whose error
    misleads do not turn it; factors and spreads are shrunk towards one and towards the pooled
    spread, since a type has only a few pairs.
    """
    pairs = [p for p in curve_pairs(damage_map, errors, span) if abs(p.x) > 0.1]
    if len(pairs) < MIN_PAIRS:
        return TypeCurve()
    x, y = np.array([p.x for p in pairs]), np.array([p.y for p in pairs])
    types = np.array([p.type for p in pairs])
    exponent = _weighted_median(y / x, np.abs(x))
    offset, fitted = {}, exponent * x
    for type_name in dict.fromkeys(types.tolist()):
        mine = types == type_name
        count = int(mine.sum())
        offset[type_name] = float(np.median((y - exponent * x)[mine])) * (
            count / (count + FACTOR_WEIGHT)
        )
        fitted[mine] += offset[type_name]
    squares = np.square(y - fitted)
    pooled = float(squares.sum()) / max(1, len(pairs) - 1)
    spread = {
        t: float(
            np.sqrt(
                (squares[types == t].sum() + SPREAD_WEIGHT * pooled)
                / ((types == t).sum() + SPREAD_WEIGHT)
            )
        )
        for t in offset
    }
    around = float(np.square(y - y.mean()).sum())
    return TypeCurve(
        exponent=exponent,
        offset=offset,
        spread=spread,
        spread_else=float(np.sqrt(pooled)),
        r2=1 - float(squares.sum()) / around if around > 0 else float("nan"),
        n_pairs=len(pairs),
    )


def describe_curve(curve: TypeCurve) -> dict[str, object]:
    """A fit as strict JSON; empty where nothing was fitted."""
    if not curve.n_pairs:
        return {}
    return {
        "exponent": curve.exponent,
        "r2": None if np.isnan(curve.r2) else curve.r2,
        "n_pairs": curve.n_pairs,
        "factor": {t: float(np.exp(step)) for t, step in curve.offset.items()},
        "spread_log": dict(curve.spread),
    }


def _weighted_median(values: Doubles, weights: Doubles) -> float:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])
