"""The session on real tiny models: logits, swaps, restores, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitwright.engine import lib, swap_check
from bitwright.engine import session as session_module
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions, check_loadable, resolve_threads
from bitwright.engine.upstream import upstream_layout, upstream_quantize
from bitwright.engine.working_type import resolve_working_type
from bitwright.errors import ConfigError, EngineError, InputError
from tests.tiny import split_gguf, tiny_gguf

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "llama_cpp_demo.json").read_text(encoding="utf-8")
)


def options(**changes):
    return SessionOptions(**{"threads": 1, "n_ctx": 256, "working_type": "file"} | changes)


def tokens(n, n_vocab=280, seed=0):
    return np.random.default_rng(seed).integers(0, n_vocab, n).astype(np.int32)


def kld(a, b):
    a, b = (x - x.max(1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    a, b = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (a, b))
    return (np.exp(a) * (a - b)).sum(1)


@pytest.fixture(scope="module")
def demo():
    with Session(open_model("demo"), options(n_ctx=512)) as opened:
        yield opened


@pytest.fixture(scope="module")
def moe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return open_model(tiny_gguf(path, n_expert=4, tied=False, n_layer=1, n_ff=256))


# -- logits -----------------------------------------------------------------------------------


def test_chosen_rows_equal_the_full_run_and_repeat(demo):
    batch, rows = tokens(200, 2000), np.arange(200)
    full = demo.logits(batch, [0], rows).copy()
    assert full.shape == (200, 2048)
    assert np.array_equal(demo.logits(batch, [0], rows[3::7]), full[3::7])
    assert np.array_equal(demo.logits(batch, [0], rows), full)


def test_sequences_of_a_batch_do_not_see_each_other(demo):
    batch, starts = tokens(300, 2000), [0, 90, 91, 200]
    together = demo.logits(batch, starts, np.arange(300)).copy()
    for first, end in zip(starts, [*starts[1:], 300], strict=True):
        alone = demo.logits(batch[first:end], [0], np.arange(end - first))
        assert kld(alone, together[first:end]).max() < 2e-5
        assert np.abs(alone - together[first:end]).max() < 0.03
    other = batch.copy()
    other[90:] = tokens(210, 2000, seed=1)
    changed = demo.logits(other, starts, np.arange(300))
    assert np.array_equal(changed[:90], together[:90])
    assert not np.array_equal(changed[90:], together[90:])


def test_a_batch_is_one_graph():
    with Session(open_model("demo"), options()) as session:
        products = []

        def watch(address, ask):
            node = lib.Tensor.from_address(address)
            if lib.op_name(node.op) == "MUL_MAT":
                products.append(lib.Tensor.from_address(node.src[0]).name)
            return False

        context = session_module.DecodeContext(
            session.loaded, n_ctx=256, max_sequences=64, threads=1, watcher=watch
        )
        with context:
            context.decode(tokens(256), list(range(0, 256, 4)), np.arange(256))
        assert products.count(b"blk.0.ffn_down.weight") == 1


def test_threads_do_not_change_the_logits(demo):
    batch = tokens(64, 2000)
    one = demo.logits(batch, [0], np.arange(64)).copy()
    with Session(open_model("demo"), options(threads=2)) as session:
        assert np.array_equal(session.logits(batch, [0], np.arange(64)), one)


def test_kld_of_stock_q3_equals_llama_perplexity(demo):
    first = GOLDEN["kld_first_row"]
    rows = np.arange(first, first + GOLDEN["kld_rows"])
    chunks = [np.array(chunk, np.int32) for chunk in GOLDEN["chunks"]]
    reference = [demo.logits(chunk, [0], rows).copy() for chunk in chunks]
    layout = upstream_layout(demo.model, "Q3_K_S")
    demo.apply(layout, Packer(demo.model, None))
    try:
        small = [demo.logits(chunk, [0], rows).copy() for chunk in chunks]
    finally:
        demo.restore_all()
    mine = np.concatenate([kld(a, b) for a, b in zip(reference, small, strict=True)])
    golden = GOLDEN["kld"]
    # llama-perplexity stores its base log-probabilities in 16 bits.
    assert mine.mean() == pytest.approx(golden["mean_kld_nats"], rel=2e-3)
    assert mine.max() == pytest.approx(golden["max_kld_nats"], rel=2e-3)
    same = np.mean([(a.argmax(1) == b.argmax(1)) for a, b in zip(reference, small, strict=True)])
    assert 100 * same == pytest.approx(golden["same_top_percent"], abs=1e-2)


@pytest.mark.parametrize(
    ("batch", "starts", "rows", "message"),
    [
        (tokens(513), [0], [0], "513 tokens.*takes 1 to 512"),
        (tokens(0), [0], [0], "0 tokens"),
        (tokens(65), list(range(65)), [0], "65 sequences"),
        (tokens(9), [1, 4], [0], "do not cut"),
        (tokens(9), [0, 4, 4], [0], "do not cut"),
        (tokens(9), [0], [], "rows must be ascending"),
        (tokens(9), [0], [3, 3], "rows must be ascending"),
        (tokens(9), [0], [9], "rows must be ascending"),
        (np.array([5, 2048], np.int32), [0], [0], "tokenized for another model"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(demo, batch, starts, rows, message):
    with pytest.raises(ConfigError, match=message):
        demo.logits(batch, starts, np.array(rows, np.int64))


def test_nan_logits_name_the_row_and_do_not_stick(demo):
    batch, rows, name = tokens(32, 2000), np.arange(4, 32), "blk.4.attn_v.weight"
    before = demo.logits(batch, [0, 8], rows).copy()
    broken = np.full(demo.model.tensor(name).n_elements, np.nan, np.float16).view(np.uint8)
    with (
        demo.swapped(name, "F16", broken),
        pytest.raises(EngineError, match=r"28 of 28 rows.*first row 0 \(token 4, sequence 0\)"),
    ):
        demo.logits(batch, [0, 8], rows)
    assert np.array_equal(demo.logits(batch, [0, 8], rows), before)


# -- swaps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("blk.2.ffn_down.weight", "Q2_K"),
        ("blk.0.attn_v.weight", "IQ4_XS"),
        ("token_embd.weight", "Q6_K"),
    ],
)
def test_a_swap_equals_the_written_file_and_restores(tmp_path, demo, name, kind):
    model, batch, rows = demo.model, tokens(128, 2000), np.arange(128)
    before = demo.logits(batch, [0], rows).copy()
    layout = {info.name: info.type for info in model.tensors if info.type == "F16"}
    upstream_quantize(model, tmp_path / "one.gguf", "Q8_0", None, layout | {name: kind})
    with Session(open_model(tmp_path / "one.gguf", allow_requantize=True), options()) as written:
        expected = written.logits(batch, [0], rows).copy()
    with demo.swapped(name, kind, Packer(model, None).pack(name, kind)):
        assert np.array_equal(demo.logits(batch, [0], rows), expected)
    assert not np.array_equal(before, expected)
    assert np.array_equal(demo.logits(batch, [0], rows), before)


@pytest.mark.parametrize("ftype", ["Q3_K_M", "IQ4_NL"])
def test_a_layout_equals_the_written_file(tmp_path, moe_file, ftype):
    batch, rows = tokens(64), np.arange(64)
    upstream_quantize(moe_file, tmp_path / "q.gguf", ftype, None)
    with Session(open_model(tmp_path / "q.gguf", allow_requantize=True), options()) as written:
        expected = written.logits(batch, [0], rows).copy()
    with Session(moe_file, options()) as session:
        before = session.logits(batch, [0], rows).copy()
        session.apply({"output.weight": "Q2_K"}, Packer(moe_file, None))
        session.apply(upstream_layout(moe_file, ftype), Packer(moe_file, None))
        assert np.array_equal(session.logits(batch, [0], rows), expected)
        session.apply({}, Packer(moe_file, None))
        assert np.array_equal(session.logits(batch, [0], rows), before)


@pytest.mark.parametrize("how", ["viewed", "accelerator"])
def test_weights_behind_views_and_on_accelerators_swap_alike(monkeypatch, moe_file, how):
    """Views rebuild the graph, and buffers that are not the host's are cleared first."""
    batch, rows, name = tokens(32), np.arange(32), "blk.0.ffn_up_exps.weight"
    packed = Packer(moe_file, None).pack(name, "Q3_K")
    with Session(moe_file, options()) as session:
        before = session.logits(batch, [0], rows).copy()
        with session.swapped(name, "Q3_K", packed):
            expected = session.logits(batch, [0], rows).copy()
        weights = session._store.weights
        weights[name] = replace(weights[name], viewed=how == "viewed")
        if how == "accelerator":
            monkeypatch.setattr(lib, "buffer_is_host", lambda buffer: False)
        with session.swapped(name, "Q3_K", packed):
            assert (session._context is None) == (how == "viewed")
            assert np.array_equal(session.logits(batch, [0], rows), expected)
        assert np.array_equal(session.logits(batch, [0], rows), before)


