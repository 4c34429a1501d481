import dataclasses
import json

import numpy as np
import pytest

from bitwright.content import content_dir
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError, InputError
from bitwright.eval.flags import flags_of
from bitwright.eval.generation import Prompt
from bitwright.eval.items import BUILTIN, Item, builtin_items
from bitwright.eval.methods import Bench
from bitwright.eval.pairing import compare_results
from bitwright.eval.run_suite import (
    SuiteOptions,
    check_overlap,
    item_texts,
    read_alike,
    run_suite,
    run_task,
    with_call_rate,
)
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import load_task_suite


@pytest.fixture(scope="module")
def scorer():
    with Scorer(open_model("demo"), DecoderOptions(threads=1, slots=8)) as made:
        yield made


def test_every_shipped_suite_loads():
    names = [path.stem for path in content_dir("eval").glob("*.toml")]
    assert {"builtin", "code", "math", "chat", "tool_calling"} <= set(names)
    for name in set(names) - {"divergence", "thresholds", "canary"}:
        assert load_task_suite(name).tasks


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("limits = 3", "limits"),
        ('method = "guess"', "method"),
        ('source = "web:x"', "none of"),
    ],
)
def test_a_wrong_key_is_named(tmp_path, change, text):
    key = change.split(" ")[0]
    lines = {
        "name": 'name = "a"',
        "category": 'category = "chat"',
        "method": 'method = "exact"',
        "source": 'source = "builtin:chat"',
    }
    lines[key] = change
    path = tmp_path / "s.toml"
    path.write_text("schema = 1\n[[tasks]]\n" + "\n".join(lines.values()) + "\n")
    with pytest.raises(ConfigError, match=text):
        load_task_suite(path)


@pytest.mark.parametrize("category", sorted(BUILTIN))
def test_items_are_the_same_for_a_seed_and_have_names_of_their_own(category):
    items = builtin_items(category, 12, 7)
    assert len(items) == 12
    assert len({item.id for item in items}) == 12
    assert items == builtin_items(category, 12, 7)
    if category != "code":
        assert items != builtin_items(category, 12, 8)


def test_an_unknown_category_is_refused():
    with pytest.raises(ConfigError, match="none of chat, code, math, tool_calling"):
        builtin_items("poetry", 3, 0)


def test_the_demo_model_scores_as_it_is_known_to(scorer):
    results = run_suite(scorer, load_task_suite("builtin"), SuiteOptions(limit=12))
    found = {result.name: result.summary() for result in results}
    assert {summary["category"] for summary in found.values()} == set(BUILTIN)
    assert found["math"]["value"] >= 0.8
    assert found["tool_choice"]["value"] >= 0.6 > found["tool_choice"]["chance"]
    assert found["tool_exact"]["value"] <= found["tool_name"]["value"]
    assert found["tool_nats"]["value"] < 0.5
    assert 1.0 < found["code_bits"]["value"] < 2.5
    exact = next(result for result in results if result.name == "tool_exact")
    assert set(exact.notes) >= {"call_rate", "irrelevance", "n_irrelevant"}
    assert exact.first_ids[0] == scorer.tokenizer.bos_id
    assert all(outcome.output for outcome in exact.outcomes)
    json.dumps(found, allow_nan=False)


def test_what_does_not_fit_is_counted_and_nothing_is_cut_from_it(scorer):
    long = Item("long", ({"role": "user", "content": "What is 7 + 5? " * 200},), answer="12")
    short = builtin_items("math", 1, 0)[0]
    bench = Bench.over(scorer)
    spec = next(task for task in load_task_suite("builtin").tasks if task.name == "math")
    result = run_task(bench, spec, [long, short], SuiteOptions())
    assert result.outcomes[0].verdict == "too_long"
    assert result.outcomes[0].prompt.count("7 + 5") == 200
    assert result.outcomes[0].output == ""
    assert "math: 1 of 2 prompts do not fit the context" in flags_of(result)
    assert not any("cut by the token limit" in flag for flag in flags_of(result))


def test_each_slot_has_the_whole_context():
    with Scorer(open_model("demo"), DecoderOptions(threads=1, slots=4, n_ctx=256)) as four:
        prompts = [Prompt(np.full(250, 9 + i, np.int32), 4) for i in range(4)]
        prompts.append(Prompt(np.full(256, 9, np.int32), 4))
        finishes = [answer.finish for answer in four.generate(prompts)]
    assert "too_long" not in finishes[:4]
    assert finishes[4] == "too_long"


