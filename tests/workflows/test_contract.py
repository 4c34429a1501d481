"""result.json and the run folder: what others rely on."""

import re
import shutil
from pathlib import Path

import pytest

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.gguf_values import kv_value
from bitwright.engine.model_file import open_model
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.upstream import upstream_layout
from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright, strict_json

KEYS = {
    *("schema", "model", "target", "budget_bytes", "chosen", "baseline", "files"),
    *("target_kld_ratio", "off_target_kld_ratio", "predicted_over_measured", "verdict"),
}
FILE_KEYS = {"label", "path", "layout", "imatrix", "size_bytes", "scores"}
SCORE_KEYS = {"kld_nats", "se", "kld_p99", "top1", "ppl_ratio", "n_tokens"}


def test_stdout_is_the_result_line_and_nothing_else(finished: Finished):
    assert len(finished.ran.out.splitlines()) == 1
    assert finished.ran.out.isascii()  # whatever the console's code page
    stored = strict_json((finished.folder / "result.json").read_text(encoding="utf-8"))
    assert finished.ran.json == stored
    for stage in ("corpus", "imatrix", "damage", "errors", "select", "report", "quantize"):
        assert f"[{stage}] " in finished.ran.err


def test_result_has_the_keys_of_the_contract(finished: Finished):
    result = finished.ran.json
    assert result.keys() >= KEYS
    assert result["schema"] == 1
    assert result["model"] == "demo"
    assert result["target"] == "code"
    assert result["verdict"] in {"better", "no difference shown", "worse, baseline written"}
    assert result["synthetic_reference"] is False
    assert result["target_kld_ratio"].keys() >= {"value", "low", "high"}
    assert result["off_target_kld_ratio"].keys() == {"general"}
    assert result["predicted_over_measured"] > 0
    for entry in result["files"]:
        assert entry.keys() >= FILE_KEYS
        assert entry["scores"].keys() == {"code", "general"}
        assert all(scores.keys() >= SCORE_KEYS for scores in entry["scores"].values())
        assert all(s["kld_nats"] > 0 and s["n_tokens"] > 0 for s in entry["scores"].values())


def test_labels_are_unique_and_the_table_is_two_by_two_and_more(finished: Finished):
    result = finished.ran.json
    rows = [(entry["layout"], entry["imatrix"]) for entry in result["files"]]
    labels = [entry["label"] for entry in result["files"]]
    assert len(set(labels)) == len(labels)
    assert {result["chosen"], result["baseline"]} <= set(labels)
    assert {(w, i) for w in ("Q3_K_S", "ours") for i in ("general", "task")} <= set(rows)
    assert ("IQ3_S", "task") in rows


def test_the_chosen_file_is_there_with_its_size_and_in_the_budget(finished: Finished):
    result = finished.ran.json
    paths = {entry["label"]: entry["path"] for entry in result["files"]}
    assert [label for label, path in paths.items() if path] == [result["chosen"]]
    for entry in result["files"]:
        if entry["path"]:
            path = finished.folder / entry["path"]
            assert path.stat().st_size == entry["size_bytes"] <= result["budget_bytes"]


def test_the_budget_is_stock_bytes_and_two_percent(finished: Finished):
    model = open_model(finished.model)
    stock = upstream_layout(model, "Q3_K_S", has_imatrix=True)
    stock_bytes = predict_size(model, stock, None)
    assert finished.ran.json["budget_bytes"] == int(stock_bytes * 1.02)
    sizes = {e["label"]: e["size_bytes"] for e in finished.ran.json["files"]}
    assert sizes["stock-Q3_K_S-general"] == stock_bytes


def test_layout_file_names_every_quantizable_tensor_as_the_gguf_has_it(finished: Finished):
    rules = (finished.folder / "layout.txt").read_text(encoding="ascii").splitlines()
    (gguf,) = finished.folder.glob("*.gguf")
    types = {info.name: info.type for info in read_gguf(gguf).tensors}
    assert len(rules) == 8
    for rule in rules:
        pattern, _, type_name = rule.rpartition("=")
        (name,) = [n for n in types if re.search(pattern, n)]
        assert types[name] == type_name


