"""The tiny models are what other tests take them for."""

import numpy as np
import pytest

from bitwright.engine.imatrix_collect import collect_imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.session import Session, SessionOptions
from tests.tiny import tiny_gguf


@pytest.mark.parametrize("never", [0, 3])
def test_one_expert_is_never_routed_and_the_others_are(tmp_path, never):
    model = open_model(tiny_gguf(tmp_path / "m.gguf", n_expert=4, never_route=never))
    tokens = np.random.default_rng(0).integers(0, 256, 256).astype(np.int32)
    with Session(model, SessionOptions(threads=1, n_ctx=256)) as session:
        imatrix = collect_imatrix(session, [(tokens, [0, 128])], dataset="random")
    for name in imatrix.entries:
        if "exps" in name:
            assert imatrix.unseen(name) == (never,)
            assert imatrix.coverage(name) == 0.75


def test_same_seed_same_bytes(tmp_path):
    first, second, other = (
        tiny_gguf(tmp_path / f"{i}.gguf", n_layer=1, seed=seed).read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert first == second
    assert first != other