def test_weights_are_those_of_the_graph_in_order(moe_file):
    with Session(moe_file, options()) as session:
        roles = [name.removeprefix("blk.0.").removesuffix(".weight") for name in session.weights]
        assert set(session.weights) == {i.name for i in moe_file.tensors if len(i.shape) > 1}
    assert roles[0] == "token_embd"
    assert roles[-1] == "output"
    assert roles.index("attn_output") < roles.index("ffn_gate_inp") < roles.index("ffn_down_exps")


def test_wrong_bytes_and_names_are_refused(demo):
    with pytest.raises(InputError, match="not a weight that demo"):
        demo.set_tensor("output_norm.weight", "F32", np.zeros(1024, np.uint8))
    name = "blk.0.attn_k.weight"
    with pytest.raises(EngineError, match="bytes were given"):
        demo.set_tensor(name, "Q4_0", np.zeros(10, np.uint8))
    demo.restore(name)


# -- working type -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("working", ["F16", "BF16"])
def test_working_type_is_close_and_restores_exactly(tmp_path, dtype, working):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", dtype=dtype, n_layer=1))
    batch, rows = tokens(40), np.arange(40)
    with Session(model, options()) as session:
        own = session.logits(batch, [0], rows).copy()
    with Session(model, options(working_type=working)) as session:
        assert (session.working_type, session.swap_mode) == (working, "real")
        before = session.logits(batch, [0], rows).copy()
        assert kld(own, before).max() < 5e-3
        packer = Packer(model, None)
        session.apply(dict.fromkeys(session.weights, "Q3_K"), packer)
        assert kld(before, session.logits(batch, [0], rows)).mean() > 1e-2
        session.restore_all()
        assert np.array_equal(session.logits(batch, [0], rows), before)


