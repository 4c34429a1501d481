import json

import numpy as np
import pytest

from bitwright.errors import InputError
from bitwright.eval.flags import failures_of, flags_of
from bitwright.eval.outcome import (
    Outcome,
    TaskResult,
    load_results,
    ratio_and_error,
    save_results,
)
from bitwright.eval.pairing import compare_results, holm, mcnemar, smallest_visible


def result(values, *, name="t", metric="exact_match", weights=None, verdicts=None, **more):
    weights = [1.0] * len(values) if weights is None else weights
    verdicts = verdicts or ["correct" if v == 1 else "wrong_answer" for v in values]
    outcomes = tuple(
        Outcome(name, f"i{i}", f"h{i}", "p", "o", "e", verdicts[i], float(v), float(w))
        for i, (v, w) in enumerate(zip(values, weights, strict=True))
    )
    return TaskResult(name, "chat", metric, outcomes, **more)


def test_mcnemar_is_the_exact_binomial_of_the_changed_items():
    a, b = np.array([1, 1, 1, 0, 0, 1.0]), np.array([0, 0, 0, 0, 0, 1.0])
    assert mcnemar(a, b) == pytest.approx(0.25)
    assert mcnemar(a, a) == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_a_plain_loss_is_seen_and_equal_files_are_not_different():
    a = result([1.0] * 80 + [0.0] * 20)
    b = result([1.0] * 55 + [0.0] * 45)
    (found,) = compare_results([a], [b]).values()
    assert found.difference == pytest.approx(-0.25)
    assert found.low < -0.25 < found.high < 0
    assert found.p_holm < 1e-6
    assert found.verdict == "worse"
    (same,) = compare_results([a], [a]).values()
    assert (same.difference, same.p, same.verdict) == (0.0, 1.0, "no difference shown")
    assert 0.02 < same.smallest_visible < 0.1


def test_lower_nats_are_better():
    rng = np.random.default_rng(0)
    nats, tokens = rng.gamma(2, 5, 60), rng.integers(5, 30, 60)
    kinds = {"metric": "nats_per_token", "weights": tokens, "verdicts": ["measured"] * 60}
    a, b = result(nats, **kinds), result(nats * 0.9, **kinds)
    (found,) = compare_results([a], [b]).values()
    assert found.difference < 0
    assert found.verdict == "better"


def test_the_5_percent_test_is_one_and_the_interval_covers():
    rng = np.random.default_rng(1)
    wrong = covered = 0
    for i in range(50):
        base = rng.random(150) < 0.6
        flip = rng.random(150) < 0.15
        other = np.where(flip, rng.random(150) < 0.6, base)
        (d,) = compare_results([result(base)], [result(other)], seed=i).values()
        wrong += d.p < 0.05
        covered += d.low <= 0 <= d.high
    assert wrong <= 7
    assert covered >= 41


def test_smallest_visible_is_what_80_percent_would_find():
    rng = np.random.default_rng(2)
    delta = rng.normal(0, 1, 400)
    size = smallest_visible(delta, np.ones(400))
    found = 0
    for _ in range(300):
        shifted = rng.normal(size, 1, 400)
        mean, se = ratio_and_error(shifted, np.ones(400))
        found += mean / se > 1.96
    assert 0.7 < found / 300 < 0.9


def test_other_items_or_other_ids_are_refused():
    a = result([1.0, 0.0])
    with pytest.raises(InputError, match="other items"):
        compare_results([a], [result([1.0])])
    changed = Outcome("t", "i1", "other", "p", "o", "e", "correct", 1.0)
    b = TaskResult("t", "chat", "exact_match", (a.outcomes[0], changed))
    with pytest.raises(InputError, match="other token ids"):
        compare_results([a], [b])
    with pytest.raises(InputError, match="no task"):
        compare_results([a], [result([1.0], name="u")])


def test_other_settings_are_refused_with_both_values():
    a, b = (result([1.0, 0.0], settings={"max_tokens": n, "stops": []}) for n in (64, 512))
    with pytest.raises(InputError, match="max_tokens 64, the other with 512"):
        compare_results([a], [b])
    assert compare_results([a], [result([1.0, 0.0])])  # an older result says nothing of it


def test_changed_items_are_counted_both_ways():
    a, b = result([1.0, 0.0, 0.0, 1.0]), result([1.0, 1.0, 1.0, 0.0])
    (found,) = compare_results([a], [b]).values()
    assert (found.details["gained"], found.details["lost"]) == (2, 1)
    assert found.as_dict()["gained"] == 2


def test_results_come_back_and_are_strict_json(tmp_path):
    given = [
        result([1.0, 0.0], notes={"call_rate": 0.5}, first_ids=(1, 2), settings={"shots": 5}),
        result([0.5], name="u"),
    ]
    save_results(given, tmp_path / "r", {"model": "m.gguf"})
    found, facts = load_results(tmp_path / "r")
    assert found == given
    assert facts["model"] == "m.gguf"
    json.loads((tmp_path / "r" / "results.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(InputError, match="holds no results"):
        load_results(tmp_path)


def test_no_data_is_no_score():
    assert result([]).summary()["value"] is None
    assert result([]).summary()["n"] == 0
    assert flags_of(result([])) == ["t: 0 items, so there is no score"]


def test_the_error_of_a_mean_is_the_usual_one():
    values = np.random.default_rng(0).normal(size=50)
    _, se = ratio_and_error(values, np.ones(50))
    assert se == pytest.approx(values.std(ddof=1) / 50**0.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (result([1, 0, 1, 0], chance=0.5), "no better than chance"),
        (result([0.0] * 4), "suspect harness fault"),
        (result([1, 0, 0], verdicts=["correct", "empty", "empty"]), "2 of 3 answers are unread"),
        (result([1, 0], verdicts=["correct", "too_long"]), "do not fit the context"),
        (result([1.0, 1.0], notes={"call_rate_when_relevant": 0.0}), "call rate 0"),
        (result([1.0, 1.0], notes={"irrelevance": 1.0}), "without a call rate"),
        (result([1.0, 1.0], notes={"cut_prompts": 3.0}), "3 requests did not fit"),
    ],
)
def test_flags(given, text):
    assert any(text in flag for flag in flags_of(given))


def test_a_cut_answer_is_flagged_and_failures_are_counted():
    cut = Outcome("t", "i", "h", "p", "o", "e", "truncated", 0.0, truncated=True)
    good = Outcome("t", "j", "h", "p", "o", "e", "correct", 1.0)
    given = TaskResult("t", "tool_calling", "exact_call", (cut, good, good, good))
    assert any("1 of 4 answers were cut" in flag for flag in flags_of(given))
    assert failures_of([given]) == {"truncated": 1}
