"""`bitwright compare` on runs and on scores of files: what is paired, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bitwright.engine.model_file import open_model
from bitwright.engine.upstream import FTYPES, upstream_quantize
from bitwright.workflows import seed_comparison
from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright, write_workflow

WANTED = {"difference", "low", "high", "p", "p_holm", "n", "smallest_visible", "verdict"}


@pytest.fixture(scope="module")
def second(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model and text at another size."""
    folder = tmp_path_factory.mktemp("second")
    workflow = write_workflow(folder, budget="4.4 bpw")
    ran = bitwright("run", workflow, "--model", finished.model, "--out", folder / "run", "--json")
    assert ran.code == 0, ran.err
    return folder / "run"


def changed(folder: Path, to: Path, **inputs: object) -> Path:
    """A copy of a run whose scores say something else of themselves."""
    shutil.copytree(folder, to)
    path = to / "report-scores.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"].update(inputs)
    path.write_text(json.dumps(manifest))
    return to


def test_two_runs_are_paired_by_document_target_first(finished: Finished, second: Path, tmp_path):
    out = tmp_path / "out"
    page = bitwright("compare", finished.folder, second, "--out", out, "--json").json
    assert page["a"] == f"{finished.folder}:ours-task"
    assert page["target"] == ["code/kld", "code/nll", "code/top1"]
    assert page["off_target"] == ["general/kld", "general/nll", "general/top1"]
    results = [json.loads((f / "result.json").read_text()) for f in (finished.folder, second)]
    for name, task in page["tasks"].items():
        assert set(task) >= WANTED
        # So few documents may not say how far the next one can be.
        known = task["low"] is not None and task["high"] is not None
        assert known or task["n_documents"] <= 4
        assert not known or task["low"] <= task["difference"] <= task["high"]
        assert task["p"] <= task["p_holm"] <= 1
        if name.endswith("/kld"):
            a, b = (
                next(f for f in r["files"] if f["label"] == r["chosen"])["scores"][task["category"]]
                for r in results
            )
            assert task["a"] == pytest.approx(a["kld_nats"])
            assert task["b"] == pytest.approx(b["kld_nats"])
            assert task["n"] == a["n_tokens"]
    assert page["tasks"]["code/kld"]["difference"] < 0  # 4.4 bpw against about 3.5
    assert json.loads((out / "comparison.json").read_text()) == page
    html = (out / "comparison.html").read_text()
    assert html.index("<h2>Target: code") < html.index("<h2>Elsewhere")
    assert html.index("code/kld") < html.index("<h2>Elsewhere") < html.index("general/top1")
    tokens = pq.read_table(out / "tokens.parquet").to_pandas()
    code = tokens[(tokens.category == "code") & (tokens.kind != "prompt")]
    mean = float((code.kld_b - code.kld_a).mean())
    assert mean == pytest.approx(page["tasks"]["code/kld"]["difference"])
    assert tokens.token.notna().all()
    rows = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    assert len(rows) == pq.read_table(out / "items.parquet").num_rows
    assert sum(r["n_tokens"] for r in rows if r["category"] == "code") == len(code)


def test_a_single_run_is_compared_with_its_own_baseline(finished: Finished):
    alone = bitwright("compare", finished.folder, "--json").json
    assert alone["b"].endswith(":ours-task")
    assert alone["a"].endswith(":stock-Q3_K_S-task")
    assert bitwright("compare", alone["a"], alone["b"], "--json").json == alone
    several = bitwright(
        "compare", f"{finished.folder}:stock-IQ3_S-task", finished.folder, finished.folder, "--json"
    ).json
    assert len(several["comparisons"]) == 2


def test_a_person_reads_gain_and_loss_on_one_page(finished: Finished):
    ran = bitwright("compare", finished.folder)
    text = ran.out
    assert ran.code == 0, ran.err
    assert text.index("Target: code") < text.index("code/kld") < text.index("\nElsewhere")
    assert text.index("\nElsewhere") < text.index("general/top1")
    assert "code (the target): " in text
    assert "smallest visible" in text
    other = bitwright("compare", finished.folder, "--target", "general").out
    assert other.index("general/kld") < other.index("code/kld")


def test_a_result_is_not_compared_with_itself(finished: Finished):
    label = f"{finished.folder}:{finished.ran.json['chosen']}"
    for both in ((finished.folder, label), (label, label), (finished.folder, finished.folder)):
        assert "compared with itself" in bitwright("compare", *both).refusal()


def test_a_file_that_the_run_has_not_is_refused_with_those_it_has(finished: Finished):
    refusal = bitwright("compare", finished.folder, f"{finished.folder}:no-such").refusal()
    assert "stock-Q3_K_S-task" in refusal
    assert (
        "give one of code, general"
        in bitwright("compare", finished.folder, "--target", "poetry").refusal()
    )


