import json

import pytest

from bitwright.corpora.generators.chatml import CHAT_TEMPLATE
from bitwright.errors import InputError
from bitwright.eval.bfcl import bfcl_folder, bfcl_items
from bitwright.eval.tool_formats import (
    FORMS,
    LEAST,
    Call,
    form_of_answers,
    format_of,
    parse_calls,
    write_calls,
)
from bitwright.eval.tool_match import CORRECT, Gold, judge, names_match

WEATHER = Call("get_weather", {"city": "Oslo", "days": 3})
GOLD = Gold("get_weather", {"city": ("Oslo",), "days": (3,)}, {"city": "string", "days": "integer"})
GOOD = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_is_read_back(form):
    calls = [WEATHER, Call("b.c", {"x": [1, {"y": None}], "ok": True, "text": 'a "q" \n é'})]
    for given in (calls[:1], calls):
        parsed = parse_calls(write_calls(given, form), form)
        assert parsed.status == "ok"
        assert list(parsed.calls) == given


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("text", ["", "It is sunny (mostly).", "Sum (of two) is three.", "{x}"])
def test_prose_is_no_call(form, text):
    assert parse_calls(text, form).status == "no_call"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", GOOD.removesuffix("\n</tool_call>")),
        ("hermes", GOOD.replace("}}", "}")),
        ("hermes", '{"name": "get_weather", "arguments": {}}'),
        ("hermes", "<tool_call>\n['get_weather']\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("fenced", '```json\n{"name": "f", "arguments": {}}'),
        ("fenced", '```json\n{"name": "f", "arguments": {}\n```'),
        ("fenced", '{"name": "f", "arguments": {}'),
        ("fenced", '{"name": "f", "arguments": {}} and then'),
        ("fenced", '{"name": "f", "arguments": {}}\n```'),
        ("json", '{"name": "f", "arguments": {"a": 1}'),
        ("json", '{"name": "f", "arguments": {}} and then'),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(a=open('x'))]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(a=1]"),
        ("pythonic", "[f(a=1), 2]"),
        ("llama", '{"name": "f", "parameters": {}} {"name": "g", "parameters": {}}'),
        ("gemma", "```tool_code\nf(a=1)"),
        ("mistral", "[TOOL_CALLS] none"),
    ],
)
def test_what_is_broken_stays_broken(form, text):
    assert parse_calls(text, form).status == "unparsable"


def test_fences_of_other_content_are_no_calls():
    text = "So:\n```python\nf(a=1)\n```\nand\n```\nsome output\n```\n"
    assert parse_calls(text, "fenced").status == "no_call"
    assert parse_calls(text + write_calls([WEATHER], "fenced"), "fenced").calls == (WEATHER,)


@pytest.mark.parametrize("text", ['{"name": "f", "arguments": {}}', '[{"name": "f"}]'])
def test_a_model_that_fences_by_habit_may_leave_the_fence_out(text):
    assert parse_calls(text, "fenced").calls == (Call("f", {}),)


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"hermes"}))
def test_a_model_that_writes_another_form_than_its_template_is_read_so(form):
    offered = ["get_weather", "other"]
    answers = [(write_calls([WEATHER], form), offered)] * LEAST
    found = form_of_answers("hermes", answers)
    assert parse_calls(answers[0][0], found).calls == (WEATHER,)
    # Too few answers, prose, or names that were not offered decide nothing.
    assert form_of_answers("hermes", answers[1:]) == "hermes"
    assert form_of_answers("hermes", [("It is sunny.", offered)] * LEAST) == "hermes"
    assert form_of_answers("hermes", [(answers[0][0], ["other"])] * LEAST) == "hermes"


@pytest.mark.parametrize(
    ("own", "fenced", "form"), [(0, 20, "fenced"), (2, 18, "fenced"), (3, 17, "hermes")]
)
def test_a_model_that_writes_its_templates_form_at_times_is_read_strictly(own, fenced, form):
    answers = [(GOOD, ["get_weather"])] * own
    answers += [(write_calls([WEATHER], "fenced"), ["get_weather"])] * fenced
    assert form_of_answers("hermes", answers) == form
    prose = [("no", ["get_weather"])] * 21
    assert form_of_answers("hermes", [*answers, *prose]) == "hermes"  # less than half of them


def test_the_form_is_read_from_the_template():
    assert format_of(CHAT_TEMPLATE) == "hermes"
    assert format_of("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert format_of("x <|start_header_id|> y") == "llama"
    assert format_of("<start_of_turn>user") == "gemma"
    assert format_of("{{ messages }}") == "hermes"


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([WEATHER], CORRECT),
        ([], "no_call"),
        ([Call("get_news", WEATHER.arguments)], "wrong_name"),
        ([Call("get_weather", {"city": "Oslo"})], "missing_argument"),
        ([Call("get_weather", {**WEATHER.arguments, "unit": "C"})], "extra_argument"),
        ([Call("get_weather", {"city": "Oslo", "days": "3"})], "wrong_type"),
        ([Call("get_weather", {"city": "Oslo", "days": True})], "wrong_type"),
        ([Call("get_weather", {"city": "oslo", "days": 3})], "wrong_value"),
        ([WEATHER, WEATHER], "wrong_count"),
    ],
)
def test_each_failure_has_its_own_name(calls, verdict):
    parsed = parse_calls(write_calls(calls, "hermes"), "hermes")
    assert judge(parsed, [GOLD]) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (GOOD, CORRECT),
        (f"Let me look that up.\n{GOOD}", CORRECT),
        (GOOD[:40], "unparsable"),
        ("It is sunny in Oslo.", "no_call"),
        ("", "no_call"),
        (GOOD.replace("get_weather", "get_news"), "wrong_name"),
        (GOOD.replace("3", '"3"'), "wrong_type"),
        (f"{GOOD}\n{GOOD}", "wrong_count"),
        (GOOD.replace('"Oslo"', "__import__('os').getcwd()"), "unparsable"),
    ],
)
def test_canned_answers_are_judged_as_they_stand(text, verdict):
    assert judge(parse_calls(text, "hermes"), [GOLD]) == verdict


