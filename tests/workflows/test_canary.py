"""The canary: judged by upstream's curve, kept by shape; and layouts without a measurement."""

import json
import math
from pathlib import Path

import pytest

from bitwright.damage.damage_map import load_damage_map
from bitwright.engine.ggml_types import fallback_type
from bitwright.engine.model_file import open_model
from bitwright.eval.statistics import Interval
from bitwright.workflows.canary import (
    Pair,
    canary_text,
    judge,
    kept_verdict,
    shape_sha256,
    verdict_path,
)
from tests.tiny import tiny_gguf
from tests.tiny_arch import tiny_arch_gguf
from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pair(stock: str, bpw: float, nats: float, ratio: float, *, ours_bpw: float | None = None):
    interval = Interval(ratio, ratio * 0.95, ratio * 1.05, 9)
    return Pair(stock, bpw, ours_bpw or bpw, nats, nats * ratio, interval)


def test_ours_below_the_curve_is_accepted():
    found = judge([pair("Q4_K_M", 4.8, 0.01, 0.8), pair("Q3_K_M", 3.9, 0.03, 0.7),
                   pair("IQ2_XS", 2.3, 0.3, 1.02)])  # fmt: skip
    assert found["verdict"] == "accepted"
    assert found["rejected_at"] == []


def test_ours_above_the_curve_by_more_than_the_noise_is_rejected():
    found = judge([pair("Q4_K_M", 4.8, 0.01, 0.8), pair("Q3_K_M", 3.9, 0.03, 1.2),
                   pair("IQ2_XS", 2.3, 0.3, 0.9)])  # fmt: skip
    assert found["verdict"] == "rejected"
    assert found["rejected_at"] == ["Q3_K_M"]
    assert canary_text({**found, "target": "code"}).startswith("rejected")


def test_fewer_bits_are_compared_with_the_curve_there():
    # Ours has 1.10 times the KLD at Q3_K_M's name, but at bits where the curve itself says 1.36.
    found = judge([pair("Q4_K_M", 4.9, 0.01, 0.8), pair("IQ2_XS", 2.3, 0.3, 0.9),
                   pair("Q3_K_M", 3.9, 0.03, 1.10, ours_bpw=3.685)])  # fmt: skip
    row = next(r for r in found["builds"] if r["stock"] == "Q3_K_M")
    slope = math.log(0.3 / 0.03) / (3.9 - 2.3)
    assert row["ours_over_curve"] == pytest.approx(1.10 / math.exp(slope * (3.9 - 3.685)))
    assert found["verdict"] == "accepted"


def test_the_shape_is_that_of_all_fine_tunes(tmp_path: Path):
    one = open_model(tiny_gguf(tmp_path / "a-F16.gguf", seed=1))
    tuned = open_model(tiny_gguf(tmp_path / "b-F16.gguf", seed=2))
    deeper = open_model(tiny_gguf(tmp_path / "c-F16.gguf", n_layer=3))
    assert shape_sha256(one) == shape_sha256(tuned) != shape_sha256(deeper)


@pytest.mark.slow  # packs types under 3 bits, whose tables ggml builds in seconds
def test_a_canary_is_run_once_per_shape(finished: Finished, tmp_path: Path):
    command = ("canary", finished.model, "--workflow", finished.workflow)
    ran = bitwright(*command, "--out", tmp_path / "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["verdict"] in {"accepted", "rejected"}
    assert [row["stock"] for row in ran.json["builds"]] == ["Q4_K_M", "Q3_K_M", "IQ2_XS"]
    assert not ran.json["kept"]
    for row in ran.json["builds"]:
        assert row["ours_bpw"] <= row["stock_bpw"]
    kept = bitwright(*command, "--out", tmp_path / "other", "--json")
    assert kept.json["kept"]
    assert kept.json["verdict"] == ran.json["verdict"]
    assert not (tmp_path / "other").exists()


def test_a_verdict_that_cannot_be_read_is_none(tiny_model: Path):
    model = open_model(tiny_model)
    assert kept_verdict(model) is None
    verdict_path(model).parent.mkdir(parents=True)
    verdict_path(model).write_text("[]")
    assert kept_verdict(model) is None


# allocate


def layout_run(finished: Finished, out: Path, *more: object):
    return bitwright(
        "allocate", "--model", finished.model, "--target", "code", "--budget", "Q3_K_S",
        "--out", out, "--json", *more,
    )  # fmt: skip


def test_without_measuring_the_prior_is_used_and_said(finished: Finished, tmp_path: Path):
    ran = layout_run(finished, tmp_path / "l.txt", "--no-measure")
    assert ran.code == 0, ran.err
    assert ran.json["measured"] is False
    assert "not measured on this model" in ran.json["how"]
    assert (tmp_path / "l.txt").read_text().count("=") == 8


def test_a_rejected_shape_gets_upstreams_layout(finished: Finished, tmp_path: Path):
    model = open_model(finished.model)
    path = verdict_path(model)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"verdict": "rejected", "target": "code"}))
    ran = layout_run(finished, tmp_path / "l.txt", "--no-measure", "--baseline", "Q3_K_S")
    assert "a canary rejected" in ran.json["notes"][-1]
    types = {line.rpartition("=")[2] for line in (tmp_path / "l.txt").read_text().split()}
    assert "Q3_K" in types


