"""Pooling: near the truth on noisy maps, out of the way on exact ones, and only one span."""

from dataclasses import replace

import numpy as np
import pytest

from bitwright.damage.damage_map import DamageMap, tidy
from bitwright.damage.pooling import pool
from bitwright.engine.tensors import layer, role

CATEGORIES = ("code", "chat", "math")
ROLES = ("attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
LAYERS = 24
SHARED, OWN = 0.4, 0.3


def truths(rng: np.random.Generator) -> dict[tuple[str, str], float]:
    """Log damages: a level per role and category, a bow over depth, and a tensor's own part."""
    found = {}
    for name in ROLES:
        levels, bow = rng.normal(-6, 1, len(CATEGORIES)), rng.normal(0, 0.5)
        for i in range(LAYERS):
            tensor, x = f"blk.{i}.{name}.weight", 2 * i / (LAYERS - 1) - 1
            shared = rng.normal(0, SHARED)
            for level, category in zip(levels, CATEGORIES, strict=True):
                found[tensor, category] = level + bow * x * x + shared + rng.normal(0, OWN)
    return found


def made_map(
    truth: dict[tuple[str, str], float], rng: np.random.Generator, noise: float
) -> DamageMap:
    rows = []
    for (tensor, category), log in truth.items():
        nats = float(np.exp(log + rng.normal(0, noise)))
        about = {"tensor": tensor, "role": role(tensor), "layer": layer(tensor), "type": "Q2_K"}
        known = {"category": category, "kld_nats": nats, "se": noise * nats}
        for span in ("scored", "overall"):
            rows.append({**about, **known, "span": span, "n_tokens": 9, "flips": 0})
    zeros = dict.fromkeys(CATEGORIES, 0.0)
    return DamageMap(tidy(rows), "key", "Q2_K", zeros, {}, dict.fromkeys(CATEGORIES, 1))


def log_error(damage_map: DamageMap, truth: dict[tuple[str, str], float]) -> float:
    rows = damage_map.rows[damage_map.rows["span"] == "scored"]
    keys = zip(rows["tensor"], rows["category"], rows["kld_nats"], strict=True)
    return float(np.sqrt(np.mean([(np.log(k) - truth[t, c]) ** 2 for t, c, k in keys])))


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_map_comes_nearer_to_the_truth_and_knows_by_how_much(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = truths(rng)
    raw = made_map(truth, rng, noise=0.5)
    pooled, found = pool(raw)
    assert found is not None
    assert log_error(pooled, truth) < 0.75 * log_error(raw, truth)
    assert found.shared == pytest.approx(SHARED, abs=0.15)
    assert found.own == pytest.approx(OWN, abs=0.15)
    rows = pooled.rows[pooled.rows["span"] == "scored"]
    relative = float(np.median(rows["se"] / rows["kld_nats"]))
    assert relative == pytest.approx(log_error(pooled, truth), rel=0.25)


def test_an_exact_map_keeps_its_values() -> None:
    rng = np.random.default_rng(0)
    raw = made_map(truths(rng), rng, noise=0.01)
    pooled, _ = pool(raw)
    assert np.max(np.abs(np.log(pooled.rows["kld_nats"] / raw.rows["kld_nats"]))) < 0.12
    assert np.median(np.abs(np.log(pooled.rows["kld_nats"] / raw.rows["kld_nats"]))) < 0.02


def test_other_spans_stay_and_second_probes_move_with_their_tensor() -> None:
    rng = np.random.default_rng(1)
    raw = made_map(truths(rng), rng, noise=0.5)
    more = raw.rows[raw.rows["tensor"] == "blk.3.ffn_up.weight"].assign(type="Q4_K")
    more["kld_nats"] *= 0.1
    raw = replace(raw, rows=tidy([*raw.rows.to_dict("records"), *more.to_dict("records")]))
    pooled, _ = pool(raw)
    old, new = (m.rows.set_index(["tensor", "type", "category", "span"]) for m in (raw, pooled))
    overall = old.index.get_level_values("span") == "overall"
    assert (old["kld_nats"][overall] == new["kld_nats"][overall]).all()
    factor = new["kld_nats"] / old["kld_nats"]
    for category in CATEGORIES:
        both = [factor[("blk.3.ffn_up.weight", t, category, "scored")] for t in ("Q2_K", "Q4_K")]
        assert both[0] == pytest.approx(both[1])
        assert both[0] != 1.0


def test_few_tensors_negative_and_missing_damages_do_no_harm() -> None:
    rng = np.random.default_rng(2)
    raw = made_map(truths(rng), rng, noise=0.5)
    few = replace(raw, rows=raw.rows[raw.rows["tensor"].str.startswith("blk.0.")])
    assert pool(few) == (few, None)
    nats = raw.rows["kld_nats"].to_numpy(copy=True)
    nats[:6], nats[6:12] = -1e-4, 0.0
    pooled, _ = pool(replace(raw, rows=raw.rows.assign(kld_nats=nats)))
    scored = pooled.rows[pooled.rows["span"] == "scored"]["kld_nats"]
    assert (scored > 0).all()
    assert np.isfinite(scored).all()
