"""The imatrix against llama-imatrix's figures, and on a mixture of experts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bitwright.engine import lib
from bitwright.engine.imatrix_collect import (
    collect_imatrix,
    embedding_importance,
    read_tensor,
    weight_name,
)
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import to_float32
from bitwright.engine.session import Session, SessionOptions
from bitwright.errors import EngineError, InputError
from tests.golden.make_golden import COLUMN_STEP, weights_sha256
from tests.tiny import tiny_gguf

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "llama_cpp_demo.json").read_text(encoding="utf-8")
)


def options(**changes):
    return SessionOptions(**{"threads": 1, "n_ctx": 128, "working_type": "file"} | changes)


def batch(seed, n, n_vocab=280):
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return open_model(tiny_gguf(path, n_expert=4, never_route=3))


def test_equals_llama_imatrix():
    model = open_model("demo")
    assert weights_sha256(model) == GOLDEN["weights_sha256"], "demo model changed: make it again"
    chunks = [(np.array(chunk, np.int32), [0]) for chunk in GOLDEN["chunks"]]
    with Session(model, options()) as session:
        imatrix = collect_imatrix(session, chunks, dataset="golden", heads=False)
    assert imatrix.entries.keys() == GOLDEN["imatrix"].keys()
    for name, golden in GOLDEN["imatrix"].items():
        entry = imatrix.entries[name]
        assert list(entry.counts) == [golden["count"]]
        assert entry.sums.sum(dtype=np.float64) == pytest.approx(golden["total"], rel=1e-5)
        np.testing.assert_allclose(entry.sums[0, ::COLUMN_STEP], golden["columns"], rtol=1e-4)
    assert (imatrix.chunk_count, imatrix.chunk_size) == (4, 128)
    assert imatrix.datasets == ("golden",)


def test_experts_are_counted_one_by_one(moe):
    with Session(moe, options()) as session:
        imatrix = collect_imatrix(session, [(batch(0, 100), [0, 30])], dataset="x")
    for layer in range(2):
        up = imatrix.entries[f"blk.{layer}.ffn_up_exps.weight"]
        router = imatrix.entries[f"blk.{layer}.ffn_gate_inp.weight"]
        assert up.counts.sum() == 2 * 100  # two experts for each token
        assert up.counts[3] == 0
        assert not up.sums[3].any()
        assert (up.counts[:3] > 0).all()
        # The router sees each token once and two experts see it too, so the sums agree.
        np.testing.assert_allclose(up.sums.sum(0), 2 * router.sums[0], rtol=1e-5)
        down = imatrix.entries[f"blk.{layer}.ffn_down_exps.weight"]
        assert np.array_equal(down.counts, up.counts)
    assert (imatrix.importance("blk.0.ffn_up_exps.weight")[3] == 1).all()


@pytest.fixture
def untied(tmp_path):
    return open_model(tiny_gguf(tmp_path / "u.gguf", tied=False, n_layer=1))


def collected(model, **given):
    with Session(model, options()) as session:
        return collect_imatrix(session, [(batch(0, 32), [0])], dataset="x", **given)


def test_embedding_and_output_can_be_left_out_as_llama_imatrix_does(moe, untied):
    for model in (moe, untied):
        assert all(name.startswith("blk.") for name in collected(model, heads=False).entries)


def test_the_output_is_a_product_as_any_other(untied):
    found = collected(untied)
    body = collected(untied, heads=False)
    assert set(found.entries) - set(body.entries) == {"output.weight", "token_embd.weight"}
    entry = found.entries["output.weight"]
    assert entry.counts.tolist() == [32]
    with Session(untied, options()) as session:
        logits = np.array(session.logits(batch(0, 32), [0], np.arange(32)), np.float64)
    info = untied.tensor("output.weight")
    weights = to_float32(untied.raw(info.name), info.type, info.n_elements).astype(np.float64)
    # What goes into the product, found back from what comes out of it.
    inputs = np.linalg.lstsq(weights.reshape(info.n_rows, -1), logits.T, rcond=None)[0]
    np.testing.assert_allclose(entry.sums[0], np.square(inputs).sum(axis=1), rtol=0.02)


def test_an_embeddings_columns_weigh_what_the_first_norm_makes_of_them(untied):
    norm = untied.tensor("blk.0.attn_norm.weight")
    values = to_float32(untied.raw(norm.name), norm.type, norm.n_elements)
    found = collected(untied).importance("token_embd.weight")[0]
    np.testing.assert_allclose(found, np.maximum(values**2, 1e-3 * np.mean(values**2)), rtol=1e-5)
    assert found.min() > 0


def test_a_tied_embedding_counts_as_the_output_that_it_is(tmp_path):
    tied = open_model(tiny_gguf(tmp_path / "t.gguf", tied=True, n_layer=1))
    entry = collected(tied).entries["token_embd.weight"]
    assert entry.counts.tolist() == [32]
    assert embedding_importance(tied) is not None  # would have been given to an untied one
    assert not np.allclose(entry.sums[0] / 32, embedding_importance(tied))


def test_no_column_of_an_embedding_counts_nothing():
    """Packers divide by sums of importance; a column that the norm drops goes on beside it."""

    def model(*norm):
        values = np.array(norm, np.float32)
        tensors = {
            "blk.0.attn_norm.weight": SimpleNamespace(type="F32", n_elements=len(norm)),
            "token_embd.weight": SimpleNamespace(n_per_row=3),
        }
        return SimpleNamespace(by_name=tensors, raw=lambda name: values.view(np.uint8))

    found = embedding_importance(model(3.0, 0.0, -1.0))
    assert found.tolist() == pytest.approx([9.0, 1e-3 * 10 / 3, 1.0])
    assert embedding_importance(model(0.0, 0.0, 0.0)) is None
    assert embedding_importance(model(1.0, float("nan"), 1.0)) is None
    assert embedding_importance(model(1.0, 1.0)) is None  # of another width


def test_no_first_norm_no_importance_of_the_embedding(untied):
    left = {n: t for n, t in untied.by_name.items() if n != "blk.0.attn_norm.weight"}
    assert embedding_importance(SimpleNamespace(by_name=left)) is None


def test_batches_add_up_and_progress_is_told(moe):
    parts, seen = [batch(s, 64) for s in (1, 2)], []
    with Session(moe, options()) as session:
        one, two = (collect_imatrix(session, [(p, [0])], dataset="x") for p in parts)
        both = collect_imatrix(
            session, [(p, [0]) for p in parts], dataset="x", progress=seen.append
        )
    assert seen == [1, 2]
    for name, entry in both.entries.items():
        total = one.entries[name].sums + two.entries[name].sums
        np.testing.assert_allclose(entry.sums, total, rtol=1e-5)


def test_too_little_text_is_refused(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", n_layer=1))
    with (
        Session(model, options()) as session,
        pytest.raises(InputError, match=r"8 tokens in 1 batches.*at least 16"),
    ):
        collect_imatrix(session, [(batch(0, 8), [0])], dataset="x")


def test_nan_input_names_the_weight(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", n_layer=1))
    with Session(model, options()) as session:
        packed = np.array(model.raw("token_embd.weight")).view(np.float16)
        packed[:] = np.nan
        session.set_tensor("token_embd.weight", "F16", packed.view(np.uint8))
        with pytest.raises(EngineError, match=r"the inputs of blk\.0\.attn_\w\.weight are NaN"):
            collect_imatrix(session, [(batch(0, 32), [0])], dataset="x")


def test_an_interrupt_inside_the_graph_is_not_swallowed(moe, monkeypatch):
    def interrupt(address):
        raise KeyboardInterrupt

    with Session(moe, options()) as session:
        monkeypatch.setattr("bitwright.engine.imatrix_collect.read_tensor", interrupt)
        with pytest.raises(KeyboardInterrupt):
            collect_imatrix(session, [(batch(0, 32), [0])], dataset="x")


def test_names_of_copied_weights():
    assert weight_name(b"CUDA0#blk.0.attn_k.weight#0") == "blk.0.attn_k.weight"
    assert weight_name(b"blk.0.attn_k.weight") == "blk.0.attn_k.weight"


def test_only_plain_numbers_are_read():
    tensor = lib.Tensor(type=2)
    with pytest.raises(EngineError, match="type id 2"):
        read_tensor(lib.ctypes.addressof(tensor))
