"""Priors: what was measured on other models of the same class, frozen as s(role, depth) · r(type).

Published maps say how far that carries: ranks of one family correlate at 0.7 to 0.95, across
families at 0.2 to 0.5. So a prior starts a measurement or replaces it where none is wanted, it is
never taken across architecture classes, and what it gives is labelled as not measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.predictions import between
from bitwright.content import content_dir
from bitwright.damage.damage_map import DamageMap, tidy
from bitwright.damage.pricing import DamageTable
from bitwright.engine.atomic import write_atomic
from bitwright.engine.ggml_types import TYPES, fallback_type
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tensors import HEADS, layer, role
from bitwright.errors import ConfigError, InputError

SCHEMA = 1
DEPTHS = 9  # points of relative depth, 0 to 1
SPREAD = 0.5  # relative error given to what a prior says
BASE_TYPE = "Q2_K"  # r is 1 for it


@dataclass(frozen=True, slots=True)
class Prior:
    """A prior of one architecture class.

    model_class: see `class_of`. sources: what it was measured on, in words. sensitivity:
    category → role → log damage at Q2_K at `DEPTHS` relative depths (heads: one value, for a
    head of `head_share`[role] of the file). types: log r per type. spread: of the log damages of
    single tensors about these values.
    """

    model_class: str
    sources: tuple[str, ...]
    sensitivity: Mapping[str, Mapping[str, tuple[float, ...]]]
    head_share: Mapping[str, float]
    types: Mapping[str, float]
    spread: float


@dataclass(frozen=True, slots=True)
class Source:
    """One measured model: its priced table and the file it is of."""

    model: ModelFile
    table: DamageTable
    text: str


def class_of(model: ModelFile) -> str:
    """Architecture, dense or experts, tied or not: 'llama-dense-tied'."""
    experts = any(t.n_matrices > 1 for t in model.tensors)
    return "-".join(
        (model.arch, "experts" if experts else "dense", "tied" if model.is_tied else "untied")
    )


def build_prior(sources: Sequence[Source]) -> Prior:
    """Mean logs over the measured models, all of one class.

    Raises:
        InputError: no model, or models of several classes.
    """
    classes = sorted({class_of(one.model) for one in sources})
    if len(classes) != 1:
        raise InputError(
            "a prior is of one architecture class, these runs are of"
            f" {', '.join(classes) or 'none'}: give runs of one class"
        )
    categories = sorted(set.intersection(*(set(one.table.categories) for one in sources)))
    sensitivity = {c: _sensitivity([_logs(one, c) for one in sources]) for c in categories}
    shares: dict[str, list[float]] = {}
    for one in sources:
        for name in one.table.tensors:
            if name in HEADS:
                shares.setdefault(role(name), []).append(_share(one.model, name))
    found = Prior(
        model_class=classes[0],
        sources=tuple(one.text for one in sources),
        sensitivity=sensitivity,
        head_share={one: float(np.mean(found)) for one, found in shares.items()},
        types=_type_ratios([one.table for one in sources]),
        spread=0.0,
    )
    off = [
        value - _log_damage(found, one.model, c, name)
        for one in sources
        for c in categories
        for name, value in _logs(one, c).items()
    ]
    return Prior(**{**_fields(found), "spread": float(np.std(off))})


def _fields(prior: Prior) -> dict[str, Any]:
    return {name: getattr(prior, name) for name in Prior.__dataclass_fields__}


def _share(model: ModelFile, name: str) -> float:
    return model.tensor(name).n_elements / sum(t.n_elements for t in model.tensors)


def _logs(source: Source, category: str) -> dict[str, float]:
    """Log damage at `BASE_TYPE` of each tensor that has one above zero."""
    c = source.table.categories.index(category)
    found = {}
    for t, name in enumerate(source.table.tensors):
        known = [
            (TYPES[kind].bpw, float(nats))
            for kind, nats in zip(source.table.types, source.table.nats[t, :, c], strict=True)
            if not np.isnan(nats)
        ]
        damage = between(known, TYPES[BASE_TYPE].bpw)
        if damage > 0:
            found[name] = float(np.log(damage))
    return found


def _sensitivity(logs: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """Role → log damage by depth, each model's depths brought to the same points."""
    grid = np.linspace(0.0, 1.0, DEPTHS)
    curves: dict[str, list[np.ndarray[Any, Any]]] = {}
    for found in logs:
        last = max((layer(name) or 0 for name in found), default=0) or 1
        points: dict[str, list[tuple[float, float]]] = {}
        for name, value in found.items():
            points.setdefault(role(name), []).append(((layer(name) or 0) / last, value))
        for one, pairs in points.items():
            x, y = np.array(sorted(pairs)).T
            flat = grid[:1] if one + ".weight" in HEADS else grid
            curves.setdefault(one, []).append(np.interp(flat, x, y))
    return {
        one: tuple(round(float(v), 4) for v in np.mean(found, axis=0))
        for one, found in sorted(curves.items())
    }


