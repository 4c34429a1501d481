"""From probes to every type: damage = probe damage · (error / error at the probe type)^exponent.

Exponent, a factor per type and the spread about both come from the map's own tensors that were
measured at several types (`curve`); without those it is the plain ratio of errors.

The errors are the tensor's own importance-weighted packing errors. One massive channel can dominate
such an error at the probe type and mislead by orders of magnitude (seen in ffn_down of a few
blocks), so each ratio is held within `TRAP_FACTOR` of the usual one for its pair of types.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitwright.damage.curve import FLOOR_FACTOR, TypeCurve, fit_curve
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.ledger import SPANS
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.packing import ERROR_ROWS, Packer
from bitwright.errors import ConfigError, InputError

Doubles = NDArray[np.float64]
Errors = Mapping[tuple[str, str], float]
Offered = Mapping[str, Sequence[str]]
Progress = Callable[[int, int, str], None]

TRAP_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class DamageTable:
    """Priced damage of T tensors at Y types on C categories.

    nats, se: float64 [T, Y, C], NaN where a type is not offered. measured: bool [T, Y], True where
    a probe stands behind the price directly. clamped: (tensor, type) whose error ratio was held
    back. clipped: (tensor, category) whose measured damage is not above `FLOOR_FACTOR` times
    the noise floor, or negative: it counts as 0 and its standard error stays. curve: how types
    that were not measured are priced; its spread is part of their standard errors.
    """

    tensors: tuple[str, ...]
    types: tuple[str, ...]
    categories: tuple[str, ...]
    nats: Doubles
    se: Doubles
    measured: NDArray[np.bool_]
    clamped: tuple[tuple[str, str], ...] = ()
    clipped: tuple[tuple[str, str], ...] = ()
    curve: TypeCurve = field(default_factory=TypeCurve)

    def weighted(self, weights: Mapping[str, float]) -> Doubles:
        """Σ weight · damage over the named categories: nats [T, Y], NaN where not offered.

        Raises:
            ConfigError: a category that was not measured.
        """
        nats: Doubles = self.nats @ self._vector(weights)
        return nats

    def weighted_se(self, weights: Mapping[str, float]) -> Doubles:
        """Standard error of `weighted`, categories taken as independent: nats [T, Y]."""
        variance: Doubles = np.square(self.se) @ np.square(self._vector(weights))
        return np.sqrt(variance)

    def _vector(self, weights: Mapping[str, float]) -> Doubles:
        if unknown := sorted(set(weights) - set(self.categories)):
            raise ConfigError(
                f"category {unknown[0]!r} has a weight and no measured damage: use "
                f"{', '.join(self.categories)}"
            )
        return np.array([weights.get(category, 0.0) for category in self.categories])


@dataclass(frozen=True, slots=True)
class _Probed:
    """Measured damage of one tensor at one type: nats and standard error, each [C]."""

    type: str
    nats: Doubles
    se: Doubles


def types_to_pack(damage_map: DamageMap, offered: Offered) -> dict[str, tuple[str, ...]]:
    """The types whose errors `price_types` needs, by tensor: those offered and those probed."""
    probed = damage_map.types()
    return {
        tensor: tuple(dict.fromkeys((*types, *probed.get(tensor, ()))))
        for tensor, types in offered.items()
    }


def packing_errors(
    packer: Packer,
    types: Offered,
    *,
    max_rows: int = ERROR_ROWS,
    progress: Progress | None = None,
) -> dict[tuple[str, str], float]:
    """Relative packing error of each (tensor, type), over the packer's threads.

    Importance-weighted where the imatrix has the tensor, else unweighted; on at most `max_rows`
    evenly spread rows. `progress(done, total, label)` counts pairs.
    """
    pairs = [(tensor, type_name) for tensor, names in types.items() for type_name in names]
    errors: dict[tuple[str, str], float] = {}
    with ThreadPoolExecutor(packer.threads) as pool:
        found = pool.map(lambda pair: packer.relative_error(*pair, max_rows=max_rows), pairs)
        for pair, error in zip(pairs, found, strict=True):
            errors[pair] = error
            if progress is not None:
                progress(len(errors), len(pairs), f"{pair[0]} {pair[1]}")
    return errors


def price_types(
    damage_map: DamageMap,
    errors: Errors,
    offered: Offered,
    *,
    span: str = "scored",
    exponent: float = 1.0,
    curve: TypeCurve | None = None,
) -> DamageTable:
    """Price every offered type of every offered tensor.

    A measured type keeps its measured damage; any other is scaled from the measured type whose
    error is nearest, by ``curve`` (default: the one that the map's own pairs give); ``exponent``
    multiplies the curve's, to propose other layouts.

    Within a family a type of more bits is never priced above one of fewer.

    Raises:
        InputError: no measurement, or no error, of an offered tensor; a category without tokens.
    """
    probes = _probes(damage_map, span, offered)
    _check_errors(probes, errors, offered)
    tensors, categories = tuple(offered), damage_map.categories
    types = tuple(sorted({t for names in offered.values() for t in names}, key=_bits))
    shape = (len(tensors), len(types), len(categories))
    nats, se, measured = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape[:2], bool)
    floor = np.array([FLOOR_FACTOR * damage_map.noise_floor.get(c, 0.0) for c in categories])
    usual = usual_ratios(
        {tensor: [p.type for p in found] for tensor, found in probes.items()}, errors, offered
    )
    curve = fit_curve(damage_map, errors, span) if curve is None else curve
    clamped: list[tuple[str, str]] = []
    for i, tensor in enumerate(tensors):
        for type_name in sorted(offered[tensor], key=_bits):
            j = types.index(type_name)
            source = _nearest(probes[tensor], tensor, type_name, errors)
            ratio, held = _ratio(tensor, type_name, source.type, errors, usual)
            scale = (
                ratio if ratio == 0.0 else _scale(curve, ratio, exponent, type_name, source.type)
            )
            measured[i, j] = source.type == type_name
            value = np.where(source.nats > floor, source.nats, 0.0) * scale
            nats[i, j] = value
            spread = 0.0 if measured[i, j] else curve.log_spread(type_name)
            se[i, j] = np.hypot(source.se * scale, value * spread)
            clamped += [(tensor, type_name)] * bool(held)
        _make_monotonic(nats[i], types, measured[i])
    clipped = tuple(
        (tensor, categories[c])
        for tensor in tensors
        for c in np.flatnonzero(
            np.any([(p.nats < 0) | (p.nats < floor) for p in probes[tensor]], axis=0)
        )
    )
    return DamageTable(
        tensors, types, categories, nats, se, measured, tuple(clamped), clipped, curve
    )


def _scale(
    curve: TypeCurve, ratio: float, exponent: float, type_name: str, measured_type: str
) -> float:
    """Factor from the damage at the measured type; 1 for that type itself."""
    if type_name == measured_type:
        return 1.0
    return math.exp(curve.log_ratio(exponent * math.log(ratio), type_name, measured_type))


def _bits(type_name: str) -> tuple[float, str]:
    return tensor_type(type_name).bpw, type_name


def _probes(damage_map: DamageMap, span: str, offered: Offered) -> dict[str, list[_Probed]]:
    """The measurements of each offered tensor, categories in the map's order."""
    if span not in SPANS:
        raise ConfigError(f"span {span!r} is not measured: use {' or '.join(SPANS)}")
    rows = damage_map.rows
    rows = rows[(rows["span"] == span) & rows["tensor"].isin(list(offered))]
    if len(blank := rows[rows["kld_nats"].isna()]):
        raise InputError(
            f"category {blank['category'].iloc[0]!r} has no {span} tokens, so its damage is not "
            "known: give it text, or leave it out"
        )
    values: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    columns = (rows[c].tolist() for c in ("tensor", "type", "category", "kld_nats", "se"))
    for tensor, type_name, category, kld_nats, se in zip(*columns, strict=True):
        values.setdefault((tensor, type_name), {})[category] = (kld_nats, se)
    probes: dict[str, list[_Probed]] = {tensor: [] for tensor in offered}
    for (tensor, type_name), found in values.items():
        pairs = np.array([found[category] for category in damage_map.categories])
        probes[tensor].append(_Probed(type_name, pairs[:, 0], pairs[:, 1]))
    if missing := [tensor for tensor, found in probes.items() if not found]:
        raise InputError(
            f"{len(missing)} of {len(offered)} tensors have no measured damage, first {missing[0]}:"
            " measure them, or do not offer them types"
        )
    return probes


def _check_errors(
    probes: Mapping[str, Sequence[_Probed]], errors: Errors, offered: Offered
) -> None:
    for tensor, names in offered.items():
        for type_name in (*names, *(p.type for p in probes[tensor])):
            error = errors.get((tensor, type_name))
            if error is None or not np.isfinite(error) or error < 0:
                raise InputError(
                    f"the packing error of {tensor} at {type_name} is {error}: compute the errors "
                    "of all offered and all probed types"
                )


def _nearest(probes: Sequence[_Probed], tensor: str, type_name: str, errors: Errors) -> _Probed:
    """The tensor's own measurement at the type, else the one whose log error is nearest."""
    tiny = np.finfo(np.float64).tiny
    target = np.log(max(errors[tensor, type_name], tiny))

    def distance(probe: _Probed) -> float:
        if probe.type == type_name:
            return -1.0
        return float(abs(np.log(max(errors[tensor, probe.type], tiny)) - target))

    return min(probes, key=distance)


def usual_ratios(
    probed: Mapping[str, Sequence[str]], errors: Errors, offered: Offered
) -> dict[tuple[str, str], float]:
    """Median error ratio over all tensors, by (type, probe type)."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for tensor, names in offered.items():
        for type_name in names:
            for probe_type in probed.get(tensor, ()):
                if (base := errors[tensor, probe_type]) > 0.0:
                    ratio = errors[tensor, type_name] / base
                    ratios.setdefault((type_name, probe_type), []).append(ratio)
    return {pair: float(np.median(found)) for pair, found in ratios.items()}


def _ratio(
    tensor: str,
    type_name: str,
    probe_type: str,
    errors: Errors,
    usual: Mapping[tuple[str, str], float],
) -> tuple[float, bool]:
    """Error ratio of a type to the probe's, and whether it had to be held back."""
    if type_name == probe_type:
        return 1.0, False
    middle = usual.get((type_name, probe_type), 1.0)
    base = errors[tensor, probe_type]
    if base == 0.0:  # an all-zero tensor: nothing to scale by
        return middle, False
    ratio = errors[tensor, type_name] / base
    held = min(max(ratio, middle / TRAP_FACTOR), middle * TRAP_FACTOR)
    return held, held != ratio


def _make_monotonic(nats: Doubles, types: Sequence[str], measured: NDArray[np.bool_]) -> None:
    """Hold prices [Y, C] of one tensor in the order of bits within each family, in place.

    The lowest measured type of a family stays; types of more bits are lowered to it, types of fewer
    bits raised. `types` are in order of bits.
    """
    families: dict[str, list[int]] = {}
    for j, type_name in enumerate(types):
        if not np.isnan(nats[j]).any():
            families.setdefault(tensor_type(type_name).family, []).append(j)
    for members in families.values():
        anchor = next((n for n, j in enumerate(members) if measured[j]), 0)
        up, down = members[anchor:], members[: anchor + 1][::-1]
        nats[up] = np.minimum.accumulate(nats[up], axis=0)
        nats[down] = np.maximum.accumulate(nats[down], axis=0)
