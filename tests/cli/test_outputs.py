"""Where the command line writes, within which bytes, and what an interruption leaves."""

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from bitwright.engine import atomic
from bitwright.workflows import verbs
from tests.cli.lines import quantize_line, run_line
from tests.workflows.support import bitwright, started

# Where it is written: QZ-07, QZ-08


def test_no_space_is_told_before_anything_is_written(home: Path, tmp_path: Path):
    little = SimpleNamespace(total=1 << 40, used=0, free=20 << 20)
    with patch.object(atomic.shutil, "disk_usage", lambda path: little):
        wide = ("--budget", "16 bpw")
        told = run_line(home, tmp_path / "out", home / "moe-F16.gguf", *wide).refusal()
    assert "bytes" in told
    assert str(20 << 20) in told
    assert not list(tmp_path.rglob("*.*")), "stages ran before the check"
    with patch.object(atomic.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000)):
        told = quantize_line(home, tmp_path / "o.gguf", "Q4_K_M", "--quiet").refusal()
    assert "1000" in told
    assert not (tmp_path / "o.gguf").exists()


def test_missing_folder_and_a_file_for_a_folder(home: Path, tmp_path: Path):
    told = quantize_line(home, tmp_path / "no" / "o.gguf", "Q4_K_M", "--quiet").refusal()
    assert "does not exist" in told
    (tmp_path / "file").write_bytes(b"")
    assert "is a file" in run_line(home, tmp_path / "file").refusal()
    assert "folder" in quantize_line(home, tmp_path, "Q4_K_M", "--quiet").refusal()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(home: Path, tmp_path: Path):
    tmp_path.chmod(0o555)
    told = quantize_line(home, tmp_path / "o.gguf", "Q4_K_M", "--quiet").refusal()
    assert "permission" in told
    assert "permission" in run_line(home, tmp_path / "out").refusal()


def test_the_output_may_not_be_an_input_however_it_is_spelled(home: Path, tmp_path: Path):
    model = tmp_path / "model.gguf"
    shutil.copy(home / "tiny-F16.gguf", model)
    imatrix = tmp_path / "imatrix.gguf"
    shutil.copy(home / "imatrix.gguf", imatrix)
    layout = tmp_path / "layout.txt"
    layout.write_text("blk=Q4_K\n", encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "soft.gguf").symlink_to(model)
    (tmp_path / "hard.gguf").hardlink_to(model)
    before = {path: path.read_bytes() for path in (model, imatrix, layout)}
    spelled = (model, tmp_path / "sub" / ".." / "model.gguf", Path(os.path.relpath(model)))
    more = ("--model", model, "--imatrix", imatrix, "--overwrite", "--quiet")
    others = (tmp_path / "soft.gguf", tmp_path / "hard.gguf", imatrix, layout)
    for out in (*spelled, *others):
        told = quantize_line(home, out, layout, *more).refusal()
        assert "same file as the input" in told
    for line in (
        ("imatrix", "--model", model, "--corpus", tmp_path),
        ("imatrix", "--merge", model),
        ("allocate", "--model", model, "--damage", tmp_path, "--budget", "1GB", "--target", "x"),
    ):
        assert bitwright(*line, "--out", model).refusal()
    assert before == {path: path.read_bytes() for path in before}


def test_an_existing_file_needs_overwrite(home: Path, tmp_path: Path):
    out = tmp_path / "mine.gguf"
    out.write_bytes(b"precious")
    told = quantize_line(home, out, "Q4_K_M", "--quiet").refusal()
    assert "--overwrite" in told
    line = ("imatrix", "--merge", home / "imatrix.gguf", "--out", out)
    assert "--overwrite" in bitwright(*line).refusal()
    assert out.read_bytes() == b"precious"
    assert quantize_line(home, out, "Q4_K_M", "--overwrite").code == 0
    assert bitwright(*line, "--overwrite").code == 0


# Budgets: AL-01


def test_a_budget_under_the_floor_is_refused_before_anything_is_made(home: Path, tmp_path: Path):
    dry = run_line(home, tmp_path / "out", "", "--dry-run", "--json")
    floor, top = dry.json["smallest_bytes"], dry.json["largest_bytes"]
    started_at = time.monotonic()
    told = run_line(home, tmp_path / "out", "", "--budget", str(floor - 1)).refusal()
    assert time.monotonic() - started_at < 2
    assert f"{floor:,} bytes" in told
    assert "bpw" in told
    assert not list(tmp_path.iterdir())
    at_floor = run_line(home, tmp_path / "out", "", "--budget", str(floor), "--dry-run", "--json")
    assert at_floor.json["budget_bytes"] == floor
    above = run_line(home, tmp_path / "out", "", "--budget", str(top + 1), "--dry-run")
    assert above.code == 0


@pytest.mark.parametrize("budget", ["", "5", "-3 GB", "3 bpw + 1 %", "Q9_K", "nan bpw", "1e99 GB"])
def test_budgets_that_mean_nothing(home: Path, tmp_path: Path, budget: str):
    assert run_line(home, tmp_path / "out", "", f"--budget={budget}").refusal()
    assert not list(tmp_path.iterdir())


# Interrupted


def test_ctrl_c_exits_with_130_and_one_line(home: Path, tmp_path: Path):
    line = ("run", home / "small.toml", "--model", home / "tiny-F16.gguf", "--out", tmp_path / "o")
    with started(*line, "--json") as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert b"[corpus]" in first
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert err.splitlines()[-1].startswith(b"bitwright: interrupted")
    assert not list(tmp_path.rglob("*.gguf"))


def test_progress_is_silent_with_quiet(home: Path, tmp_path: Path):
    ran = quantize_line(home, tmp_path / "o.gguf", "Q4_K_M", "--quiet")
    assert ran.err == ""
    assert quantize_line(home, tmp_path / "p.gguf", "Q4_K_M").err.startswith("[quantize]")


def test_safe_names_can_be_folders():
    assert verbs.safe_name("Моя модель (v1)") == "Моя_модель_v1"
    assert verbs.safe_name("../..") == "model"
    assert verbs.safe_name("-rf") == "rf"


def test_a_context_beyond_all_bounds_is_one_line(tmp_path: Path):
    ran = bitwright(
        *("run", "coding-q3_k_s", "--model", "demo", "--ctx", "100000000", "--dry-run"),
        *("--out", tmp_path / "run"),
    )
    assert ran.code == 1
    assert "--ctx 100000000 is not between 32 and 1048576" in ran.refusal()
