"""Packing: bit-identical to llama_model_quantize, cached, bounded, safe from ggml's aborts."""

import numpy as np
import pytest

from bitwright.engine import packing
from bitwright.engine.ggml_types import row_bytes, tensor_type
from bitwright.engine.imatrix_file import Imatrix, ImatrixEntry
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import PACKABLE, Packer, quantize_rows, row_slices, to_float32
from bitwright.engine.upstream import upstream_layout, upstream_quantize
from bitwright.errors import EngineError, InputError
from tests.tiny import tiny_gguf


def random_imatrix(model, seed=0):
    """Positive importance for every matrix but the embedding, one expert unseen."""
    rng = np.random.default_rng(seed)
    entries = {}
    for info in model.tensors:
        if len(info.shape) < 2 or info.name == "token_embd.weight":
            continue
        shape = (info.n_matrices, info.n_per_row)
        counts = np.full(info.n_matrices, 64, np.float32)
        if info.n_matrices > 1:
            counts[-1] = 0
        sums = (64 * rng.gamma(0.5, size=shape)).astype(np.float32)
        entries[info.name] = ImatrixEntry(sums * (counts[:, None] > 0), counts)
    return Imatrix(entries, chunk_count=1, chunk_size=64, datasets=("random",))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return open_model(tiny_gguf(path, n_expert=4, tied=False, n_layer=1, n_ff=256))


@pytest.mark.parametrize(
    ("name", "ftype"),
    [
        *(("demo", "Q4_K_M"), ("demo", "IQ3_M"), ("moe", "Q4_K_M"), ("moe", "IQ3_XS")),
        pytest.param("demo", "IQ2_M", marks=pytest.mark.slow),
        pytest.param("demo", "IQ1_S", marks=pytest.mark.slow),
    ],
)
def test_identical_to_llama_model_quantize(tmp_path, moe, name, ftype):
    model = moe if name == "moe" else open_model("demo")
    imatrix = random_imatrix(model)
    out = tmp_path / "q.gguf"
    upstream_quantize(model, out, ftype, imatrix)
    written = open_model(out, allow_requantize=True)
    layout = upstream_layout(model, ftype, imatrix=imatrix)
    packer = Packer(model, imatrix)
    for tensor, type_name in layout.items():
        assert written.tensor(tensor).type == type_name
        assert np.array_equal(packer.pack(tensor, type_name), written.raw(tensor)), tensor


def test_threads_and_slices_change_nothing(moe, monkeypatch):
    imatrix = random_imatrix(moe)
    names = ("blk.0.ffn_down_exps.weight", "blk.0.attn_q.weight")
    whole = [Packer(moe, imatrix).pack(name, "IQ3_XXS") for name in names]
    monkeypatch.setattr(packing, "SLICE_BYTES", 10_000)
    sliced = Packer(moe, imatrix, threads=3)
    assert len(list(sliced.pack_slices(names[0], "IQ3_XXS"))) > 4
    for name, packed in zip(names, whole, strict=True):
        assert np.array_equal(sliced.pack(name, "IQ3_XXS"), packed)


