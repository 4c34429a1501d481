"""Paths that break careless programs; a console without UTF-8."""

import json
from pathlib import Path

import pytest

from tests.tiny import tiny_gguf
from tests.workflows.support import bitwright, started, write_recipe, write_workflow

NAMES = ["Моя модель (v1)", "模型", 'it\'s "quoted"', "-rf", "x;touch pwned", "$(id)", "a=b,c"]
TEXT = "\n\n".join(
    f"The number {i * 7919} comes before {i * 7919 + 1}; {i} of them." for i in range(900)
)


def placed(folder: Path) -> tuple[Path, Path]:
    """Model and workflow, with its own text, in a folder."""
    folder.mkdir()
    model = tiny_gguf(folder / "tiny ä-F16.gguf", n_layer=1)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    for category in ("code", "general"):
        write_recipe(folder, category, "text.txt")
    return model, write_workflow(folder, code="code.toml", general="general.toml")


@pytest.mark.parametrize("name", NAMES)
def test_single_stages_in_any_folder(tmp_path: Path, monkeypatch, name: str):
    model, _ = placed(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    shown = Path(name)
    inside = {key: f"{name}/{key}" for key in ("o.gguf", "corpus")}
    ran = bitwright(
        *("quantize", "--model", shown / model.name, "--layout", "Q4_K_M"),
        *("--out", inside["o.gguf"], "--json"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["paths"] == [inside["o.gguf"]]
    assert Path(ran.json["paths"][0]).is_file()
    inspected = bitwright("inspect", "--json", "--", inside["o.gguf"])
    assert inspected.json["file"] == "o.gguf"
    recipe = f"./{name}/code.toml"  # an argument may not look like an option
    small = ("--model", shown / model.name, "--out", inside["corpus"], "--ctx", "64", "--json")
    ran = bitwright("corpus", recipe, *small)
    assert ran.code == 0, ran.err
    assert {path.name for path in tmp_path.iterdir()} == {name}


@pytest.mark.parametrize("encoding", ["ascii", "cp1251"])
def test_a_console_of_another_code_page(tmp_path: Path, encoding: str):
    model, _ = placed(tmp_path / "Моя модель")
    layout = tmp_path / "模型.txt"
    layout.write_text("blk=Q4_K\n", encoding="utf-8")
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": encoding}
    line = ("quantize", "--model", model, "--layout", layout, "--out", tmp_path / "模型.gguf")
    with started(*line, env=env) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert b"bytes" in out
    assert (tmp_path / "模型.gguf").is_file()


def test_the_whole_run_in_a_folder_with_a_name(tmp_path: Path):
    model, workflow = placed(tmp_path / "Моя модель (v1) it's")
    out = Path("-вывод $(id)")
    line = ("run", workflow, "--model", model, "--out", out, "--threads", "1", "--json")
    with started(*line, env={"LC_ALL": "C", "LANG": "C"}, cwd=tmp_path) as process:
        stdout, err = process.communicate(timeout=300)
    assert process.returncode == 0, err.decode(errors="replace")
    result = json.loads(stdout.splitlines()[-1])
    (path,) = [entry["path"] for entry in result["files"] if entry["path"]]
    assert (tmp_path / path).is_file()
    assert (tmp_path / path).parent == tmp_path / out
    for report in ("README.md", "report.html"):
        text = (tmp_path / out / report).read_text(encoding="utf-8")
        assert str(tmp_path) not in text
    assert {path.name for path in tmp_path.iterdir()} == {model.parent.name, str(out)}


def test_a_path_that_is_too_long_is_told(tmp_path: Path):
    model = tiny_gguf(tmp_path / "m.gguf", n_layer=1)
    long = tmp_path / ("x" * 300)
    line = ("quantize", "--model", model, "--layout", "Q4_K_M", "--quiet")
    assert "too long" in bitwright(*line, "--out", long / "o.gguf").refusal()
    assert "too long" in bitwright(*line, "--out", long).refusal()
    workflow = write_workflow(tmp_path)
    told = bitwright("run", workflow, "--model", model, "--out", long).refusal()
    assert "too long" in told.lower()
    assert bitwright("run", workflow, "--model", long).refusal()
    assert "too long" in bitwright("run", f"{long}.toml", "--model", model).refusal()
    assert "too long" in bitwright(*line[:-1], "--layout", long, "--out", tmp_path / "o").refusal()
    assert "too long" in bitwright("inspect", long).refusal()
