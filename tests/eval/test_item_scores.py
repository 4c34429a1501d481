"""Tasks of several files become paired numbers."""

import numpy as np
import pytest

from bitwright.errors import InputError
from bitwright.eval.item_scores import first_failure, headlines, new_failures, size_scores
from bitwright.eval.outcome import Outcome, TaskResult


def outcome(item: str, verdict: str, expected: str = "call", prompt: str = "p") -> Outcome:
    value = float(verdict == "correct")
    return Outcome("t", item, prompt + item, "", "", expected, verdict, value)


def task(verdicts: list[str], **kwargs: str) -> TaskResult:
    outcomes = tuple(outcome(f"i{k}", v, **kwargs) for k, v in enumerate(verdicts))
    return TaskResult("t", "tool_calling", "exact_call", outcomes)


def bits(values: list[float], weights: list[float]) -> TaskResult:
    outcomes = tuple(
        Outcome("b", f"i{k}", "p", "", "", "", "measured", v, w)
        for k, (v, w) in enumerate(zip(values, weights, strict=True))
    )
    return TaskResult("b", "code", "bits_per_byte", outcomes)


def test_executed_tasks_speak_for_their_category() -> None:
    nats = TaskResult("nats", "tool_calling", "nats_per_token", ())
    exact = TaskResult("exact", "tool_calling", "exact_call", ())
    name = TaskResult("name", "tool_calling", "right_function", ())
    code = TaskResult("bits", "code", "bits_per_byte", ())
    choice = TaskResult("choice", "tool_calling", "accuracy", ())
    found = headlines([nats, choice, exact, name, code])
    assert {c: r.name for c, r in found.items()} == {"tool_calling": "exact", "code": "bits"}


def test_sizes_are_paired_with_the_reference() -> None:
    reference = task(["correct", "correct", "wrong_name"])
    size = task(["correct", "no_call", "correct"])
    found = size_scores(reference, [size], [2.5])
    assert found.reference.tolist() == [1, 1, 0]
    assert found.scores.tolist() == [[1, 0, 1]]
    assert not found.graded


def test_requests_that_no_tool_serves_are_left_out() -> None:
    served = task(["correct", "correct"]).outcomes
    unserved = outcome("i9", "correct", expected="")
    reference = TaskResult("t", "tool_calling", "exact_call", (*served, unserved))
    assert size_scores(reference, [reference], [8.5]).n_items == 2


def test_other_items_are_refused() -> None:
    with pytest.raises(InputError, match="other items"):
        size_scores(task(["correct"]), [task(["correct"], prompt="q")], [8.5])
    with pytest.raises(InputError, match="no items"):
        size_scores(task([]), [], [])


def test_likelihoods_average_to_the_tasks_own_value_with_more_being_better() -> None:
    reference = bits([100.0, 300.0], [50.0, 250.0])
    size = bits([120.0, 330.0], [50.0, 250.0])
    found = size_scores(reference, [size], [2.5])
    assert found.graded
    assert float(found.reference.mean()) == pytest.approx(-reference.summary()["value"])  # type: ignore[operator]
    assert float(np.mean(found.scores)) == pytest.approx(-1.5)


def test_new_failures_are_those_that_the_reference_did_not_have() -> None:
    reference = task(["correct", "correct", "correct", "no_call"])
    size = task(["wrong_value", "wrong_value", "no_call", "no_call"])
    kinds = new_failures(reference, size)
    assert kinds == {"wrong_value": 2, "no_call": 1}
    assert first_failure(kinds) == "wrong_value"
    assert first_failure({}) is None
