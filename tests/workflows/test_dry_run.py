"""--dry-run: exact sizes, valid cache hits, an estimate; nothing is written."""

import shutil
from pathlib import Path

from bitwright.engine.model_file import open_model
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.upstream import upstream_layout
from tests.workflows.conftest import Finished
from tests.workflows.support import Ran, bitwright, listing


def dry(finished: Finished, folder: Path, *more: str) -> Ran:
    line = ("--model", finished.model, "--out", folder, "--dry-run")
    return bitwright("run", finished.workflow, *line, *more)


def test_nothing_is_written_and_sizes_are_exact(finished: Finished, tmp_path: Path):
    ran = dry(finished, tmp_path / "new", "--json")
    assert ran.code == 0, ran.err
    assert not list(tmp_path.iterdir())
    model = open_model(finished.model)
    for name, size_bytes in ran.json["stock_bytes"].items():
        layout = upstream_layout(model, name, has_imatrix=True)
        assert size_bytes == predict_size(model, layout, None)
    assert ran.json["budget_bytes"] == finished.ran.json["budget_bytes"]
    assert ran.json["smallest_bytes"] < ran.json["budget_bytes"] < ran.json["largest_bytes"]
    assert ran.json["stages_with_results"] == []
    estimate = ran.json["estimated_s"]
    assert estimate.keys() == {"imatrix", "damage", "select", "evaluate"}
    assert all(seconds >= 0 for seconds in estimate.values())


def test_the_text_names_budget_sizes_and_time(finished: Finished, tmp_path: Path):
    text = dry(finished, tmp_path / "new").out
    assert f"{finished.ran.json['budget_bytes']:,} bytes" in text
    assert "stock Q3_K_S" in text
    assert "70 % code + 30 % general" in text
    assert "nothing was computed or written" in text
    assert not list(tmp_path.iterdir())


def test_only_results_that_hold_for_this_run_count(finished: Finished):
    before = listing(finished.folder)
    every = ["corpus", "imatrix", "damage", "select", "evaluate"]
    same = dry(finished, finished.folder, "--json").json
    assert same["stages_with_results"] == every
    assert set(same["estimated_s"].values()) == {0.0}
    cheaper = dry(finished, finished.folder, "--budget", "5.5 bpw", "--json").json
    assert cheaper["stages_with_results"] == every[:3]
    other = dry(finished, finished.folder, "--seed", "7", "--json").json
    assert other["stages_with_results"] == []
    text = dry(finished, finished.folder).out
    assert text.count("done: its results are in the run folder") == 4
    assert listing(finished.folder) == before


def test_a_missing_file_is_no_result(finished: Finished, tmp_path: Path):
    folder = tmp_path / "partial"
    shutil.copytree(finished.folder, folder)
    (folder / "imatrix" / "category-code.gguf").unlink()
    assert dry(finished, folder, "--json").json["stages_with_results"] == ["corpus"]
