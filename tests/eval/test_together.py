"""Tasks that ask about the same items decode each prompt once, and score as if asked alone."""

from collections.abc import Iterator

import pytest

from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.eval import run_suite as suites
from bitwright.eval.items import builtin_items, halved
from bitwright.eval.prompts import Prompts
from bitwright.eval.run_suite import SuiteOptions, load_items, run_suite
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSuite, load_task_suite

TOOLS = ("tool_choice", "tool_nats", "tool_name", "tool_exact")


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(open_model("demo"), DecoderOptions(threads=1, n_ctx=256, slots=2)) as opened:
        yield opened


def tools_only() -> TaskSuite:
    suite = load_task_suite("builtin")
    kept = tuple(task for task in suite.tasks if task.name in TOOLS)
    return suite.model_copy(update={"tasks": kept})


def test_prompts_are_decoded_once_and_nothing_else_changes(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = scorer.decoder.counters
    scorer.decoder.clear()
    before = counters.decoded
    shared = run_suite(scorer, tools_only(), SuiteOptions(limit=12))
    together = counters.decoded - before
    monkeypatch.setattr(suites, "ask_together", lambda bench, tasks: None)
    scorer.decoder.clear()
    before = counters.decoded
    alone = run_suite(scorer, tools_only(), SuiteOptions(limit=12))
    assert shared == alone
    assert together < 0.7 * (counters.decoded - before)


def test_a_suite_without_generated_calls_has_nothing_to_share(scorer: Scorer) -> None:
    suite = load_task_suite("builtin")
    only = suite.model_copy(
        update={"tasks": tuple(t for t in suite.tasks if t.name == "tool_nats")}
    )
    (result,) = run_suite(scorer, only, SuiteOptions(limit=3))
    assert result.outcomes


def test_prompts_of_one_file_serve_another_and_are_closed_by_their_owner() -> None:
    model, options = open_model("demo"), DecoderOptions(threads=1, n_ctx=256, slots=2)
    suite = load_task_suite("builtin")
    prompts = Prompts(model, remember=True)
    with Scorer(model, options, prompts=prompts) as first:
        shared = run_suite(first, suite, SuiteOptions(limit=4))
    with Scorer(model, options, prompts=prompts) as second:
        assert run_suite(second, suite, SuiteOptions(limit=4)) == shared
    with Scorer(model, options) as own:
        assert run_suite(own, suite, SuiteOptions(limit=4)) == shared
    assert len(prompts.encode("still open")) > 0
    prompts.close()


@pytest.mark.parametrize("category", ["tool_calling", "math", "chat", "code"])
def test_halves_share_no_item_and_hold_as_many(category: str) -> None:
    task = next(t for t in load_task_suite("builtin").tasks if t.category == category)
    found = [
        load_items(task.model_copy(update={"half": half, "limit": 30}), SuiteOptions())
        for half in (1, 2)
    ]
    assert [len(items) for items in found] == [30, 30]
    assert not {i.id for i in found[0]} & {i.id for i in found[1]}


def test_no_half_is_everything_in_order() -> None:
    items = builtin_items("math", 7, 1)
    assert halved(items, 0) == items
    assert sorted(i.id for h in (1, 2) for i in halved(items, h)) == sorted(i.id for i in items)