def test_metadata_says_how_the_file_was_made_without_paths(finished: Finished):
    (gguf,) = finished.folder.glob("*.gguf")
    kv = read_gguf(gguf).kv
    ours = {key: kv_value(entry) for key, entry in kv.items() if key.startswith("bitwright.")}
    assert ours["bitwright.target"] == "code"
    assert ours["bitwright.reference"] == "F16"
    assert ours["bitwright.seed"] == 1
    assert ours["bitwright.budget_bytes"] == finished.ran.json["budget_bytes"]
    assert all(re.fullmatch("[0-9a-f]{64}", str(ours[f"bitwright.{k}_sha256"])) for k in HASHES)
    data = gguf.read_bytes()
    assert str(finished.folder.parent).encode() not in data
    assert str(finished.model.parent).encode() not in data


HASHES = ("recipe", "layout")


@pytest.mark.parametrize("name", ["README.md", "report.html", "layout.txt", "result.json"])
def test_what_is_published_holds_no_path_of_this_machine(finished: Finished, name: str):
    text = (finished.folder / name).read_text(encoding="utf-8")
    if name == "result.json":  # the chosen file's own path is asked for there
        text = "".join(line for line in text.splitlines() if '"path"' not in line)
    assert str(finished.folder.parent) not in text
    assert str(finished.model.parent) not in text


def test_report_of_a_finished_run_writes_the_same_again(finished: Finished):
    before = {n: (finished.folder / n).read_bytes() for n in ("README.md", "layout.txt")}
    (finished.folder / "README.md").unlink()
    ran = bitwright("report", finished.folder, "--json")
    assert ran.code == 0, ran.err
    assert ran.json == finished.ran.json
    assert before == {n: (finished.folder / n).read_bytes() for n in before}
    shown = bitwright("report", finished.folder).out
    assert "code (target)" in shown
    assert "ours-task" in shown


def test_inspect_of_the_run_folder_and_its_files(finished: Finished):
    facts = bitwright("inspect", finished.folder, "--json").json
    assert facts["kind"] == "run"
    assert facts["result"] == finished.ran.json
    assert {"corpus", "imatrix", "damage", "errors", "quantize"} <= facts["stages"].keys()
    (gguf,) = finished.folder.glob("*.gguf")
    facts = bitwright("inspect", gguf, "--json").json
    assert facts["kind"] == "gguf"
    assert facts["size_bytes"] == gguf.stat().st_size
    assert sum(facts["body_share_by_weights"].values()) == pytest.approx(1, abs=1e-3)
    assert facts["provenance"]["bitwright.target"] == "code"
    assert facts["tied_embeddings"] is True
    facts = bitwright("inspect", finished.folder / "imatrix" / "task.gguf", "--json").json
    assert (facts["kind"], facts["entries"]) == ("imatrix", 8)
    facts = bitwright("inspect", finished.folder / "layout.txt", "--json").json
    assert (facts["kind"], facts["rules"]) == ("layout", 8)
    for path in (finished.folder, gguf, finished.folder / "layout.txt"):
        assert bitwright("inspect", path).code == 0


def test_inspect_of_a_run_that_was_stopped(finished: Finished, tmp_path: Path):
    for stage in ("corpus", "imatrix"):
        shutil.copy2(finished.folder / f"{stage}.json", tmp_path / f"{stage}.json")
    (tmp_path / "errors.json").write_text("{half of a manif")
    facts = bitwright("inspect", tmp_path, "--json").json
    assert facts["kind"] == "unfinished run"
    assert list(facts["stages"]) == ["corpus", "imatrix"]
    assert "the same command goes on" in bitwright("inspect", tmp_path).out


@pytest.mark.parametrize("content", [b"", b"some prose = or other\n", b"\x89PNG\r\n" + bytes(99)])
def test_inspect_of_what_bitwright_does_not_know(tmp_path: Path, content: bytes):
    (tmp_path / "file").write_bytes(content)
    told = bitwright("inspect", tmp_path / "file").refusal()
    assert "no GGUF, no layout" in told
    (tmp_path / "folder").mkdir()
    assert bitwright("inspect", tmp_path / "folder").refusal()
