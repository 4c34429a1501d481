"""One small run, made once, that many tests look at."""

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from bitwright.engine import locate
from tests.tiny import tiny_gguf
from tests.workflows.support import Ran, bitwright, write_workflow


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that ended: its folder, the command's output, the model, the workflow."""

    folder: Path
    ran: Ran
    model: Path
    workflow: Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("model") / "tiny-F16.gguf", n_layer=1)


@pytest.fixture(scope="session")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workflow(tmp_path_factory.mktemp("workflow"))


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, workflow: Path
) -> Finished:
    folder = tmp_path_factory.mktemp("runs") / "first"
    # The tiny model stands in for the embedded one, which takes a minute.
    with patch.object(locate, "DEMO_FILE", tiny_model):
        ran = bitwright("run", workflow, "--model", "demo", "--out", folder, "--json")
    assert ran.code == 0, ran.err
    return Finished(folder, ran, tiny_model, workflow)
