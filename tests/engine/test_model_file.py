import hashlib
import shutil

import gguf
import numpy as np
import pytest

from bitwright.engine.model_file import open_model
from bitwright.errors import InputError
from tests.tiny import split_gguf, tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("model") / "toy-F16.gguf", n_layer=1)


@pytest.fixture
def shards(whole, tmp_path):
    path = tmp_path / "toy-F16.gguf"
    shutil.copy(whole, path)
    parts = split_gguf(path, 3)
    path.unlink()
    return parts


def test_facts(whole):
    model = open_model(whole)
    assert (model.arch, model.name, model.reference_type) == ("llama", "toy-F16", "F16")
    assert not model.synthetic_reference
    assert [t.name for t in model.tensors[:3]] == [
        *("output_norm.weight", "token_embd.weight", "blk.0.attn_k.weight")
    ]
    assert model.meta("llama.block_count") == 1
    assert model.meta("none", 7) == 7
    assert model.has("output_norm.weight")
    assert model.size_bytes == whole.stat().st_size
    with pytest.raises(InputError, match=r"toy-F16 has no tensor output\.weight"):
        model.tensor("output.weight")


def test_bytes_of_a_tensor(whole):
    model = open_model(whole)
    for tensor in gguf.GGUFReader(str(whole)).tensors:
        mine = model.raw(tensor.name)
        assert mine.dtype == np.uint8
        assert not mine.flags.writeable
        assert mine.tobytes() == np.asarray(tensor.data).tobytes()


def test_tied(whole, tmp_path):
    assert open_model(whole).is_tied
    untied = open_model(tiny_gguf(tmp_path / "untied.gguf", n_layer=1, tied=False))
    assert not untied.is_tied
    assert untied.tensor("output.weight").shape == (256, 288)


def test_demo_and_bf16_and_text_path(tmp_path):
    demo = open_model("demo")
    assert (demo.name, demo.arch, demo.is_tied) == ("demo-F16", "llama", True)
    path = tiny_gguf(tmp_path / "b.gguf", n_layer=1, dtype="BF16")
    assert open_model(str(path)).reference_type == "BF16"


def test_sha256_follows_the_contents(whole, tmp_path):
    path = tmp_path / "copy.gguf"
    shutil.copy(whole, path)
    first = open_model(path).sha256()
    assert first == hashlib.sha256(path.read_bytes()).hexdigest()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data + b"\0")
    assert open_model(path).sha256() != first


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_gives_the_same_model(whole, shards, given):
    split, single = open_model(shards[given]), open_model(whole)
    assert split.path == shards[0]
    assert split.name == "toy-F16"
    assert [(t.name, t.type) for t in split.tensors] == [(t.name, t.type) for t in single.tensors]
    assert {t.shard for t in split.tensors} == {0, 1, 2}
    for tensor in single.tensors:
        assert split.raw(tensor.name).tobytes() == single.raw(tensor.name).tobytes()
    digests = b"".join(hashlib.sha256(p.read_bytes()).digest() for p in shards)
    assert split.sha256() == hashlib.sha256(digests).hexdigest()
    assert split.meta("general.name") == "tiny"


def test_a_stale_set_beside_it_is_ignored(shards):
    shutil.copy(shards[0], shards[0].with_name("toy-F16-00001-of-00005.gguf"))
    assert len(open_model(shards[1]).shards) == 3


def test_missing_shard(shards):
    shards[2].unlink()
    with pytest.raises(InputError, match=r"shard .*toy-F16-00003-of-00003\.gguf is missing"):
        open_model(shards[0])


def test_swapped_shards(shards):
    spare = shards[1].with_suffix(".tmp")
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    with pytest.raises(InputError, match=r"00002-of-00003.gguf holds shard 3 of 3.*says 2 of 3"):
        open_model(shards[0])


def test_shard_of_another_count(whole, shards, tmp_path):
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "toy-F16.gguf"
    shutil.copy(whole, path)
    shutil.copy(split_gguf(path, 4)[1], shards[1])
    with pytest.raises(InputError, match=r"00002-of-00003\.gguf holds shard 2 of 4"):
        open_model(shards[0])
    with pytest.raises(InputError, match=r"one of 4 shards, but its name says one of 3"):
        open_model(shards[1])


def test_renamed_shard(shards, tmp_path):
    path = shards[0].rename(tmp_path / "model.gguf")
    with pytest.raises(InputError, match=r"one of 3 shards, but its name says that it is whole"):
        open_model(path)


def test_tensor_counts_must_add_up(whole, shards):
    other = tiny_gguf(shards[0].parent / "more.gguf", n_layer=2)
    shutil.copy(split_gguf(other, 3)[2], shards[2])
    with pytest.raises(InputError, match=r"00003-of-00003.gguf belongs to a model of 20 tensors"):
        open_model(shards[0])


def test_link_out_of_the_folder(shards, tmp_path):
    (tmp_path / "away").mkdir()
    away = shards[1].rename(tmp_path / "away" / "evil.gguf")
    shards[1].symlink_to(away)
    with pytest.raises(InputError, match=r"is a link to .*evil.gguf, outside the folder"):
        open_model(shards[0])