def test_parallel_calls_match_in_any_order_and_name_the_nearest_failure():
    other = Call("get_time", {"zone": "UTC"})
    gold = [GOLD, Gold("get_time", {"zone": ("UTC", "GMT")})]
    assert judge(parse_calls(write_calls([other, WEATHER], "hermes"), "hermes"), gold) == CORRECT
    wrong = [Call("get_time", {"zone": "CET"}), WEATHER]
    assert judge(parse_calls(write_calls(wrong, "hermes"), "hermes"), gold) == "wrong_value"


def test_optional_arguments_and_nested_choices():
    gold = Gold("f", {"a": ("", 1), "b": ({"c": [1, 2], "d": ["", 3]},)}, loose=True)
    for arguments, right in (
        ({"b": {"c": 2}}, True),
        ({"a": 1, "b": {"c": 1, "d": 3}}, True),
        ({"b": {"c": 3}}, False),
        ({"b": {"d": 3}}, False),
        ({"b": {"c": 1, "e": 1}}, False),
    ):
        parsed = parse_calls(write_calls([Call("f", arguments)], "json"), "json")
        assert (judge(parsed, [gold]) == CORRECT) is right


def test_where_no_tool_fits_any_attempt_is_wrong():
    assert judge(parse_calls("Sorry, no tool.", "hermes"), []) == CORRECT
    assert judge(parse_calls(GOOD, "hermes"), []) == "called_when_irrelevant"
    assert judge(parse_calls(GOOD[:30], "hermes"), []) == "called_when_irrelevant"
    assert not names_match(parse_calls(GOOD, "hermes"), [])


def mutations(calls):
    for i, call in enumerate(calls):
        for changed in (
            Call(call.name + "x", call.arguments),
            Call(call.name, {**call.arguments, "zz_no": 1}),
            *(
                Call(call.name, {k: v for k, v in call.arguments.items() if k != name})
                for name in call.arguments
            ),
            *(Call(call.name, {**call.arguments, name: "no such ?"}) for name in call.arguments),
        ):
            yield [changed if j == i else other for j, other in enumerate(calls)]
    yield calls[:-1]


def check_gold(category: str, folder) -> int:
    items = bfcl_items(category, folder)
    for item in items:
        for form in FORMS:
            parsed = parse_calls(write_calls(list(item.calls), form), form)
            assert judge(parsed, item.gold) == CORRECT, (item.id, form)
        for wrong in mutations(list(item.calls)):
            parsed = parse_calls(write_calls(wrong, "hermes"), "hermes")
            assert judge(parsed, item.gold) != CORRECT, (item.id, wrong)
    return len(items)


def tiny_bfcl(folder):
    function = {
        "name": "math.add",
        "description": "Adds",
        "parameters": {
            "type": "dict",
            "properties": {"a": {"type": "float"}, "b": {"type": "tuple"}},
            "required": ["a"],
        },
    }
    question = [[{"role": "user", "content": "Add."}]]
    row = {"id": "simple_python_0", "question": question, "function": [function]}
    truth = [{"math.add": {"a": [1.5, 2], "b": ["", [1, 2]]}}, {"math.add": {"a": [3], "b": []}}]
    (folder / "possible_answer").mkdir()
    name = "BFCL_v4_simple_python.json"
    (folder / name).write_text(json.dumps(row) + "\n")
    answer = {"id": "simple_python_0", "ground_truth": truth}
    (folder / "possible_answer" / name).write_text(json.dumps(answer) + "\n")
    row["id"] = "irrelevance_0"
    (folder / "BFCL_v4_irrelevance.json").write_text(json.dumps(row) + "\n")


def test_bfcl_rows_of_a_folder(tmp_path):
    tiny_bfcl(tmp_path)
    assert check_gold("simple_python", tmp_path) == 1
    (item,) = bfcl_items("simple_python", tmp_path)
    function = item.tools[0]["function"]
    assert function["parameters"]["properties"] == {"a": {"type": "number"}, "b": {"type": "array"}}
    (item,) = bfcl_items("irrelevance", tmp_path)
    assert item.gold == ()


def test_bfcl_that_is_not_there_or_broken_is_refused(tmp_path):
    with pytest.raises(InputError, match="none of"):
        bfcl_items("no_such", tmp_path)
    tiny_bfcl(tmp_path)
    (tmp_path / "BFCL_v4_irrelevance.json").write_text('{"id": 1}\n')
    with pytest.raises(InputError, match="BFCL v4's form"):
        bfcl_items("irrelevance", tmp_path)


@pytest.mark.slow
def test_every_gold_answer_of_bfcl_is_right_and_every_changed_one_wrong():
    pytest.importorskip("bfcl_eval")
    folder = bfcl_folder(None)
    kinds = ("simple_python", "multiple", "parallel", "parallel_multiple")
    live = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
    assert sum(check_gold(category, folder) for category in (*kinds, *live)) == 2351