def test_only_the_same_reference_and_the_same_text_are_compared(finished: Finished, tmp_path):
    other = changed(finished.folder, tmp_path / "other", model="0" * 64)
    refusal = bitwright("compare", finished.folder, other).refusal()
    assert "other reference models" in refusal
    assert "000000000000" in refusal
    text = changed(finished.folder, tmp_path / "text", chunks={"code": "1" * 64, "general": "2"})
    refusal = bitwright("compare", finished.folder, text).refusal()
    assert "other code text" in refusal
    assert "111111111111" in refusal


def test_other_engine_settings_are_named(finished: Finished, tmp_path):
    manifest = json.loads((finished.folder / "report-scores.json").read_text())
    engine = {**manifest["inputs"]["engine"], "gpu_layers": 99}
    other = changed(finished.folder, tmp_path / "gpu", engine=engine)
    page = bitwright("compare", finished.folder, other, "--json").json
    assert any("gpu_layers 0 and 99" in note for note in page["notes"])
    assert bitwright("compare", finished.folder, "--json").json["notes"] == []


def test_what_holds_nothing_to_compare_is_said(finished: Finished, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert (
        "holds nothing to compare"
        in bitwright("compare", finished.folder, tmp_path / "empty").refusal()
    )
    items = tmp_path / "items"
    line = ("evaluate", "--model", "demo", "--suite", "builtin", "--limit", "1", "--threads", "1")
    assert bitwright(*line, "--out", items, "--quiet").code == 0
    assert "give two of one kind" in bitwright("compare", finished.folder, items).refusal()
    assert "two result folders" in bitwright("compare", items).refusal()
    told = bitwright("compare", items, items.parent / "." / "items").refusal()
    assert "compared with itself" in told
    (finished.folder / "report" / "scores").rename(tmp_path / "kept")
    try:
        assert "missing or damaged" in bitwright("compare", finished.folder).refusal()
    finally:
        (tmp_path / "kept").rename(finished.folder / "report" / "scores")


def test_scores_of_other_tools_files_are_compared_too(finished: Finished, tmp_path: Path):
    model = open_model(finished.model)
    for name in ("Q2_K", "Q4_K_S"):
        upstream_quantize(model, tmp_path / f"{name}.gguf", name, None, threads=1)
        assert name in FTYPES
        ran = bitwright(
            *("evaluate", tmp_path / f"{name}.gguf", "--model", finished.model, "--quiet"),
            *("--corpus", finished.folder / "corpus", "--out", tmp_path / name),
        )
        assert ran.code == 0, ran.err
    line = ("evaluate", tmp_path / "Q2_K.gguf", "--model", finished.model, "--corpus")
    refused = bitwright(*line, finished.folder / "corpus", "--out", finished.folder).refusal()
    assert "is the folder of a run" in refused
    page = bitwright("compare", tmp_path / "Q2_K", tmp_path / "Q4_K_S", "--json").json
    assert page["a"] == f"{tmp_path / 'Q2_K'}:Q2_K.gguf"
    assert page["tasks"]["code/kld"]["difference"] < 0
    assert "target" not in page
    run = bitwright("compare", tmp_path / "Q2_K", finished.folder, "--json").json
    assert run["target"] == ["code/kld", "code/nll", "code/top1"]
    assert np.isfinite(run["tasks"]["general/nll"]["difference"])


def test_imatrix_or_layout_is_answered_on_executed_tasks(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    forms: list[str] = []
    real = seed_comparison.run_suite

    def recorded(scorer, suite, options, **more):
        forms.append(next(task.form for task in suite.tasks if task.name == "tool_exact"))
        return real(scorer, suite, options, **more)

    monkeypatch.setattr(seed_comparison, "run_suite", recorded)
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    line = ("seed-comparison", run, "--model", finished.model, "--limit", "2", "--quiet")
    ran = bitwright(*line, "--json")
    assert ran.code == 0, ran.err
    labels = [f"{kind}-{mix}" for kind in ("stock-Q3_K_S", "ours") for mix in ("general", "task")]
    assert set(ran.json["files"]) == set(labels)
    pairs = {name: (page["a"], page["b"]) for name, page in ran.json["comparisons"].items()}
    assert pairs == {
        "imatrix": ("stock-Q3_K_S-general", "stock-Q3_K_S-task"),
        "layout": ("stock-Q3_K_S-task", "ours-task"),
        "layout_general": ("stock-Q3_K_S-general", "ours-general"),
        "both": ("stock-Q3_K_S-general", "ours-task"),
    }
    both = ran.json["comparisons"]["both"]
    assert {d["category"] for d in both["target"].values()} == {"code"}
    assert {d["category"] for d in both["off_target"].values()} == {"chat", "math", "tool_calling"}
    assert not list(run.glob("seed/*.gguf"))
    again = bitwright(*line, "--json")  # from the run folder: no file is written or scored
    assert again.json == ran.json
    assert forms == ["", "hermes", "hermes", "hermes"]  # all are read as the first one
    kept = [run / "seed" / label for label in ("stock-Q3_K_S-task", "ours-task")]
    page = bitwright("compare", *kept, "--target", "code", "--json").json
    assert page["tasks"]["code_bits"]["difference"] == pytest.approx(
        ran.json["comparisons"]["layout"]["target"]["code_bits"]["difference"]
    )