def test_links_of_a_hub_cache_are_fine(shards, tmp_path):
    (tmp_path / "blobs").mkdir()
    for index, shard in enumerate(shards):
        blob = shard.rename(tmp_path / "blobs" / f"hash{index}")
        shard.symlink_to(blob)
    assert len(open_model(shards[1]).shards) == 3


@pytest.mark.parametrize(
    ("arch", "kv", "reason"),
    [
        ("clip", {}, r"a vision or audio projector"),
        ("llama", {"general.type": "mmproj"}, r"a multimodal projector"),
        ("llama", {"general.type": "imatrix"}, r"an importance matrix: pass it with --imatrix"),
        ("llama", {"general.type": "adapter"}, r"a LoRA adapter"),
        ("eagle3", {}, r"a draft model"),
    ],
)
def test_other_kinds_of_gguf(tmp_path, arch, kv, reason):
    path = tiny_gguf(tmp_path / "other.gguf", arch=arch, extra_kv=kv, n_layer=1)
    with pytest.raises(InputError, match=reason) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def plain_gguf(path, tensors, **kv):
    writer = gguf.GGUFWriter(str(path), "")
    writer.kv_data[0].clear()
    for key, value in kv.items():
        writer.add_string(key.replace("_", "."), value)
    for name in tensors:
        writer.add_tensor(name, np.ones((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_containers_that_are_no_model(tmp_path):
    sums = ["blk.0.a.weight.in_sum2", "blk.0.a.weight.counts"]
    with pytest.raises(InputError, match="importance matrix"):
        open_model(plain_gguf(tmp_path / "a.gguf", sums, general_type="imatrix"))
    with pytest.raises(InputError, match="importance matrix"):
        open_model(plain_gguf(tmp_path / "b.gguf", sums))
    with pytest.raises(InputError, match="does not say its architecture"):
        open_model(plain_gguf(tmp_path / "c.gguf", ["x.weight"]))
    with pytest.raises(InputError, match="holds no tensors"):
        open_model(plain_gguf(tmp_path / "d.gguf", [], general_architecture="llama"))


def test_unknown_architecture_is_opened(tmp_path):
    """Whether llama.cpp can run it is asked later; the container can be looked at."""
    path = tiny_gguf(tmp_path / "new.gguf", arch="made_up_arch", n_layer=1)
    assert open_model(path).arch == "made_up_arch"


def test_folder_lists_models_only(whole, tmp_path):
    for name in ("toy-F16.gguf", "mmproj-toy.gguf", "toy.imatrix.gguf"):
        shutil.copy(whole, tmp_path / name)
    shutil.copy(whole, tmp_path / "part.gguf")
    parts = split_gguf(tmp_path / "part.gguf", 2)
    (tmp_path / "part.gguf").unlink()
    plain_gguf(tmp_path / "x.gguf", ["a.counts"], general_type="imatrix")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError) as caught:
        open_model(tmp_path)
    assert str(caught.value).endswith(f"name one of its models: {parts[0].name}, toy-F16.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_input_must_be_allowed(tmp_path, kind):
    path = tiny_gguf(tmp_path / "q.gguf", n_layer=1, dtype=kind)
    with pytest.raises(InputError, match=rf"tensor token_embd.weight is {kind}.*--allow-requant"):
        open_model(path)
    model = open_model(path, allow_requantize=True)
    assert model.synthetic_reference
    assert model.reference_type == kind


def test_hub_ids(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"write hf:owner/repo/file\.gguf"):
        open_model("hf:owner/file.gguf")
    asked = []

    def fetch(repo, file, revision=None):
        asked.append((repo, file, revision))
        return tmp_path / file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    shutil.copy(tiny_gguf(tmp_path / "m.gguf", n_layer=1), tmp_path / "toy.gguf")
    split_gguf(tmp_path / "toy.gguf", 2)
    assert open_model("hf:owner/repo/toy.gguf@abc123").name == "toy"
    assert asked == [("owner/repo", "toy.gguf", "abc123")]
    asked.clear()
    assert len(open_model("hf:owner/repo/toy-00002-of-00002.gguf", revision="v1").shards) == 2
    assert [file for _, file, _ in asked] == [f"toy-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert {revision for *_, revision in asked} == {"v1"}


ODD_NAMES = ["Моя модель (v1)", "模型", "a b", "it's", "-rf", "x;touch pwned", "$(id)", "ü" * 60]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_paths(whole, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(whole, folder / f"{name}.gguf")
    monkeypatch.chdir(tmp_path)
    model = open_model(f"{name}/{name}.gguf")
    assert model.name == name
    assert len(open_model(split_gguf(folder / f"{name}.gguf", 2)[1]).shards) == 2
    assert not list(tmp_path.rglob("pwned"))


def test_path_too_long(tmp_path):
    with pytest.raises(InputError, match="too long"):
        open_model(tmp_path / ("x" * 300) / "m.gguf")
