"""Means, standard errors, and the map on disk."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bitwright.damage.damage_map import (
    MANIFEST,
    TABLE,
    DamageMap,
    load_damage_map,
    map_row,
    mean_kld,
    save_damage_map,
    standard_error,
    tidy,
)
from bitwright.damage.ledger import Sums
from bitwright.errors import InputError


def sums_of(values: np.ndarray) -> Sums:
    return Sums(len(values), float(values.sum()), float((values**2).sum()), 0)


def small_map() -> DamageMap:
    rows = [
        map_row(name, "Q2_K", "code", span, [sums_of(np.array([0.1, 0.3]))])
        for name in ("token_embd.weight", "blk.3.ffn_down.weight")
        for span in ("scored", "overall")
    ]
    rows.append(map_row("blk.3.ffn_down.weight", "Q4_K", "code", "scored", [Sums(0, 0, 0, 0)]))
    return DamageMap(
        tidy(rows), "k", "Q2_K", {"code": 1e-9}, {"code": "tokens"}, {"code": 1}, ("n",)
    )


def test_mean_weighs_tokens_not_chunks() -> None:
    chunks = [sums_of(np.array([1.0])), sums_of(np.zeros(9))]
    assert mean_kld(chunks) == pytest.approx(0.1)
    assert math.isnan(mean_kld([Sums(0, 0.0, 0.0, 0)]))


def test_few_chunks_use_the_variance_of_tokens() -> None:
    values = np.random.default_rng(0).exponential(size=60)
    expected = values.std(ddof=1) / math.sqrt(60)
    assert standard_error([sums_of(values)]) == pytest.approx(expected)
    parts = [sums_of(part) for part in np.array_split(values, 3)]
    assert standard_error(parts) == pytest.approx(expected)
    assert math.isnan(standard_error([sums_of(values[:1])]))


def test_chunks_are_clusters_when_there_are_enough() -> None:
    values = np.repeat([0.1, 0.2, 0.4, 0.5], 50)  # equal inside a chunk: only chunks differ
    parts = [sums_of(part) for part in np.array_split(values, 4)]
    expected = np.std([0.1, 0.2, 0.4, 0.5], ddof=1) / 2
    assert standard_error(parts) == pytest.approx(expected)
    assert standard_error([*parts, Sums(0, 0.0, 0.0, 0)]) == pytest.approx(expected)


def test_cluster_error_matches_a_simulation() -> None:
    rng = np.random.default_rng(1)
    errors, means = [], []
    for _ in range(400):
        sizes = rng.integers(20, 60, 12)
        chunks = [
            sums_of(rng.exponential(m, n))
            for m, n in zip(rng.exponential(1, 12), sizes, strict=True)
        ]
        errors.append(standard_error(chunks))
        means.append(mean_kld(chunks))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)


def test_rows_say_what_a_tensor_is_and_what_is_not_known() -> None:
    rows = small_map().rows
    assert rows["layer"].isna().tolist() == [True, True, False, False, False]
    assert rows["role"].tolist()[::2] == ["token_embd", "ffn_down", "ffn_down"]
    assert rows["n_tokens"].tolist() == [2, 2, 2, 2, 0]
    assert rows["kld_nats"].isna().tolist() == [False] * 4 + [True]
    assert small_map().types()["blk.3.ffn_down.weight"] == ("Q2_K", "Q4_K")


def test_a_map_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = small_map()
    files = save_damage_map(saved, tmp_path)
    assert sorted(p.name for p in files) == sorted(p.name for p in tmp_path.iterdir())
    loaded = load_damage_map(tmp_path)
    pd.testing.assert_frame_equal(loaded.rows, saved.rows)
    for field in dataclasses.fields(saved):
        if field.name != "rows":
            assert getattr(loaded, field.name) == getattr(saved, field.name)
    first = (tmp_path / TABLE).read_bytes()
    save_damage_map(loaded, tmp_path)
    assert (tmp_path / TABLE).read_bytes() == first


def test_damaged_or_foreign_maps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no damage map"):
        load_damage_map(tmp_path)
    save_damage_map(small_map(), tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "schema": 9}))
    with pytest.raises(InputError, match="version 9"):
        load_damage_map(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / TABLE).write_bytes((tmp_path / TABLE).read_bytes()[:-1])
    with pytest.raises(InputError, match="not the table"):
        load_damage_map(tmp_path)