def _type_ratios(tables: Sequence[DamageTable]) -> dict[str, float]:
    """Median log ratio of each type's damage to that of `BASE_TYPE`."""
    ratios: dict[str, list[float]] = {}
    for table in tables:
        if BASE_TYPE not in table.types:
            continue
        base = table.nats[:, table.types.index(BASE_TYPE)]
        for y, kind in enumerate(table.types):
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log(table.nats[:, y] / base)
            ratios.setdefault(kind, []).extend(logs[np.isfinite(logs)].tolist())
    return {kind: round(float(np.median(found)), 4) for kind, found in ratios.items() if found}


def _log_damage(prior: Prior, model: ModelFile, category: str, name: str) -> float:
    """Log damage of a tensor at `BASE_TYPE`; a head's grows with its share of the file.

    A role that the prior does not know gets the median of those it knows.
    """
    curves = prior.sensitivity[category]
    curve = curves.get(role(name))
    if curve is None:
        return float(np.median([v for found in curves.values() for v in found]))
    if name in HEADS:
        return curve[0] + float(np.log(_share(model, name) / prior.head_share[role(name)]))
    last = max((layer(t.name) or 0 for t in model.tensors), default=0) or 1
    grid = np.linspace(0.0, 1.0, len(curve))
    return float(np.interp((layer(name) or 0) / last, grid, curve))


def _type_ratio(prior: Prior, kind: str) -> float:
    """Damage at a type over that at `BASE_TYPE`; of a type it does not know, from its bits."""
    if kind in prior.types:
        return float(np.exp(prior.types[kind]))
    known = [(TYPES[t].bpw, float(np.exp(v))) for t, v in prior.types.items()]
    return between(known, TYPES[kind].bpw)


def prior_table(prior: Prior, options: OptionSet) -> DamageTable:
    """The damage table that a prior gives a model; nothing in it is measured on it.

    Raises:
        ConfigError: the model is of another architecture class.
    """
    require_class(prior, options.model)
    types = tuple(
        sorted({t for o in options.offered.values() for t in o}, key=lambda t: (TYPES[t].bpw, t))
    )
    r = {t: _type_ratio(prior, t) for t in types}
    categories = tuple(prior.sensitivity)
    nats = np.full((len(options.tensors), len(types), len(categories)), np.nan)
    for i, name in enumerate(options.tensors):
        for c, category in enumerate(categories):
            s = float(np.exp(_log_damage(prior, options.model, category, name)))
            for kind in options.offered[name]:
                nats[i, types.index(kind), c] = s * r[kind]
    measured = np.zeros(nats.shape[:2], bool)
    return DamageTable(options.tensors, types, categories, nats, SPREAD * nats, measured)


