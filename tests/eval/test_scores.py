import json
from pathlib import Path

import pytest

from bitwright.errors import ConfigError
from bitwright.eval.divergence import Candidate, score_layouts
from bitwright.eval.scores import compare, mean_kld, scores_of
from bitwright.eval.suite import load_suite
from tests.eval.fakes import FakeSession, make_chunk

CHUNKS = {
    "code": [make_chunk("code", i, [f"c{i}a", f"c{i}b", f"c{i}c"]) for i in range(4)],
    "tool_calling": [
        make_chunk("tool_calling", 0, ["p1", "p2", "p3", "p4"], kind=1),
        make_chunk("tool_calling", 1, ["t1", "t2", "t3", "t4"], kind=4),
    ],
    "math": [],
}
CONTRACT = {"kld_nats", "se", "kld_p99", "top1", "ppl_ratio", "n_tokens"}


@pytest.fixture(scope="module")
def scores():
    files = [Candidate("low", {"w": "noise0.1"}, None), Candidate("high", {"w": "noise0.5"}, None)]
    return score_layouts(FakeSession(), files, CHUNKS)


def test_the_fields_of_the_contract_are_there_and_strict_json(scores) -> None:
    result = scores_of(scores, "low", load_suite(), baseline="high")
    text = json.dumps(result, allow_nan=False)
    for category in ("code", "tool_calling", "math"):
        assert result[category].keys() >= CONTRACT
    assert result["math"]["kld_nats"] is None
    assert result["math"]["n_tokens"] == 0
    assert result["code"]["ratio"]["high"] < 1
    assert "ratio" not in scores_of(scores, "high", load_suite(), baseline="high")["code"]
    assert text


def test_prompts_count_only_in_the_overall_row(scores) -> None:
    tools = scores_of(scores, "low", load_suite())["tool_calling"]
    assert tools["n_tokens"] == 44
    assert tools["spans"]["overall"]["n_tokens"] == 88
    assert tools["spans"]["calls"]["n_tokens"] == 44
    assert tools["spans"]["answers"] == {"kld_nats": None, "se": None, "top1": None, "n_tokens": 0}


def test_the_verdict_is_the_targets(scores) -> None:
    suite = load_suite()
    better = compare(scores, "low", "high", "code", suite)
    assert better.verdict == "better"
    assert compare(scores, "high", "low", "code", suite).verdict == "worse"
    assert compare(scores, "low", "low", "code", suite).verdict == "no difference shown"
    assert compare(scores, "low", "high", "math", suite).verdict == "no difference shown"
    assert set(better.as_dict()["off_target_kld_ratio"]) == {"tool_calling", "math"}
    mean = mean_kld(scores, "low", "code", suite)
    assert mean == pytest.approx(scores_of(scores, "low", suite)["code"]["kld_nats"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("schema = 1\n[default]\nspans = ['asistant']\n", "'asistant' is not a kind of span"),
        ("schema = 1\n[default]\nspans = []\n", "default.spans"),
        ("schema = 2\n[default]\nspans = ['text']\n", "schema"),
        ("schema = 1\nspan = 1\n[default]\nspans = ['text']\n", "span"),
        ("schema = ", "not valid TOML"),
    ],
)
def test_a_wrong_suite_is_refused_with_the_key(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_suite(path)


def test_the_user_can_choose_spans(tmp_path: Path, scores) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("schema = 1\n[default]\nspans = ['prompt']\n[statistics]\nresamples = 200\n")
    suite = load_suite(path)
    assert scores_of(scores, "low", suite)["tool_calling"]["n_tokens"] == 44
    assert scores_of(scores, "low", suite)["code"]["kld_nats"] is None
