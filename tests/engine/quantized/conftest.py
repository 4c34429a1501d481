"""The model that the tests of written files share."""

import pytest

from bitwright.engine.model_file import open_model
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("source") / "toy-F16.gguf", n_layer=1)


@pytest.fixture(scope="module")
def model(source):
    return open_model(source)
