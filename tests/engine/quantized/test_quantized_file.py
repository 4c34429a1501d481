import os
import shutil
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from bitwright.engine import atomic
from bitwright.engine.ggml_types import TYPES, fits_row
from bitwright.engine.imatrix import Imatrix, ImatrixEntry
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import (
    Provenance,
    predict_size,
    tensor_file_bytes,
    write_quantized,
)
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.upstream import FTYPES, upstream_layout, upstream_quantize
from bitwright.errors import ConfigError, InputError, StorageError
from tests.engine.quantized.writing import OWN, ZeroPacker, uniform, write
from tests.tiny import split_gguf, tiny_gguf


def make_imatrix(model, *, unseen=()):
    rng = np.random.default_rng(3)
    entries = {}
    for t in model.tensors:
        if is_quantizable(t, model.arch) and t.name != "token_embd.weight":
            counts = np.full(t.n_matrices, 512, np.float32)
            counts[list(unseen) if t.n_matrices > 1 else []] = 0
            means = rng.exponential(size=(t.n_matrices, t.n_per_row)).astype(np.float32)
            entries[t.name] = ImatrixEntry(means * counts[:, None], counts)
    return Imatrix(entries, 1, 512, ("t.txt",))


# --- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ftype", "options"),
    [
        ("Q4_K_M", {}),
        ("Q3_K_S", {"tied": False}),
        ("Q2_K", {"n_expert": 4, "never_route": 1}),
        ("IQ2_XS", {"dtype": "BF16", "n_layer": 1, "n_ff": 256}),
        ("Q5_K_M", {"n_embd": 288, "n_head": 9, "n_kv": 3, "n_ff": 352}),
        ("IQ4_XS", {"dtype": "F32"}),
        ("Q3_K_M", {"dtype": "Q8_0", "extra_kv": {"general.file_type": 7}}),
    ],
)
def test_same_file_as_llama_model_quantize(tmp_path, ftype, options):
    path = tiny_gguf(tmp_path / "m.gguf", **options)
    model = open_model(path, allow_requantize=True)
    imatrix = make_imatrix(model, unseen=[1])
    layout = upstream_layout(model, ftype, imatrix=imatrix)
    upstream_quantize(model, tmp_path / "theirs.gguf", ftype, imatrix)
    (ours,) = write_quantized(
        model,
        layout,
        tmp_path / "ours.gguf",
        packer=Packer(model, imatrix),
        ftype=FTYPES[ftype],
        provenance=None,
    )
    assert ours.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_same_file_from_shards(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf")
    split = open_model(split_gguf(path, 3)[0])
    layout = upstream_layout(split, "Q4_K_S", imatrix=None)
    upstream_quantize(split, tmp_path / "theirs.gguf", "Q4_K_S", None)
    write_quantized(
        split,
        layout,
        tmp_path / "ours.gguf",
        packer=Packer(split, None),
        ftype=FTYPES["Q4_K_S"],
        provenance=None,
    )
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


MODELS = {
    "dense": {},
    "untied": {"tied": False, "dtype": "BF16"},
    "experts": {"n_expert": 4},
    "odd rows": {"n_embd": 288, "n_head": 9, "n_kv": 3, "n_ff": 352, "dtype": "F32"},
    "large tokenizer": {"n_vocab": 20_000, "n_embd": 64, "n_head": 2, "n_ff": 96},
    "aligned": {"alignment": 128},
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_size_is_the_written_size(tmp_path, name, shards):
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1, **MODELS[name])
    model = open_model(path if shards == 1 else split_gguf(path, shards)[0])
    rng = np.random.default_rng(len(name) + shards)
    offered = [n for n, t in TYPES.items() if t.family != "other"]
    for number in range(4):
        layout = {
            t.name: str(rng.choice([n for n in offered if fits_row(n, t.n_per_row)]))
            for t in model.tensors
            if is_quantizable(t, model.arch) and rng.random() < 0.9
        }
        provenance = OWN if number % 2 else None
        for keep_split in (False, True):
            predicted = predict_size(model, layout, provenance, keep_split=keep_split)
            out = tmp_path / f"out{number}.gguf"
            files = write(
                model, layout, out, provenance=provenance, keep_split=keep_split, overwrite=True
            )
            assert len(files) == (shards if keep_split else 1)
            assert sum(f.stat().st_size for f in files) == predicted
            again = open_model(files[-1], allow_requantize=True)
            assert {t.name: t.type for t in again.tensors} == {
                t.name: layout.get(t.name, t.type) for t in model.tensors
            }


@pytest.mark.parametrize("family", ["K", "IQ", "block32"])
def test_predicted_size_over_the_ladders(tmp_path, model, family):
    for kind in (t for t in TYPES.values() if t.family == family):
        layout = uniform(model, kind.name)
        (out,) = write(model, layout, tmp_path / "o.gguf", provenance=OWN, overwrite=True)
        assert out.stat().st_size == predict_size(model, layout, OWN)


def test_size_is_the_sum_of_its_tensors(model):
    layout = uniform(model, "Q3_K")
    types = {t.name: layout.get(t.name, t.type) for t in model.tensors}
    data = sum(tensor_file_bytes(t, types[t.name], model.alignment) for t in model.tensors)
    bare = predict_size(model, layout, None) - data
    layout = uniform(model, "Q6_K")
    types |= layout
    data = sum(tensor_file_bytes(t, types[t.name], model.alignment) for t in model.tensors)
    assert predict_size(model, layout, None) == bare + data


def test_metadata_is_carried_and_completed(tmp_path, model, source):
    write(model, uniform(model, "Q4_K"), tmp_path / "o.gguf", provenance=OWN)
    before, after = gguf.GGUFReader(str(source)), gguf.GGUFReader(str(tmp_path / "o.gguf"))
    keys = [k for k in before.fields if not k.startswith("GGUF.")]
    own = [key for key, _ in OWN.entries]
    expected = [*keys, "general.quantization_version", "general.file_type", *own]
    assert [k for k in after.fields if not k.startswith("GGUF.")] == expected
    for key in keys:
        assert after.fields[key].contents() == before.fields[key].contents()
    assert after.fields["general.file_type"].contents() == 11
    assert [after.fields[k].contents() for k in own] == ["0.1", "0" * 64, 7, 3.5]


def test_provenance_of_an_earlier_run_is_replaced(tmp_path, model):
    (first,) = write(model, {}, tmp_path / "a.gguf", provenance=OWN)
    again = open_model(first)
    newer = Provenance((("bitwright.seed", 8),))
    (second,) = write(again, {}, tmp_path / "b.gguf", provenance=newer)
    reopened = open_model(second)
    assert reopened.meta("bitwright.seed") == 8
    assert second.stat().st_size == predict_size(again, {}, newer)


def test_tensors_of_the_right_type_are_copied(tmp_path, model):
    packer = ZeroPacker(model)
    (out,) = write(model, uniform(model, "F16"), tmp_path / "o.gguf", packer=packer)
    assert packer.asked == []
    again = open_model(out)
    for tensor in model.tensors:
        assert again.raw(tensor.name).tobytes() == model.raw(tensor.name).tobytes()


def test_shards_load_and_a_single_file_has_no_split_keys(tmp_path):
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1)
    split = open_model(split_gguf(path, 3)[1])
    layout, packer = uniform(split, "Q4_K"), Packer(split, None)
    (single,) = write(split, layout, tmp_path / "single.gguf", packer=packer)
    parts = write(split, layout, tmp_path / "kept.gguf", packer=packer, keep_split=True)
    assert [p.name for p in parts] == [f"kept-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert not [k for k in gguf.GGUFReader(str(single)).fields if k.startswith("split.")]
    scores = []
    for file in (single, parts[0]):
        llm = llama_cpp.Llama(str(file), n_ctx=32, n_threads=1, logits_all=True, verbose=False)
        llm.eval(llm.tokenize(b"the inner"))
        scores.append(np.array(llm.scores[: llm.n_tokens]))
        llm.close()
    np.testing.assert_array_equal(scores[0], scores[1])


def test_progress_ends_at_the_whole_size(tmp_path, model):
    seen = []
    write(
        model, uniform(model, "Q8_0"), tmp_path / "o.gguf", progress=lambda *step: seen.append(step)
    )
    size = (tmp_path / "o.gguf").stat().st_size
    assert [name for _, _, name in seen] == [t.name for t in model.tensors]
    assert seen[-1][:2] == (size, size)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


# --- what is refused before anything is written ------------------------------------------------

FIXED = {
    "blk.0.ffn_gate_inp.weight": (8, 256),
    "blk.0.ssm_conv1d.weight": (512, 4),
    "blk.0.ssm_a": (256, 256),
    "blk.0.post_attention_norm.weight": (2, 256),
    "blk.0.altup_router.weight": (4, 256),
    "blk.0.laurel_l.weight": (64, 256),
    "blk.0.time_mix_w1.weight": (64, 256),
    "per_layer_model_proj.weight": (256, 256),
    "position_embd.weight": (16, 256),
    "v.patch_embd.weight": (16, 256),
    "blk.0.shortconv.conv.weight": (256, 256),
}


def test_fixed_tensors_keep_type_and_bytes(tmp_path):
    rng = np.random.default_rng(0)
    extra = {name: rng.standard_normal(shape).astype("f4") for name, shape in FIXED.items()}
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=1, extra_tensors=extra)
    model = open_model(path)
    layout = uniform(model, "Q2_K")
    assert not set(layout) & set(FIXED)
    (out,) = write(model, layout, tmp_path / "o.gguf")
    again = open_model(out, allow_requantize=True)
    for name in [*FIXED, "blk.0.attn_norm.weight"]:
        assert again.tensor(name).type == "F32"
        assert again.raw(name).tobytes() == model.raw(name).tobytes()
    for name in FIXED:
        with pytest.raises(ConfigError, match=r"1 tensor\(s\) a type that must stay"):
            predict_size(model, {name: "Q4_0"}, None)
    assert predict_size(model, dict.fromkeys(FIXED, "F32"), None) > 0


