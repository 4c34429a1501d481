"""Each suite that names hub data runs offline on local rows of the same form, by the real code."""

import json
import shutil
from pathlib import Path

import pytest

from bitwright.engine.session import SessionOptions
from bitwright.errors import ConfigError, InputError
from bitwright.eval import harness_needs
from bitwright.eval.outcome import load_results
from bitwright.eval.sandbox import doctor
from bitwright.workflows.output import Output
from bitwright.workflows.single import ModelChoice
from bitwright.workflows.single_suite import SuiteChoice, evaluate_suite
from tests.eval.hub_rows import (
    ARC,
    GSM8K,
    HELLASWAG,
    IFEVAL,
    IFEVAL_SENTENCES,
    write_bfcl,
    write_hub_rows,
    write_lines,
)

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")
QUIET = Output(json=True, quiet=True)
DEMO = ModelChoice("demo", options=SessionOptions(threads=1))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_hub_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def chat(rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("chat") / "out"
    evaluate_suite(DEMO, [], SuiteChoice("chat", rows), out, QUIET)
    results, record = load_results(out)
    return {result.name: result for result in results}, record


def test_chat_runs_ifeval_arc_and_hellaswag_on_local_rows(chat):
    found, _ = chat
    assert list(found) == ["ifeval", "arc_easy", "arc_challenge", "hellaswag"]
    assert [len(result.outcomes) for result in found.values()] == [2, 2, 2, 2]
    ifeval = found["ifeval"].outcomes[0]
    assert "<|im_start|>user\nGreet me." in ifeval.prompt  # a chat model, in its own template
    assert ifeval.prompt_sha256
    assert found["arc_easy"].outcomes[1].prompt == "Question: Which of these is white?\nAnswer:"
    hellaswag = found["hellaswag"].outcomes[0]
    assert hellaswag.prompt == "Making tea: A man fills a kettle with water. He"
    assert {result.chance for result in found.values()} == {None, 0.25}


def test_ifeval_is_judged_by_lm_eval_and_cut_answers_are_flagged(chat):
    found, record = chat
    for row, outcome in zip(IFEVAL, found["ifeval"].outcomes, strict=True):
        right = "," not in outcome.output if row["key"] == 1 else None
        if right is not None and outcome.output.strip():
            assert outcome.value == float(right)
        assert (outcome.verdict == "truncated") == (outcome.truncated and outcome.value == 0)
    cut = sum(outcome.truncated for outcome in found["ifeval"].outcomes)
    flagged = [flag for flag in record["flags"] if "cut by the token limit" in flag]
    assert bool(cut) == bool(flagged)


def test_the_settings_and_first_ids_of_each_task_are_kept(chat):
    found, record = chat
    assert found["ifeval"].settings["max_tokens"] == 1280
    assert found["arc_easy"].first_ids[0] == 0 or found["arc_easy"].first_ids
    assert all(task["settings"]["method"] == "lm_eval" for task in record["results"])


def test_gsm8k_shows_its_examples_and_reads_the_number_after_the_marks(rows, tmp_path, capsys):
    evaluate_suite(DEMO, [], SuiteChoice("math", rows), tmp_path / "out", QUIET)
    line = capsys.readouterr().out
    assert line.count("\n") == 1  # nothing of lm-eval on stdout
    task = json.loads(line)["tasks"]["gsm8k"]
    assert (task["n"], task["metric"]) == (2, "exact_match@strict-match")
    (result,), _ = load_results(tmp_path / "out")
    for outcome in result.outcomes:
        assert outcome.prompt.count("Question:") == 6  # five examples, in turns of their own
        assert outcome.prompt.count("<|im_start|>assistant") == 6
    shutil.copy(rows / "gsm8k.jsonl", tmp_path / "gsm8k.jsonl")
    with pytest.raises(InputError, match=r"5 examples come from gsm8k\.train\.jsonl"):
        evaluate_suite(DEMO, [], SuiteChoice("math", tmp_path), None, QUIET)


@pytest.mark.skipif(not all(check.ok for check in doctor()), reason="no working bubblewrap here")
def test_code_executes_humaneval_and_both_forms_of_mbpp(rows, tmp_path, capsys):
    evaluate_suite(DEMO, [], SuiteChoice("code", rows, execute_code=True), tmp_path / "out", QUIET)
    found = json.loads(capsys.readouterr().out)
    assert {name: task["n"] for name, task in found["tasks"].items()} == {"humaneval": 3, "mbpp": 2}
    results, _ = load_results(tmp_path / "out")
    known = {"correct", "failed", "timeout", "no_code", "exited_early", "too_long", "memory"}
    assert {o.verdict for result in results for o in result.outcomes} <= known


def test_tool_calling_runs_every_category_of_bfcl_on_local_files(tmp_path, capsys):
    data = write_bfcl(tmp_path / "bfcl")
    evaluate_suite(DEMO, [], SuiteChoice("tool_calling", data), tmp_path / "out", QUIET)
    found = json.loads(capsys.readouterr().out)
    assert len(found["tasks"]) == 10
    assert {task["n"] for task in found["tasks"].values()} == {2}
    assert found["tasks"]["bfcl_choice"]["chance"] == 0.5
    results = {result.name: result for result in load_results(tmp_path / "out")[0]}
    wrong = sum(
        o.verdict != "correct"
        for r in results.values()
        for o in r.outcomes
        if r.metric == "exact_call"
    )
    assert sum(found["failures"]["tool_calling"].values()) == wrong
    rate = results["bfcl_irrelevance"].notes["call_rate_when_relevant"]
    called = [
        o.verdict != "no_call"
        for r in results.values()
        for o in r.outcomes
        if r.metric == "exact_call" and o.expected
    ]
    assert len(called) == 12
    assert rate == sum(called) / 12


def test_rows_are_spread_over_the_file_and_limited(rows, tmp_path):
    many = [{**ARC[i % 2], "id": str(i)} for i in range(20)]
    write_lines(tmp_path / "rows.jsonl", many)
    suite = arc_suite(tmp_path, "limit = 4")
    evaluate_suite(DEMO, [], SuiteChoice(str(suite), tmp_path), tmp_path / "out", QUIET)
    (result,), _ = load_results(tmp_path / "out")
    assert [outcome.item for outcome in result.outcomes] == ["0", "5", "10", "15"]


def arc_suite(folder: Path, more: str = "") -> Path:
    path = folder / "suite.toml"
    path.write_text(
        'schema = 1\n[[tasks]]\nname = "arc"\ncategory = "general"\nmethod = "lm_eval"\n'
        f'source = "lm_eval:arc/arc_easy.yaml"\nfile = "rows.jsonl"\nmetric = "acc"\n{more}\n'
    )
    return path


def test_a_file_without_rows_has_no_score_and_is_flagged(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("\n")
    evaluate_suite(DEMO, [], SuiteChoice(str(arc_suite(tmp_path)), tmp_path), None, QUIET)
    found = json.loads(capsys.readouterr().out)
    assert (found["tasks"]["arc"]["n"], found["tasks"]["arc"]["value"]) == (0, None)
    assert found["flags"] == ["arc: 0 items, so there is no score"]


@pytest.mark.parametrize("text", ['{"id": 1}\n', "no JSON\n", '{"question": "x", "choices": 3}\n'])
def test_rows_of_another_form_are_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"cannot read the rows of rows\.jsonl") as refusal:
        evaluate_suite(DEMO, [], SuiteChoice(str(arc_suite(tmp_path)), tmp_path), None, QUIET)
    assert "\n" not in str(refusal.value)


def test_items_of_the_calibration_text_are_refused_by_name_also_of_lm_eval(rows, tmp_path):
    story = " ".join(f"word{i}" for i in range(40))
    write_lines(tmp_path / "rows.jsonl", [ARC[0], {**ARC[1], "question": f"{story}?"}])
    (tmp_path / "calibration.txt").write_text(f"Once upon a time: {story} and so on.")
    suite = SuiteChoice(
        str(arc_suite(tmp_path)), tmp_path, calibration=(tmp_path / "calibration.txt",)
    )
    with pytest.raises(InputError, match=r"1 of 2 .*arc/1 in calibration\.txt"):
        evaluate_suite(DEMO, [], suite, None, QUIET)
    text = f"{GSM8K[0]['question']} {GSM8K[0]['answer']} " + HELLASWAG[0]["ctx"]
    (tmp_path / "calibration.txt").write_text(text)
    suite = SuiteChoice("math", rows, calibration=(tmp_path / "calibration.txt",))
    with pytest.raises(InputError, match=r"gsm8k/0 in calibration\.txt"):
        evaluate_suite(DEMO, [], suite, None, QUIET)


def test_the_language_of_an_answer_is_the_same_each_time():
    langdetect = pytest.importorskip("langdetect")
    harness_needs.make_repeatable()
    found = {tuple(map(str, langdetect.detect_langs("river no ja at"))) for _ in range(20)}
    assert len(found) == 1


def test_what_ifeval_needs_is_said_before_the_first_question(tmp_path, monkeypatch):
    monkeypatch.setattr(harness_needs, "has_punkt", lambda: False)
    for name in ("arc_easy", "arc_challenge", "hellaswag"):
        write_lines(tmp_path / f"{name}.jsonl", HELLASWAG if name == "hellaswag" else ARC)
    write_lines(tmp_path / "ifeval.jsonl", [*IFEVAL, *IFEVAL_SENTENCES])
    with pytest.raises(ConfigError, match=r"number_sentences .*nltk\.downloader punkt_tab"):
        evaluate_suite(DEMO, [], SuiteChoice("chat", tmp_path), None, QUIET)
    missing = [check.what for check in harness_needs.harness_checks() if not check.ok]
    assert missing == ["IFEval's sentence data (nltk punkt_tab)"]


@pytest.mark.skipif(not harness_needs.has_punkt(), reason="no punkt_tab of nltk here")
def test_ifeval_counts_sentences_where_the_data_is_there(tmp_path):
    for name in ("arc_easy", "arc_challenge", "hellaswag"):
        (tmp_path / f"{name}.jsonl").write_text("")
    write_lines(tmp_path / "ifeval.jsonl", IFEVAL_SENTENCES)
    evaluate_suite(DEMO, [], SuiteChoice("chat", tmp_path), tmp_path / "out", QUIET)
    results, _ = load_results(tmp_path / "out")
    assert len(results[0].outcomes) == 1
