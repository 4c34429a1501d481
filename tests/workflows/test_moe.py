"""A mixture of experts with one that is never routed to, through the whole run."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import quantize_rows, to_float32
from tests.tiny import tiny_gguf
from tests.workflows.support import Ran, bitwright

UNSEEN = 3
EXPERTS = [f"blk.{i}.ffn_{role}_exps.weight" for i in range(2) for role in ("down", "gate", "up")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, workflow: Path) -> tuple[Path, Path, Ran]:
    """Model, run folder, what the command printed."""
    folder = tmp_path_factory.mktemp("moe")
    model = tiny_gguf(folder / "moe-F16.gguf", n_ff=256, n_expert=4, never_route=UNSEEN)
    ran = bitwright("run", workflow, "--model", model, "--out", folder / "run", "--json")
    assert ran.code == 0, ran.err
    return model, folder / "run", ran


def test_the_unseen_expert_is_kept_in_the_imatrix_and_reported(made: tuple[Path, Path, Ran]):
    model, folder, ran = made
    imatrix = read_imatrix(folder / "imatrix" / "task.gguf")
    assert set(EXPERTS) <= imatrix.entries.keys()
    for name in EXPERTS:
        assert imatrix.coverage(name) == 0.75
        importance = imatrix.importance(name, open_model(model).tensor(name).n_per_row)
        assert importance is not None
        assert importance.shape[0] == 4
        np.testing.assert_array_equal(importance[UNSEEN], 1.0)
        assert not np.array_equal(importance[0], np.ones_like(importance[0]))
    told = f"{EXPERTS[0]}: 75.0% of its matrices have data"
    assert told in ran.err
    for report in ("README.md", "report.html"):
        assert "75.0% of its matrices have data" in (folder / report).read_text(encoding="utf-8")


def test_damage_was_measured_for_the_expert_tensors(made: tuple[Path, Path, Ran]):
    _, folder, _ = made
    rows = pd.concat(pd.read_parquet(path) for path in (folder / "damage").glob("*.parquet"))
    measured = rows[rows["tensor"].isin(EXPERTS)]
    assert set(measured["tensor"]) == set(EXPERTS)
    assert (measured["kld_nats"] > 0).all()
    assert not rows["tensor"].str.contains("gate_inp").any()  # routers are never quantized


def test_the_written_file_holds_all_experts_the_unseen_one_weighted_neutrally(
    made: tuple[Path, Path, Ran],
):
    path, folder, ran = made
    model = open_model(path)
    (gguf,) = folder.glob("*.gguf")
    written = read_gguf(gguf)
    imatrix = read_imatrix(folder / "imatrix" / "task.gguf")
    assert {t.name: t.shape for t in written.tensors} == {t.name: t.shape for t in model.tensors}
    chosen = next(e for e in ran.json["files"] if e["label"] == ran.json["chosen"])
    assert chosen["size_bytes"] == gguf.stat().st_size
    name = EXPERTS[0]
    info = next(t for t in written.tensors if t.name == name)
    values = to_float32(model.raw(name), "F16", info.n_elements).reshape(4, -1, info.n_per_row)
    raw = np.fromfile(gguf, np.uint8, info.size_bytes, offset=info.offset).reshape(4, -1)
    ones = np.ones(info.n_per_row, np.float32)
    neutral = quantize_rows(values[UNSEEN], info.type, ones)
    np.testing.assert_array_equal(raw[UNSEEN], neutral)
    importance = imatrix.importance(name, info.n_per_row)
    assert importance is not None
    np.testing.assert_array_equal(raw[0], quantize_rows(values[0], info.type, importance[0]))


def test_low_types_are_refused_for_a_tensor_that_is_not_covered(
    made: tuple[Path, Path, Ran], tmp_path: Path
):
    path, folder, _ = made
    ran = bitwright(
        *("quantize", "--model", path, "--layout", "IQ2_XS", "--out", tmp_path / "x.gguf"),
        *("--imatrix", folder / "imatrix" / "task.gguf"),
    )
    told = ran.refusal()
    assert all(name in told for name in EXPERTS)
    assert "75% covered" in told
    assert not list(tmp_path.iterdir())