def test_irrelevance_never_stands_without_the_call_rate(scorer):
    """A suite with a task of irrelevant items only takes the rate from the other tasks."""
    spec = next(task for task in load_task_suite("builtin").tasks if task.name == "tool_exact")
    items = builtin_items("tool_calling", 20, 3)
    bench = Bench.over(scorer)
    parts = {
        "calls": [item for item in items if item.gold],
        "none": [item for item in items if not item.gold],
    }
    results = {
        name: run_task(bench, spec.model_copy(update={"name": name}), part, SuiteOptions())
        for name, part in parts.items()
    }
    alone = flags_of(with_call_rate([results["none"]])[0])
    assert any("irrelevance without a call rate" in flag for flag in alone)
    calls, none = with_call_rate(list(results.values()))
    rate = calls.notes["call_rate_when_relevant"]
    assert none.notes["call_rate_when_relevant"] == rate > 0.8
    assert flags_of(none) == []


def test_code_is_not_run_without_leave(scorer, tmp_path):
    row = {"task_id": 1, "text": "Add.", "code": "", "test_list": ["assert f() == 1"]}
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "HumanEval.jsonl").write_text("")
    with pytest.raises(ConfigError, match="--execute-code"):
        run_suite(scorer, load_task_suite("code"), SuiteOptions(data=tmp_path))


def test_items_in_the_calibration_text_are_refused_by_name():
    found = builtin_items("code", 3, 0)
    items = {"code_bits": item_texts(found)}
    leaked = {"my notes": found[1].text}
    with pytest.raises(InputError, match="my notes") as refusal:
        check_overlap(items, leaked, allow=False)
    assert found[1].id in str(refusal.value)
    assert len(check_overlap(items, leaked, allow=True)) == 1
    assert check_overlap(items, {"other": "nothing of the kind " * 20}, allow=False) == ()


def fenced_calls(monkeypatch):
    """The demo model's answers, as a model that puts its calls in fences would write them."""
    real = Scorer._generate

    def rewritten(text):
        return text.replace("<tool_call>", "```json").replace("</tool_call>", "```")

    def fenced(self, *arguments):
        return [dataclasses.replace(a, text=rewritten(a.text)) for a in real(self, *arguments)]

    monkeypatch.setattr(Scorer, "_generate", fenced)


def test_calls_in_another_form_than_the_templates_are_read_and_flagged(scorer, monkeypatch):
    suite, few = load_task_suite("builtin"), SuiteOptions(limit=16)
    tools = suite.model_copy(update={"tasks": suite.tasks[:4]})
    plain = {r.name: r for r in run_suite(scorer, tools, few)}
    assert plain["tool_exact"].settings["form"] == "hermes"
    assert not any("template's form" in flag for flag in flags_of(plain["tool_exact"]))
    fenced_calls(monkeypatch)
    results = run_suite(scorer, tools, few)
    found = {r.name: r for r in results}
    for name in ("tool_name", "tool_exact"):
        assert found[name].settings["form"] == "fenced"
        assert found[name].summary()["value"] == plain[name].summary()["value"] > 0
        (flag,) = [flag for flag in flags_of(found[name]) if "template's form" in flag]
        assert "(hermes), so they were read as fenced" in flag
    assert found["tool_nats"] == plain["tool_nats"]
    # Another file of the model is read alike, even if it writes the template's form again.
    monkeypatch.undo()
    alike = tools.model_copy(update={"tasks": read_alike(tools.tasks, results)})
    other = {r.name: r for r in run_suite(scorer, alike, few)}
    assert other["tool_exact"].settings["form"] == "fenced"
    assert other["tool_exact"].summary()["value"] < plain["tool_exact"].summary()["value"]
    with pytest.raises(InputError, match="same --call-form"):
        compare_results([plain["tool_exact"]], [found["tool_exact"]])


def test_answers_are_asked_once_for_all_tasks(scorer):
    bench = Bench.over(scorer)
    assert bench.form == "hermes"
    items = builtin_items("tool_calling", 3, 1)
    from bitwright.eval.methods import tool_exact, tool_name

    tasks = {task.name: task for task in load_task_suite("builtin").tasks}
    tool_name(bench, tasks["tool_name"], items)
    before = scorer.decoder.counters.decoded
    tool_exact(bench, tasks["tool_exact"], items)
    assert scorer.decoder.counters.decoded == before
