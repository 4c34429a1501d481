"""`bitwright damage` on a tiny model: fixed, raced, by groups, upgrades and experts."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bitwright.corpora.records import Corpus
from bitwright.corpora.store import save_corpus
from bitwright.damage.damage_map import load_damage_map
from tests.damage.test_probe import made_chunk
from tests.tiny import tiny_gguf
from tests.workflows.support import bitwright


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verb") / "corpus"
    folder.mkdir()
    corpora = [
        Corpus(
            category=category,
            recipe_sha256="0" * 64,
            tokenizer_sha256="0" * 64,
            n_ctx=64,
            chunks=tuple(made_chunk(category, i, n=64) for i in range(2)),
            statistics={},
        )
        for category in ("code", "math")
    ]
    save_corpus(corpora, folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("verb") / "tiny.gguf", n_layer=1)


def run(model: Path, corpus: Path, out: Path, *more: object) -> dict[str, Any]:
    ran = bitwright(
        *("damage", "--model", model, "--corpus", corpus, "--out", out, "--threads", "1"),
        *("--json", "--quiet", *map(str, more)),
    )
    assert ran.code == 0, ran.err
    return ran.json


def test_a_fixed_map_and_then_its_groups(model: Path, corpus: Path, tmp_path: Path) -> None:
    facts = run(model, corpus, tmp_path)
    assert facts["race"] is None
    assert facts["tensors"] == 8
    assert set(facts["floors_nats"]) >= {"flash attention off"}
    assert len(pd.read_csv(tmp_path / "damage_map.csv")) == 8 * 2
    groups = run(model, corpus, tmp_path, "--way", "groups")["groups"]
    assert all(one["ratio"] for one in groups)


def test_a_race_to_a_size(model: Path, corpus: Path, tmp_path: Path) -> None:
    table = tmp_path / "tidy.parquet"
    facts = run(
        *(model, corpus, tmp_path, "--budget", "4 bpw", "--target", "math"),
        *("--tolerance", 0.001, "--tokens", 10_000, "--export", table),
    )
    assert facts["race"]["rounds"] >= 1
    assert "undecided" in facts["race"]
    assert facts["curve"]["n_pairs"] >= 4
    assert set(pd.read_parquet(table)["type"]) > {"Q2_K"}
    assert len(load_damage_map(tmp_path).tensors) == 8


def test_upgrades_are_kept_apart_from_single_damages(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    plain = run(model, corpus, tmp_path / "a")["key"]
    facts = run(model, corpus, tmp_path / "b", "--way", "upgrades")
    assert facts["key"] != plain
    assert any("upgrade-one" in note for note in facts["notes"])


def test_experts_of_one_tensor(corpus: Path, tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "moe.gguf",
        **{"n_layer": 1, "n_embd": 64, "n_ff": 256, "n_expert": 4, "n_vocab": 288},
    )
    facts = run(path, corpus, tmp_path / "m", "--experts", "blk.0.ffn_down_exps.weight")
    assert [one["expert"] for one in facts["experts"]] == [0, 1, 2, 3]


def test_requests_that_make_no_sense_are_refused(model: Path, corpus: Path, tmp_path: Path) -> None:
    base = ("damage", "--model", model, "--corpus", corpus, "--out", tmp_path, "--quiet")
    ran = bitwright(*base, "--way", "sideways")
    assert ran.code == 1
    assert "single, groups or upgrades" in ran.err
    ran = bitwright(*base, "--target", "poetry")
    assert ran.code == 1
    assert "the corpus has code, math" in ran.err
    ran = bitwright(*base, "--budget", "1 KB")
    assert ran.code == 1
    assert "under the smallest layout" in ran.err
