"""Damages drawn towards what their role, depth and other categories make likely.

A probe on few tokens knows one tensor to 12-60 %. Its role, its depth and the same tensor's damage
on the other categories know it too, about as well. In logarithms, for tensor i of role r on
category c:

    log d(i, c) = level(r, c) + slope(r) x + bow(r) x^2 + u(i) + w(i, c) + noise(i, c)

with x the relative depth, u what a tensor has on every category, w what it has on one, and the
noise known from the map. The spreads of u and w are the most likely ones given the map, so a map
of many tokens keeps its values and a map of few leans on its neighbours (an empirical Bayes
estimate of a linear mixed model).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize

from bitwright.damage.damage_map import DamageMap

Doubles = NDArray[np.float64]

# Standard deviations of a logarithm: below, a probe is not believed to be that exact (rows of one
# chunk are few and alike); above, the delta method says nothing any more.
LEAST_NOISE, MOST_NOISE = 0.05, 1.5
# Tensors of a role that a bow over depth needs, and a level of its own.
FOR_DEPTH, FOR_LEVEL = 8, 2
ROUNDS = 4  # of coefficients and spreads in turn


@dataclass(frozen=True, slots=True)
class Pooling:
    """How far it went. ``shared``, ``own``: spreads of u and w (standard deviations of logs)."""

    shared: float
    own: float
    median_factor: float
    n_tensors: int

    def describe(self) -> str:
        """One sentence for reports."""
        return (
            f"damages of {self.n_tensors} tensors pooled over role, depth and category: they differ"
            f" by {self.shared:.2f} (log) from their role on all categories alike and by"
            f" {self.own:.2f} on each alone; the middle one moved by a factor of"
            f" {self.median_factor:.2f}"
        )


def pool(damage_map: DamageMap, span: str = "scored") -> tuple[DamageMap, Pooling | None]:
    """The map with pooled ``kld_nats`` and ``se`` of one span; None where too little was measured.

    Rows of further types of a tensor move by the factor of its probe, as they share its tokens.
    Tensors whose role has fewer than `FOR_LEVEL` members keep their values.
    """
    probes = damage_map.probe_rows
    probes = probes[probes["span"] == span]
    counts = probes.drop_duplicates("tensor")["role"].value_counts()
    probes = probes[probes["role"].map(counts) >= FOR_LEVEL]
    data = _Data.read(probes, damage_map.categories)
    if data is None:
        return damage_map, None
    shared, own, mean = _fit(data)
    logs, sd = _posterior(data, mean, shared, own)
    factor = {t: np.exp(logs[i] - data.logs[i]) for i, t in enumerate(data.tensors)}
    rows = damage_map.rows.copy()
    column = {c: j for j, c in enumerate(damage_map.categories)}
    place = {t: i for i, t in enumerate(data.tensors)}
    kld, se = rows["kld_nats"].to_numpy(copy=True), rows["se"].to_numpy(copy=True)
    keys = zip(rows["tensor"], rows["type"], rows["category"], rows["span"], strict=True)
    first = {t: types[0] for t, types in damage_map.types().items()}
    for k, (tensor, kind, category, where) in enumerate(keys):
        if where != span or tensor not in place:
            continue
        i, j = place[tensor], column[category]
        kld[k] = math.exp(logs[i, j]) if kind == first[tensor] else kld[k] * factor[tensor][j]
        se[k] = kld[k] * sd[i, j]
    moved = float(np.exp(np.median(np.abs(logs - data.logs))))
    found = Pooling(shared, own, moved, len(data.tensors))
    pooled = replace(damage_map, rows=rows.assign(kld_nats=kld, se=se))
    return replace(pooled, notes=(*damage_map.notes, found.describe())), found


@dataclass(frozen=True, slots=True)
class _Data:
    """Logs and noise variances, each [T, C], and the design of the means [T, C, K]."""

    tensors: tuple[str, ...]
    logs: Doubles
    noise: Doubles
    design: Doubles

    @classmethod
    def read(cls, probes: pd.DataFrame, categories: Sequence[str]) -> "_Data | None":
        wide = {
            v: probes.pivot(index="tensor", columns="category", values=v).reindex(
                columns=list(categories)
            )
            for v in ("kld_nats", "se")
        }
        whole = wide["kld_nats"].notna().all(axis=1)
        nats = wide["kld_nats"][whole].to_numpy(float)
        if len(nats) < FOR_DEPTH:
            return None
        # A damage that is not above its own error is only known to be about that small.
        error = np.nan_to_num(wide["se"][whole].to_numpy(float), nan=np.inf)
        error = np.minimum(error, MOST_NOISE * np.maximum(np.abs(nats), 1e-12))
        least = np.maximum(error / 2, 1e-12)
        small = nats < least
        logs = np.log(np.where(small, least, nats))
        noise = np.clip(error / np.where(small, least, nats), LEAST_NOISE, MOST_NOISE)
        noise[small] = MOST_NOISE
        tensors = tuple(wide["kld_nats"].index[whole])
        about = probes.drop_duplicates("tensor").set_index("tensor").loc[list(tensors)]
        layers = about["layer"].astype("float64").to_numpy()
        deepest = max(1.0, float(np.nanmax(layers))) if np.isfinite(layers).any() else 1.0
        depth = np.nan_to_num(2 * layers / deepest - 1)
        return cls(tensors, logs, np.square(noise), _design(about["role"].tolist(), depth, nats))


def _design(roles: Sequence[str], depth: Doubles, like: Doubles) -> Doubles:
    """A level per role and category; a slope and a bow per role that has enough members."""
    n, categories = like.shape
    columns: list[Doubles] = []
    of_role = np.array(roles)
    for name in dict.fromkeys(roles):
        mine = (of_role == name).astype(float)
        for c in range(categories):
            level = np.zeros((n, categories))
            level[:, c] = mine
            columns.append(level)
        if mine.sum() >= FOR_DEPTH:
            for power in (depth, np.square(depth)):
                columns.append(np.repeat((mine * power)[:, None], categories, axis=1))
    return np.stack(columns, axis=2)


def _fit(data: _Data) -> tuple[float, float, Doubles]:
    """(spread of u, spread of w, means [T, C]): coefficients and spreads in turn."""
    shared, own = 0.5, 0.3
    mean = data.logs
    for _ in range(ROUNDS):
        inverse = np.linalg.inv(_covariance(data.noise, shared, own))
        weighted = np.einsum("tcd,tdk->tck", inverse, data.design)
        left = np.einsum("tck,tcl->kl", data.design, weighted)
        right = np.einsum("tck,tc->k", weighted, data.logs)
        mean = data.design @ np.linalg.lstsq(left, right, rcond=None)[0]
        rest, noise = data.logs - mean, data.noise

        def unlikely(logs: Doubles, rest: Doubles = rest, noise: Doubles = noise) -> float:
            covariance = _covariance(noise, *np.exp(logs))
            solved = np.linalg.solve(covariance, rest[:, :, None])[:, :, 0]
            return float(np.linalg.slogdet(covariance)[1].sum() + (rest * solved).sum())

        start = np.log([shared, own])
        found = minimize(unlikely, start, method="L-BFGS-B", bounds=[(-5.0, 2.0)] * 2)
        shared, own = (float(v) for v in np.exp(found.x))
    return shared, own, mean


def _covariance(noise: Doubles, shared: float, own: float) -> Doubles:
    """Of the C logs of each tensor: [T, C, C]."""
    categories = noise.shape[1]
    base = shared**2 * np.ones((categories, categories)) + own**2 * np.eye(categories)
    whole: Doubles = base[None] + noise[:, :, None] * np.eye(categories)[None]
    return whole


def _posterior(data: _Data, mean: Doubles, shared: float, own: float) -> tuple[Doubles, Doubles]:
    """Most likely logs and their standard deviations, each [T, C]."""
    categories = data.noise.shape[1]
    prior = shared**2 * np.ones((categories, categories)) + own**2 * np.eye(categories)
    gain = np.linalg.solve(_covariance(data.noise, shared, own), prior[None]).transpose(0, 2, 1)
    logs = mean + np.einsum("tcd,td->tc", gain, data.logs - mean)
    left = prior[None] - gain @ prior
    return logs, np.sqrt(np.maximum(np.einsum("tcc->tc", left), 1e-6))
