"""Few numbers that correct the additive table: fitted to what was measured, or steered by a study.

The table adds up damages of single tensors; whole layouts measure otherwise. A steering
multiplies each tensor's damage by a factor for its role and a smooth curve over depth, bends the
type curve, and adds a share of the other categories. The exact solver then spends the bytes on
the corrected table, so any steering gives a layout that fits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import least_squares

from bitwright.allocator.predictions import Prices
from bitwright.damage.pricing import DamageTable, Doubles
from bitwright.engine.tensors import HEADS, layer, role

MOST_ROLES = 9  # with a multiplier of their own, by damage; the others share one
OTHER = "other"
HEAD_ROLES = frozenset(role(name) for name in HEADS)
# Spreads (log) that the fit starts from: how far measured sums may be off, and factors from one.
MEASURED_SPREAD, FACTOR_SPREAD, SCALE_SPREAD = 0.05, 0.4, 1.0


@dataclass(frozen=True, slots=True)
class Steering:
    """Corrections; the default changes nothing.

    roles: role → log of its damages' factor, 'other' for those not listed. slope, curve: log
    factor along the depth -1…1, linear and quadratic. exponent: of the ratio of a type's damage
    to that of the tensor's measured type. general: share of the mean of the other categories.
    """

    roles: Mapping[str, float] = field(default_factory=dict)
    slope: float = 0.0
    curve: float = 0.0
    exponent: float = 1.0
    general: float = 0.0

    def weights(self, categories: Sequence[str], target: str) -> dict[str, float]:
        """Category → weight of its damage."""
        others = [c for c in categories if c != target]
        if not others:
            return {target: 1.0}
        return {target: 1 - self.general} | {c: self.general / len(others) for c in others}


def steering_between(table: DamageTable, other: DamageTable, target: str) -> Steering:
    """The role factors that bring ``table`` nearest to ``other``, a prior's table for example."""
    pairs: dict[str, list[float]] = {}
    c, d = table.categories.index(target), other.categories.index(target)
    rows = {name: t for t, name in enumerate(other.tensors)}
    for t, name in enumerate(table.tensors):
        if name in rows:
            ours, theirs = np.nanmax(table.nats[t, :, c]), np.nanmax(other.nats[rows[name], :, d])
            if ours > 0 and theirs > 0:
                pairs.setdefault(role(name), []).append(math.log(theirs / ours))
    middle = float(np.median([x for found in pairs.values() for x in found])) if pairs else 0.0
    return Steering({one: float(np.mean(found)) - middle for one, found in pairs.items()})


@dataclass(frozen=True, slots=True)
class Fit:
    """A steering and how far predictions were off (root mean square of the log) before and after.

    ``scale``: log factor common to all tensors; it changes no layout.
    """

    steering: Steering
    before: float
    after: float
    scale: float


def main_roles(table: DamageTable, target: str) -> tuple[str, ...]:
    """The roles that carry most damage on the target, at most `MOST_ROLES`, then 'other'.

    The embedding and the output are always among them: their factors decide the share of the
    budget that they get.
    """
    c = table.categories.index(target)
    total: dict[str, float] = {}
    for t, name in enumerate(table.tensors):
        total[role(name)] = total.get(role(name), 0.0) + float(np.nanmax(table.nats[t, :, c]))
    found = sorted(total, key=lambda one: (-total[one], one))
    heads = [one for one in found[MOST_ROLES:] if one in HEAD_ROLES]
    kept = [*found[: MOST_ROLES - len(heads)], *heads]
    rest = (OTHER,) if len(found) > len(kept) else ()
    return (*kept, *rest)


def depths(tensors: Sequence[str]) -> Doubles:
    """Depth (T,) from -1 (first layer) to 1 (last); 0 outside the layers."""
    layers = [layer(name) for name in tensors]
    last = max((one for one in layers if one is not None), default=0)
    middle = last / 2 or 1.0
    return np.array([0.0 if one is None else one / middle - 1 for one in layers])


def log_factors(tensors: Sequence[str], steering: Steering) -> Doubles:
    """Log of the factor (T,) of each tensor's damages."""
    depth = depths(tensors)
    in_layer = np.array([layer(name) is not None for name in tensors])
    other = steering.roles.get(OTHER, 0.0)
    by_role = np.array([steering.roles.get(role(name), other) for name in tensors])
    bend = np.where(in_layer, depth**2 - 1 / 3, 0.0)
    factors: Doubles = by_role + steering.slope * depth + steering.curve * bend
    return factors


def steered(table: DamageTable, steering: Steering) -> DamageTable:
    """The corrected table; errors grow and shrink with the damages."""
    factor = np.exp(log_factors(table.tensors, steering))[:, None, None]
    nats, se = table.nats, table.se
    if steering.exponent != 1.0:
        nats, se = _bent(table, steering.exponent)
    return replace(table, nats=nats * factor, se=se * factor)


def _bent(table: DamageTable, exponent: float) -> tuple[Doubles, Doubles]:
    """Damages with another exponent of the type curve, measured types kept."""
    offered = ~np.isnan(table.nats).all(axis=2)
    known = table.measured & offered
    column = np.where(known.any(axis=1), known.argmax(axis=1), offered.argmax(axis=1))
    anchor = table.nats[np.arange(len(column)), column][:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        bend = np.power(table.nats / anchor, exponent - 1.0)
    bend = np.where(np.isfinite(bend) & ~table.measured[:, :, None], bend, 1.0)
    return table.nats * bend, table.se * bend


def fit_steering(
    table: DamageTable,
    target: str,
    measured: Sequence[tuple[Mapping[str, str], float]],
) -> Fit:
    """Factors by role and depth that bring the table's sums near what layouts measured, nats.

    Few layouts cannot tell all factors, so each is held near one by `FACTOR_SPREAD`; layouts with
    a measured damage that is not above zero are left out.
    """
    used = [(types, nats) for types, nats in measured if nats > 0]
    roles = main_roles(table, target)
    if not used:
        return Fit(Steering(), math.nan, math.nan, 0.0)
    prices, c = Prices(table), table.categories.index(target)
    parts = np.array(
        [
            [float(prices.nats(n, types[n])[c]) if n in types else 0.0 for n in table.tensors]
            for types, _ in used
        ]
    )
    logs = np.log([nats for _, nats in used])

    def made(x: Doubles) -> Steering:
        return Steering(dict(zip(roles, x[1:-2].tolist(), strict=True)), float(x[-2]), float(x[-1]))

    def off(x: Doubles) -> Doubles:
        total = parts @ np.exp(x[0] + log_factors(table.tensors, made(x)))
        result: Doubles = np.log(np.maximum(total, 1e-300)) - logs
        return result

    def residuals(x: Doubles) -> Doubles:
        held = np.concatenate([x[:1] / SCALE_SPREAD, x[1:] / FACTOR_SPREAD])
        return np.concatenate([off(x) / MEASURED_SPREAD, held])

    start = np.zeros(len(roles) + 3)
    found = least_squares(residuals, start, method="trf", max_nfev=200).x
    before, after = (float(np.sqrt(np.mean(np.square(off(x))))) for x in (start, found))
    return Fit(made(found), before, after, float(found[0]))