def test_layouts_that_do_not_fit(model, tmp_path):
    with pytest.raises(InputError, match=r"names 1 tensor\(s\) that toy-F16 does not have \(blk.9"):
        predict_size(model, {"blk.9.attn_q.weight": "Q4_K"}, None)
    with pytest.raises(InputError, match="is not a tensor type"):
        predict_size(model, {"blk.0.attn_q.weight": "Q4_K_M"}, None)
    odd = open_model(
        tiny_gguf(tmp_path / "odd.gguf", n_layer=1, n_embd=288, n_head=9, n_kv=3, n_ff=352)
    )
    with pytest.raises(ConfigError, match=r"blk.0.attn_q.weight=Q3_K → Q4_0"):
        write(odd, {"blk.0.attn_q.weight": "q3_k"}, tmp_path / "o.gguf")
    assert not (tmp_path / "o.gguf").exists()


def test_provenance_keys_are_our_own(model):
    with pytest.raises(ConfigError, match=r"begin with 'bitwright\.'"):
        predict_size(model, {}, Provenance((("general.name", "x"),)))


@pytest.fixture
def copy(source, tmp_path):
    path = tmp_path / "input.gguf"
    shutil.copy(source, path)
    return path


@pytest.mark.parametrize("spelling", ["same", "relative", "dotted", "symlink", "hard link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_output_is_the_input(copy, tmp_path, monkeypatch, spelling, overwrite):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.gguf"
    if spelling == "symlink":
        other.symlink_to(copy)
    elif spelling == "hard link":
        other.hardlink_to(copy)
    out = {
        "same": copy,
        "relative": Path("input.gguf"),
        "dotted": tmp_path / ".." / tmp_path.name / "input.gguf",
    }.get(spelling, other)
    model, before = open_model(copy), copy.read_bytes()
    with pytest.raises(StorageError, match=r"the same file as the input|exists already"):
        write(model, uniform(model, "Q4_K"), out, overwrite=overwrite)
    if overwrite:
        with pytest.raises(StorageError, match="the same file as the input"):
            write(model, uniform(model, "Q4_K"), out, overwrite=True)
    assert copy.read_bytes() == before


def test_output_is_a_shard_or_another_input(copy, tmp_path):
    shards = split_gguf(copy, 3)
    split = open_model(shards[0])
    imatrix = tmp_path / "imatrix.gguf"
    imatrix.write_bytes(b"kept")
    for out, options in (
        (shards[2], {}),
        (copy, {"keep_split": True}),
        (imatrix, {"protect": [imatrix]}),
    ):
        with pytest.raises(StorageError, match="the same file as the input"):
            write(split, {}, out, overwrite=True, **options)
    assert imatrix.read_bytes() == b"kept"


def test_existing_file_needs_overwrite(model, tmp_path):
    out = tmp_path / "o.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(StorageError, match=r"exists already.*--overwrite"):
        write(model, {}, out)
    assert out.read_bytes() == b"precious"
    write(model, {}, out, overwrite=True)
    assert open_model(out).name == "o"


def test_where_it_cannot_be_written(model, tmp_path, monkeypatch):
    with pytest.raises(StorageError, match=r"the folder .* does not exist"):
        write(model, {}, tmp_path / "none" / "o.gguf")
    with pytest.raises(StorageError, match="is a folder"):
        write(model, {}, tmp_path)
    with pytest.raises(StorageError, match="the path is too long"):
        write(model, {}, tmp_path / ("x" * 300))
    monkeypatch.setattr(atomic.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="no permission in the folder"):
        write(model, {}, tmp_path / "o.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(model, tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StorageError, match="no permission"):
        write(model, {}, tmp_path / "o.gguf")


def test_space_is_checked_first(model, tmp_path, monkeypatch):
    layout = uniform(model, "Q4_K")
    need = predict_size(model, layout, None)
    usage = shutil._ntuple_diskusage(10**9, 10**9 - need, need)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    packer = ZeroPacker(model)
    with pytest.raises(StorageError, match=rf"needs {need} bytes .* only {need} are free"):
        write(model, layout, tmp_path / "o.gguf", packer=packer)
    assert not packer.asked
    assert not list(tmp_path.iterdir())