def test_slices_cover_every_row_once_within_one_matrix(moe, monkeypatch):
    monkeypatch.setattr(packing, "SLICE_BYTES", 300_000)
    info = moe.tensor("blk.0.ffn_up_exps.weight")
    slices = list(row_slices(info))
    rows = [row for _, first, n in slices for row in range(first, first + n)]
    assert rows == list(range(info.n_rows))
    per_matrix = info.n_rows // info.n_matrices
    assert all(first // per_matrix == (first + n - 1) // per_matrix == m for m, first, n in slices)


# ggml builds a table at the first use of these in a process: 2 to 17 seconds.
SLOW_TYPES = {"IQ1_S", "IQ1_M", "IQ2_S", "IQ2_XS"}
# Relative squared error on normal values, by bits per weight: a wrong row stride or type number
# lands near 2.
CEILINGS = ((2.2, 0.7), (3.0, 0.2), (4.0, 0.06), (16.0, 0.02), (32.0, 1e-5))


@pytest.mark.parametrize(
    "type_name",
    [pytest.param(t, marks=pytest.mark.slow) if t in SLOW_TYPES else t for t in sorted(PACKABLE)],
)
def test_every_packable_type_round_trips(type_name):
    values = np.random.default_rng(1).standard_normal((3, 512), dtype=np.float32)
    packed = quantize_rows(values, type_name, np.ones(512, np.float32))
    assert packed.nbytes == 3 * row_bytes(type_name, 512)
    back = to_float32(packed, type_name, values.size).reshape(values.shape)
    error = np.square(back - values).mean() / np.square(values).mean()
    bpw = tensor_type(type_name).bpw
    assert error <= next(ceiling for bits, ceiling in CEILINGS if bpw <= bits)


def test_float_conversions_are_exact():
    values = np.array([[0.1, -3.5, 65504.0, 1e-8]], np.float32)
    f16 = to_float32(quantize_rows(values, "F16"), "F16", 4)
    assert np.array_equal(f16, values.astype(np.float16).astype(np.float32)[0])
    bf16 = quantize_rows(values, "BF16").view(np.uint16)
    assert np.array_equal(to_float32(bf16, "BF16", 4).view(np.uint32) >> 16, bf16)
    assert np.array_equal(to_float32(quantize_rows(values, "F32"), "F32", 4), values[0])


def test_what_ggml_would_abort_on_is_refused():
    rows = np.ones((2, 256), np.float32)
    with pytest.raises(InputError, match="IQ2_XXS cannot be packed without importance"):
        quantize_rows(rows, "IQ2_XXS")
    with pytest.raises(InputError, match="nothing can be quantized to Q8_1"):
        quantize_rows(rows, "Q8_1")
    with pytest.raises(InputError):
        quantize_rows(np.ones((2, 200), np.float32), "Q4_K")
    with pytest.raises(InputError, match="importance has shape"):
        quantize_rows(rows, "Q4_K", np.ones(255, np.float32))


def test_damaged_weights_are_refused(tmp_path):
    with pytest.raises(EngineError, match="invalid blocks"):
        quantize_rows(np.full((1, 256), np.inf, np.float32), "Q4_0")
    path = tiny_gguf(tmp_path / "t.gguf", n_layer=1)
    info = open_model(path).tensor("blk.0.ffn_up.weight")
    with path.open("r+b") as file:
        file.seek(info.offset + 2 * 256)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(InputError, match=r"ffn_up\.weight holds NaN"):
        Packer(open_model(path), None).pack(info.name, "Q4_0")


def test_missing_importance_is_refused_but_not_for_heads(moe):
    packer = Packer(moe, None)
    with pytest.raises(InputError, match=r"attn_q\.weight at IQ2_S needs an imatrix"):
        packer.pack("blk.0.attn_q.weight", "IQ2_S")
    assert packer.pack("output.weight", "IQ2_XXS").nbytes


def test_imatrix_of_another_model_is_refused(moe):
    name = "blk.0.attn_q.weight"
    wrong = ImatrixEntry(np.ones((1, 64), np.float32), np.ones(1, np.float32))
    packer = Packer(moe, Imatrix({name: wrong}, 1, 64, ()))
    with pytest.raises(InputError, match="made for another model"):
        packer.pack(name, "Q4_K")


def test_cache_is_used_and_a_damaged_one_is_packed_again(tmp_path, moe):
    packer = Packer(moe, random_imatrix(moe), cache_dir=tmp_path / "cache")
    name = "blk.0.ffn_up_exps.weight"
    packed = packer.pack(name, "Q3_K")
    (file,) = (tmp_path / "cache").iterdir()
    packer.pack_slices = None  # any packing would fail now
    assert np.array_equal(packer.pack(name, "Q3_K"), packed)
    del packer
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    fresh = Packer(moe, random_imatrix(moe), cache_dir=tmp_path / "cache")
    assert np.array_equal(fresh.pack(name, "Q3_K"), packed)
    other = Packer(moe, random_imatrix(moe, seed=1), cache_dir=tmp_path / "cache")
    assert not np.array_equal(other.pack(name, "Q3_K"), packed)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_relative_error(moe):
    packer = Packer(moe, random_imatrix(moe))
    name = "blk.0.ffn_down_exps.weight"
    errors = [packer.relative_error(name, t) for t in ("Q8_0", "Q4_K", "Q3_K", "Q2_K")]
    assert 0 < errors[0] < errors[1] < errors[2] < errors[3] < 0.3
    whole = packer.relative_error(name, "Q3_K", max_rows=10**6)
    assert errors[2] == pytest.approx(whole, rel=0.05)
    assert packer.relative_error(name, "F16") == 0


def test_relative_error_is_weighted_by_importance(moe):
    name, info = "blk.0.attn_q.weight", moe.tensor("blk.0.attn_q.weight")
    importance = np.linspace(0.1, 4, info.n_per_row, dtype=np.float32)
    entry = ImatrixEntry(importance[None], np.ones(1, np.float32))
    packer = Packer(moe, Imatrix({name: entry}, 1, 1, ()))
    w = to_float32(moe.raw(name), "F16", info.n_elements).reshape(-1, info.n_per_row)
    packed = quantize_rows(w, "Q2_K", importance)
    d = w - to_float32(packed, "Q2_K", w.size).reshape(w.shape)
    expected = (d**2 * importance).sum() / (w**2 * importance).sum()
    assert packer.relative_error(name, "Q2_K") == pytest.approx(expected, rel=1e-4)