def prior_map(prior: Prior, model: ModelFile, tensors: Sequence[str], target: str) -> DamageMap:
    """The damage map that a prior stands in for: nothing in it is measured on this model.

    One row per tensor and category over no tokens, at `BASE_TYPE` or what takes its place where
    the rows do not take it.

    Raises:
        ConfigError: the model is of another architecture class, or the prior lacks the target.
    """
    require_class(prior, model)
    _require_target(prior, target)
    rows = []
    for name in tensors:
        kind = fallback_type(BASE_TYPE, model.tensor(name).n_per_row)
        about = {"tensor": name, "role": role(name), "layer": layer(name), "type": kind}
        for category in prior.sensitivity:
            base = float(np.exp(_log_damage(prior, model, category, name)))
            nats = base * _type_ratio(prior, kind)
            known = {"category": category, "span": "scored", "kld_nats": nats, "se": SPREAD * nats}
            rows.append({**about, **known, "n_tokens": 0, "flips": 0})
    none = dict.fromkeys(prior.sensitivity, 0)
    return DamageMap(
        rows=tidy(rows),
        key=f"prior {prior.model_class}",
        probe_type=BASE_TYPE,
        noise_floor=dict.fromkeys(prior.sensitivity, 0.0),
        se_method=dict.fromkeys(prior.sensitivity, "prior"),
        n_chunks=none,
        notes=(prior_sentence(prior),),
    )


def prior_sentence(prior: Prior) -> str:
    """What every output says where a prior took the place of a damage map."""
    return f"damages were not measured on this model, they come from {', '.join(prior.sources)}"


def is_of(prior: Prior, model: ModelFile) -> bool:
    """Whether the prior was made from the model's own map, by the names of its sources."""
    return any(one.startswith(f"{model.name},") for one in prior.sources)


def rank_correlation(prior: Prior, source: Source, category: str) -> tuple[float, int]:
    """Spearman's rank correlation of damages by prior and by map, and the number of tensors.

    Raises:
        ConfigError: another architecture class, or a category that one of them lacks.
    """
    require_class(prior, source.model)
    if category not in prior.sensitivity or category not in source.table.categories:
        known = sorted(set(prior.sensitivity) & set(source.table.categories))
        raise ConfigError(
            f"prior and map have no {category!r} in common: use {', '.join(known) or 'another map'}"
        )
    logs = _logs(source, category)
    names = list(logs)
    by_prior = [_log_damage(prior, source.model, category, name) for name in names]
    found = spearmanr([logs[name] for name in names], by_prior)
    return float(found.statistic), len(names)


def require_class(prior: Prior, model: ModelFile) -> None:
    """Refuse a prior of another architecture class.

    Raises:
        ConfigError: see there.
    """
    if prior.model_class != class_of(model):
        raise ConfigError(
            f"the prior was measured on {prior.model_class}, {model.name} is {class_of(model)}:"
            " damages do not carry over between architecture classes, measure this model"
        )


def find_prior(model: ModelFile) -> Prior | None:
    """The shipped prior of the model's class."""
    path = content_dir("allocator") / "priors" / f"{class_of(model)}.json"
    return read_prior(path) if path.is_file() else None


def require_prior(model: ModelFile, target: str) -> Prior:
    """The shipped prior that a run without a damage map takes.

    Raises:
        ConfigError: none is shipped for the model's class, or it lacks the target.
    """
    prior = find_prior(model)
    if prior is None:
        raise ConfigError(
            f"no prior is shipped for models like {model.name} ({class_of(model)}): run without"
            " --no-measure"
        )
    _require_target(prior, target)
    return prior


def _require_target(prior: Prior, target: str) -> None:
    if target not in prior.sensitivity:
        raise ConfigError(
            f"the prior knows {', '.join(prior.sensitivity)}, not the target {target!r}: measure"
            " this model, without --no-measure"
        )


def read_prior(path: Path) -> Prior:
    """A prior's file.

    Raises:
        InputError: it cannot be read, or is no prior of this version.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.pop("schema") != SCHEMA:
            raise InputError(f"{path.name} is a prior of another version: build it anew")
        sensitivity = {
            c: {one: tuple(map(float, v)) for one, v in roles.items()}
            for c, roles in raw["sensitivity"].items()
        }
        return Prior(**{**raw, "sensitivity": sensitivity, "sources": tuple(raw["sources"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{path} is no prior that can be read: make one with `bitwright prior build RUN`"
        ) from None


def write_prior(prior: Prior, path: Path) -> None:
    """As JSON, written atomically."""
    text = json.dumps({"schema": SCHEMA, **asdict(prior)}, indent=1, allow_nan=False)
    write_atomic(path, (text + "\n").encode())