def test_choice_of_the_working_type(monkeypatch):
    monkeypatch.setattr(lib, "has_bf16", lambda: True)
    assert resolve_working_type("auto", "F16", 0) == "BF16"
    assert resolve_working_type("auto", "F16", 10) == "F16"
    assert resolve_working_type("auto", "Q8_0", 0) == "Q8_0"
    assert resolve_working_type("f32", "F32", 0) == "F32"
    monkeypatch.setattr(lib, "has_bf16", lambda: False)
    assert resolve_working_type("auto", "BF16", 0) == "F16"
    assert resolve_working_type("auto", "BF16", 10) == "BF16"
    assert resolve_working_type("auto", "F16", 0) == "F16"
    assert resolve_working_type("file", "BF16", 0) == "BF16"
    with pytest.raises(ConfigError, match="F32 is wider than the model's own F16"):
        resolve_working_type("F32", "F16", 0)
    with pytest.raises(ConfigError, match="not one of"):
        resolve_working_type("F8", "F16", 0)


def test_values_beyond_f16_are_refused(tmp_path):
    path = tiny_gguf(tmp_path / "t.gguf", dtype="F32", n_layer=1)
    model = open_model(path)
    info = model.tensor("blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(np.float32(1e6).tobytes())
    with pytest.raises(ConfigError, match=r"ffn_up\.weight holds values above 65504"):
        Session(model, options(working_type="F16"))


def test_quantized_reference(tmp_path):
    path = tiny_gguf(tmp_path / "t.gguf", dtype="Q8_0", n_layer=1)
    model = open_model(path, allow_requantize=True)
    name = "blk.0.ffn_down.weight"
    with Session(model, options(working_type="auto")) as session:
        assert session.working_type == "Q8_0"
        before = session.logits(tokens(20), [0], np.arange(20)).copy()
        with session.swapped(name, "Q2_K", Packer(model, None).pack(name, "Q2_K")):
            assert not np.array_equal(session.logits(tokens(20), [0], np.arange(20)), before)
        # F16 is wider than the loaded bytes: its values go in at Q8_0, which changes little.
        with session.swapped(name, "F16", Packer(model, None).pack(name, "F16")):
            wide = session.logits(tokens(20), [0], np.arange(20))
            assert kld(before, wide).max() < 1e-4
        assert np.array_equal(session.logits(tokens(20), [0], np.arange(20)), before)


# -- self-check -------------------------------------------------------------------------------


def test_a_swap_that_computes_garbage_falls_back_to_fake(tmp_path, monkeypatch):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", n_layer=1))
    real = swap_check.WeightStore.write

    def wrong_strides(store, name, type_name, packed):
        shifted = np.roll(packed, 18) if type_name == "Q4_0" else packed
        real(store, name, type_name, shifted)

    monkeypatch.setattr(swap_check.WeightStore, "write", wrong_strides)
    with Session(model, options()) as session:
        assert session.swap_mode == "fake"
        assert "failed its check" in session.notes[0]
        monkeypatch.undo()
        batch, rows, name = tokens(48), np.arange(48), "blk.0.ffn_down.weight"
        before = session.logits(batch, [0], rows).copy()
        packed = Packer(model, None).pack(name, "Q3_K")
        with session.swapped(name, "Q3_K", packed):
            fake = session.logits(batch, [0], rows).copy()
        assert np.array_equal(session.logits(batch, [0], rows), before)
    with Session(model, options()) as session:
        assert session.swap_mode == "real"
        with session.swapped(name, "Q3_K", packed):
            swapped = session.logits(batch, [0], rows)
        assert kld(fake, swapped).mean() < 0.05 * kld(before, swapped).mean()


def test_a_swap_that_does_nothing_is_noticed():
    base = np.ones((2, 8), np.float32)
    fake = base + np.float32(0.1)
    assert not swap_check.close_enough(base, fake, base)
    assert swap_check.close_enough(base, fake, fake + np.float32(0.01))
    assert not swap_check.close_enough(base, fake, np.full_like(base, np.nan))


# -- refusals ---------------------------------------------------------------------------------


def test_unknown_architecture_says_who_refused(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", arch="made_up_arch"))
    with pytest.raises(
        InputError, match=r"'made_up_arch'.*llama-cpp-python 0\..*unknown model architecture"
    ):
        check_loadable(model)
    with pytest.raises(InputError, match="made_up_arch"):
        Session(model, options())


def test_missing_tensor_is_found_without_loading(tmp_path):
    path = tiny_gguf(tmp_path / "t.gguf", n_layer=1)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(InputError, match=r"'blk\.0\.attn_q\.weight' not found"):
        check_loadable(open_model(path))


def test_loadable_models_pass(moe_file):
    check_loadable(moe_file)
    check_loadable(open_model("demo"))


def test_limits(tmp_path):
    demo_file = open_model("demo")
    with pytest.raises(ConfigError, match=r"1024 tokens.*trained for 512"):
        Session(demo_file, options(n_ctx=1024))
    with pytest.raises(ConfigError, match="1 to 256"):
        Session(demo_file, options(max_sequences=257))
    with pytest.raises(ConfigError, match="threads is -1"):
        Session(demo_file, options(threads=-1))
    with Session(demo_file, options(n_ctx=8)) as session:
        assert session.logits(tokens(8), list(range(8)), np.arange(8)).shape == (8, 2048)
    assert resolve_threads(0) >= 1
    assert resolve_threads(3) == 3


def test_shards_load_from_any_of_them(tmp_path):
    path = tiny_gguf(tmp_path / "t.gguf", n_layer=1)
    with Session(open_model(path), options()) as session:
        whole = session.logits(tokens(20), [0], np.arange(20)).copy()
    shards = split_gguf(path, 2)
    with Session(open_model(shards[1]), options()) as session:
        assert np.array_equal(session.logits(tokens(20), [0], np.arange(20)), whole)
        session.apply(dict.fromkeys(session.weights, "Q4_0"), Packer(session.model, None))
        session.restore_all()
        assert np.array_equal(session.logits(tokens(20), [0], np.arange(20)), whole)


def test_close_twice(moe_file):
    session = Session(moe_file, options())
    session.close()
    session.close()
