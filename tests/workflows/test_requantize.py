"""An already quantized model with --allow-requantize: every output says that it is synthetic."""

from pathlib import Path

import numpy as np
import pytest

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.gguf_values import kv_value
from bitwright.engine.model_file import open_model
from tests.tiny import tiny_gguf
from tests.workflows.support import Ran, bitwright, strict_json, write_workflow

SAID = "already quantized"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Ran]:
    """Model, run folder, what the command printed."""
    folder = tmp_path_factory.mktemp("requantize")
    model = tiny_gguf(folder / "tiny-Q8_0.gguf", n_layer=1, dtype="Q8_0")
    workflow = write_workflow(folder)
    ran = bitwright(
        *("run", workflow, "--model", model, "--out", folder / "run", "--allow-requantize"),
    )
    assert ran.code == 0, ran.err
    return model, folder / "run", ran


def test_table_and_json_say_so(made: tuple[Path, Path, Ran]):
    _, folder, ran = made
    assert SAID in ran.out
    assert SAID in bitwright("report", folder).out
    result = strict_json((folder / "result.json").read_text(encoding="utf-8"))
    assert result["synthetic_reference"] is True
    assert result["reference_type"] == "Q8_0"


@pytest.mark.parametrize("name", ["README.md", "report.html"])
def test_card_and_report_say_so(made: tuple[Path, Path, Ran], name: str):
    _, folder, _ = made
    assert SAID in (folder / name).read_text(encoding="utf-8")


def test_metadata_says_so(made: tuple[Path, Path, Ran]):
    _, folder, _ = made
    (gguf,) = folder.glob("*.gguf")
    value = kv_value(read_gguf(gguf).kv["bitwright.reference"])
    assert value == "Q8_0 (already quantized: synthetic)"
    assert SAID in bitwright("inspect", gguf).out


def test_single_stages_say_so(made: tuple[Path, Path, Ran], tmp_path: Path):
    model, folder, _ = made
    line = ("--model", model, "--allow-requantize")
    corpus = ("--corpus", folder / "corpus")
    lines = {
        "quantize": ("--layout", "Q4_K_M", "--out", tmp_path / "o.gguf", *line),
        "evaluate": (next(folder.glob("*.gguf")), *corpus, *line),
        "allocate": (
            *("--damage", folder / "damage", "--budget", "5 bpw", "--target", "code"),
            *("--out", tmp_path / "layout.txt", *line),
        ),
    }
    for verb, more in lines.items():
        ran = bitwright(verb, *more, "--quiet") if verb != "allocate" else bitwright(verb, *more)
        assert ran.code == 0, ran.err
        assert SAID in ran.out, verb
    kv = read_gguf(tmp_path / "o.gguf").kv
    assert SAID in str(kv_value(kv["bitwright.reference"]))
    json = bitwright("evaluate", tmp_path / "o.gguf", *corpus, *line, "--json").json
    assert json["synthetic_reference"] is True


def test_tensors_that_have_their_type_already_are_copied(
    made: tuple[Path, Path, Ran], tmp_path: Path
):
    model, _, _ = made
    out = tmp_path / "same.gguf"
    line = ("--model", model, "--allow-requantize", "--layout", "Q8_0", "--out", out)
    assert bitwright("quantize", *line).code == 0
    before, after = open_model(model, allow_requantize=True), open_model(out, allow_requantize=True)
    for info in before.tensors:
        assert after.tensor(info.name).type == info.type
        np.testing.assert_array_equal(before.raw(info.name), after.raw(info.name))
