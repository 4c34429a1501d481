"""The training code against the shipped model; needs torch and tokenizers (an optional extra)."""

from pathlib import Path

import numpy as np
import pytest

from bitwright.engine.model_file import open_model
from bitwright.engine.packing import to_float32
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from tools.demo_model.batches import Batches  # noqa: E402
from tools.demo_model.export import export  # noqa: E402
from tools.demo_model.network import DemoModel, Shape  # noqa: E402
from tools.demo_model.train import SHARES, document_mask, make_trainer  # noqa: E402

SMALL = Shape(n_vocab=400, n_layer=1)


@pytest.fixture(autouse=True)
def quick_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.demo_model.vocabulary.SAMPLES", 20)
    monkeypatch.setattr("tools.demo_model.vocabulary.CODE_CHARS", 200)


def test_the_network_computes_what_llama_cpp_computes_with_the_shipped_weights() -> None:
    model = open_model("demo")
    network = DemoModel(Shape())
    weights = {
        t.name: torch.from_numpy(
            to_float32(model.raw(t.name), t.type, t.n_elements).reshape(t.shape[::-1]).copy()
        )
        for t in model.tensors
    }
    network.load_state_dict(weights)  # strict: same names, same shapes
    tokens = np.random.default_rng(0).integers(0, 2048, 200).astype(np.int32)
    with torch.no_grad():
        ours = network(torch.from_numpy(tokens.astype(np.int64))[None])[0].log_softmax(-1).numpy()
    with Session(model, SessionOptions(threads=1, working_type="file")) as session:
        theirs = torch.from_numpy(session.logits(tokens, (0,), np.arange(200)).copy())
    assert np.abs(np.exp(ours) - theirs.softmax(-1).numpy()).max() < 1e-3


@pytest.mark.slow
def test_a_run_trains_resumes_and_exports_a_model_that_llama_cpp_reads(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(tmp_path, 0, SMALL)
    first = trainer.step(0.0)
    for _ in range(3):
        last = trainer.step(0.0)
    assert last < first
    trainer.save()
    again = make_trainer(tmp_path, 0, SMALL)
    assert again.clock.step == 4
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    out = tmp_path / "small-F16.gguf"
    export(tmp_path, out)
    model = open_model(out)
    text = "def add(a, b):\n    return a + 12\n<|im_end|>"
    with Tokenizer(model) as tokenizer:
        ids = tokenizer.encode(text)
        assert tokenizer.adds_bos
        assert ids.tolist() == again.batches.tokenizer.encode(text).ids
    with Session(model, SessionOptions(threads=1, working_type="file")) as session:
        assert session.logits(ids, (0,), np.arange(len(ids))).shape == (len(ids), 400)


@pytest.mark.slow
def test_conversations_are_whole_and_do_not_see_each_other(tmp_path: Path) -> None:
    batches: Batches = make_trainer(tmp_path, 0, SMALL).batches
    rows = batches.conversation_rows(2, 384, SHARES)
    assert rows.documents is not None
    starts = np.flatnonzero(np.diff(rows.documents[0])) + 1
    for first in starts[rows.documents[0][starts] >= 0]:
        assert rows.ids[0, first] == 0  # BOS
        assert rows.weights[0, first - 1] == 0.0  # never a target
    mask = document_mask(torch.from_numpy(rows.documents))[0, 0]
    assert not mask[starts[0], starts[0] - 1]
    assert not torch.triu(mask, 1).any()