def test_prices_names_and_side_budgets_reach_the_solver(finished: Finished, tmp_path: Path):
    damage = finished.folder / "damage"
    imatrix = finished.folder / "imatrix" / "task.gguf"
    base = ("--damage", damage, "--imatrix", imatrix)
    ran = layout_run(finished, tmp_path / "a.txt", *base, "--baseline", "Q3_K_S", "--price",
                     "general=0.02")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["price"] == {"general": 0.02}
    assert ran.json["predicted_over_baseline"]["general"] <= 1.02 * (1 + 1e-6)
    ran = layout_run(finished, tmp_path / "b.txt", *base, "--honest-name", "Q3_K_S")
    assert "may be called Q3_K_S" in ran.json["how"]
    ran = layout_run(finished, tmp_path / "c.txt", *base, "--side-budget", "blk.0.*=1 bytes")
    assert "blk.0" in ran.refusal()
    ran = layout_run(finished, tmp_path / "d.txt", *base, "--baseline", "Q3_K_S", "--price",
                     "poetry=0.1")  # fmt: skip
    assert "poetry" in ran.refusal()
    assert layout_run(finished, tmp_path / "e.txt").code == 2
    ran = layout_run(finished, tmp_path / "f.txt", *base, "--price", "general=0.1")
    assert "--baseline" in ran.refusal()


def test_a_run_without_measuring_says_so_everywhere(finished: Finished, tmp_path: Path):
    folder = tmp_path / "run"
    ran = bitwright("run", finished.workflow, "--model", finished.model, "--out", folder,
                    "--no-measure", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert "not measured on this model" in ran.json["not_measured"]
    assert "not_measured" not in finished.ran.json
    for name in ("report.html", "README.md", "damage/damage_map.json"):
        assert "not measured on this model" in (folder / name).read_text(), name
    assert not (folder / "damage" / "ledger.sqlite").exists()
    assert "not measured on this model" in bitwright("report", folder).out


def test_a_class_without_a_prior_is_refused_before_the_long_work(
    finished: Finished, tmp_path: Path
):
    other = tiny_arch_gguf(tmp_path / "other.gguf", "qwen2")
    ran = bitwright("run", finished.workflow, "--model", other, "--out", tmp_path / "run",
                    "--no-measure", "--json")  # fmt: skip
    assert ran.code == 1
    assert "no prior is shipped for models like other (qwen2-dense-untied)" in ran.err
    assert not (tmp_path / "run" / "imatrix").exists()


def test_a_prior_works_on_rows_that_do_not_take_its_type(finished: Finished, tmp_path: Path):
    odd = tiny_gguf(tmp_path / "odd-F16.gguf", n_layer=1, n_embd=192, n_head=3, n_kv=1, n_ff=320)
    ran = bitwright("run", finished.workflow, "--model", odd, "--out", tmp_path / "run",
                    "--budget", "7 bpw", "--no-measure", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    mapped = load_damage_map(tmp_path / "run" / "damage").rows
    kinds = dict(zip(mapped["tensor"], mapped["type"], strict=True))
    assert kinds["blk.0.attn_q.weight"] == fallback_type("Q2_K", 192) != "Q2_K"
