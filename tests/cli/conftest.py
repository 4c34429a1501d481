"""The folder that the command lines of these tests use, which no refusal may change."""

from pathlib import Path

import numpy as np
import pytest

from bitwright.engine.imatrix_file import Imatrix, ImatrixEntry, write_imatrix
from bitwright.engine.model_file import open_model
from tests.tiny import tiny_gguf
from tests.workflows.support import listing, write_workflow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of one layer, a mixture of experts, a workflow and an imatrix."""
    folder = tmp_path_factory.mktemp("cli")
    model = tiny_gguf(folder / "tiny-F16.gguf", n_layer=1)
    tiny_gguf(folder / "moe-F16.gguf", n_layer=1, n_ff=256, n_expert=4)
    tiny_gguf(folder / "tiny-Q8_0.gguf", n_layer=1, dtype="Q8_0")
    write_workflow(folder)
    entries = {
        info.name: ImatrixEntry(
            np.full((info.n_matrices, info.n_per_row), 8.0, np.float32),
            np.full(info.n_matrices, 4.0, np.float32),
        )
        for info in open_model(model).tensors
        if len(info.shape) > 1
    }
    write_imatrix(Imatrix(entries, 4, 128, ("code",)), folder / "imatrix.gguf")
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(home: Path):
    """No refusal writes anything beside its inputs."""
    before = listing(home)
    yield
    assert listing(home) == before
