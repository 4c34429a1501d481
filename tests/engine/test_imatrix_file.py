import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.engine.imatrix import Imatrix, ImatrixEntry
from bitwright.engine.imatrix_coverage import coverage_notes, require_covered, uncovered
from bitwright.engine.imatrix_file import (
    check_imatrix,
    merge_imatrices,
    read_imatrix,
    write_imatrix,
)
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError, InputError, StorageError
from tests.tiny import tiny_gguf

Q, EXPS = "blk.0.attn_q.weight", "blk.0.ffn_down_exps.weight"


def entry(means, counts):
    """Means (n_matrices, n_per_row) and counts as sums."""
    means, counts = np.atleast_2d(np.float32(means)), np.atleast_1d(np.float32(counts))
    return ImatrixEntry((means * counts[:, None]).astype(np.float32), counts)


def imatrix(entries, *, chunk_count=4, chunk_size=512, datasets=("a.txt",)):
    return Imatrix(entries, chunk_count, chunk_size, datasets)


@pytest.fixture
def both():
    rng = np.random.default_rng(0)
    counts = np.float32([900, 512, 100, 536])
    return imatrix(
        {
            Q: entry(rng.random((1, 256)), 2048),
            EXPS: entry(rng.random((4, 512)), counts),
        }
    )


def same(a, b, rtol=0.0):
    assert set(a.entries) == set(b.entries)
    for name in a.entries:
        np.testing.assert_allclose(
            a.importance(name).ravel(), b.importance(name).ravel(), rtol=rtol
        )


def test_gguf_round_trip(both, tmp_path):
    write_imatrix(both, tmp_path / "i.gguf")
    again = read_imatrix(tmp_path / "i.gguf")
    same(both, again)
    assert again.sha256() == both.sha256()
    assert (again.chunk_count, again.chunk_size, again.datasets) == (4, 512, ("a.txt",))
    assert again.counts_known
    np.testing.assert_array_equal(again.entries[EXPS].counts, [900, 512, 100, 536])


def test_gguf_form_is_the_official_one(both, tmp_path):
    """Names, keys, shapes and order as llama-imatrix writes them."""
    write_imatrix(both, tmp_path / "i.gguf")
    reader = gguf.GGUFReader(str(tmp_path / "i.gguf"))
    assert [(k, f.contents()) for k, f in reader.fields.items() if not k.startswith("GGUF.")] == [
        ("general.type", "imatrix"),
        ("imatrix.datasets", ["a.txt"]),
        ("imatrix.chunk_count", 4),
        ("imatrix.chunk_size", 512),
    ]
    assert [(t.name, t.shape.tolist()) for t in reader.tensors] == [
        (f"{Q}.in_sum2", [256]),
        (f"{Q}.counts", [1]),
        (f"{EXPS}.in_sum2", [512, 4]),
        (f"{EXPS}.counts", [1, 4]),
    ]
    np.testing.assert_array_equal(reader.tensors[2].data, both.entries[EXPS].sums)


@pytest.mark.parametrize("name", ["x.dat", "x.gguf"])
@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_content_decides_the_format(both, tmp_path, name, form):
    write_imatrix(both, tmp_path / name, form)
    again = read_imatrix(tmp_path / name)
    same(both, again, rtol=1e-6)
    assert again.counts_known is (form == "gguf")


def test_through_the_old_format_and_back(both, tmp_path):
    write_imatrix(both, tmp_path / "i.dat", "dat")
    old = read_imatrix(tmp_path / "i.dat", chunk_size=512)
    write_imatrix(old, tmp_path / "i.gguf")
    back = read_imatrix(tmp_path / "i.gguf")
    same(both, back, rtol=1e-6)
    assert not old.counts_known
    assert old.datasets == ("a.txt",)
    assert old.importance(EXPS, n_per_row=512).shape == (4, 512)
    assert old.entries[Q].counts.tolist() == [2048]


def test_old_file_without_a_tail(tmp_path):
    data = struct.pack("<i", 1) + struct.pack("<i3sii4f", 3, b"abc", 2, 4, 2, 4, 6, 8)
    (tmp_path / "i.dat").write_bytes(data)
    read = read_imatrix(tmp_path / "i.dat")
    np.testing.assert_array_equal(read.importance("abc"), [[1, 2, 3, 4]])
    assert (read.chunk_count, read.chunk_size, read.datasets) == (0, 0, ())


def test_old_writer_follows_llama_imatrix(tmp_path):
    """Unseen experts are stored as 1, tensors without any data are left out."""
    counts = np.float32([600, 0])
    data = imatrix({EXPS: entry(np.full((2, 4), 3), counts), Q: entry(np.zeros((1, 4)), 0)})
    write_imatrix(data, tmp_path / "i.dat", "dat")
    raw = (tmp_path / "i.dat").read_bytes()
    name = EXPS.encode()
    assert raw == (
        struct.pack("<ii", 1, len(name))
        + name
        + struct.pack("<ii8f", 2, 8, *[6] * 4, *[2] * 4)
        + struct.pack("<ii5s", 4, 5, b"a.txt")
    )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["gguf", "dat"]),
)
def test_round_trip_property(tmp_path_factory, n_matrices, n_per_row, seed, form):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 3000, n_matrices) + (np.arange(n_matrices) == 0)
    data = imatrix({Q: entry(rng.exponential(size=(n_matrices, n_per_row)), counts)})
    path = tmp_path_factory.mktemp("imatrix") / "i"
    write_imatrix(data, path, form)
    same(data, read_imatrix(path), rtol=0 if form == "gguf" else 1e-6)


@pytest.mark.parametrize(
    ("counts", "share", "numbers"),
    [
        ([50, 40, 0, 61, 5, 5, 5, 5], 7 / 8, (2,)),
        ([50, 0, 0, 61, 0, 5, 0, 5], 0.5, (1, 2, 4, 6)),
    ],
)
def test_unseen_experts_are_neutral(counts, share, numbers, tmp_path):
    data = imatrix({EXPS: entry(np.full((8, 4), 0.25), counts)})
    write_imatrix(data, tmp_path / "i.gguf")
    read = read_imatrix(tmp_path / "i.gguf")
    importance = read.importance(EXPS)
    for i in range(8):
        assert importance[i].tolist() == [1.0 if i in numbers else 0.25] * 4
    assert read.coverage(EXPS) == share
    assert read.unseen(EXPS) == numbers
    (note,) = coverage_notes(read)
    assert EXPS in note
    assert f"{share:.1%}" in note
    assert note.endswith(", ".join(map(str, numbers)))
    with pytest.raises(ConfigError, match=rf"{EXPS}=IQ2_S \({share:.0%} covered\)"):
        require_covered({EXPS: "IQ2_S"}, read)
    require_covered({EXPS: "IQ2_S"}, read, min_coverage=0.4)
    require_covered({EXPS: "Q2_K"}, read)


def test_all_zero_is_no_data():
    data = imatrix({EXPS: entry(np.zeros((4, 8)), np.zeros(4))})
    assert data.importance(EXPS) is None
    assert data.importance("other") is None
    assert data.coverage(EXPS) == data.coverage("other") == 0
    assert len(uncovered({EXPS: "IQ1_S"}, data, min_coverage=0.0)) == 1


def test_every_offender_is_named_at_once(both):
    layout = {
        **{f"blk.{i}.attn_k.weight": "IQ1_S" for i in range(3)},
        **{Q: "IQ3_XXS", "output.weight": "IQ1_S", "token_embd.weight": "IQ2_XS"},
        "per_layer_token_embd.weight": "IQ2_XXS",
        "blk.0.attn_v.weight": "Q2_K",
    }
    lacking = [u.tensor for u in uncovered(layout, both)]
    assert lacking == [f"blk.{i}.attn_k.weight" for i in range(3)]
    assert len(uncovered(layout, None)) == 4
    assert [u.tensor for u in uncovered(layout, both, q2_k_s=True)][-1] == "blk.0.attn_v.weight"
    with pytest.raises(ConfigError, match=r"4 tensor\(s\).*blk.0.attn_k.*blk.2.attn_k.*attn_q"):
        require_covered(layout, None)


def write_gguf(path, arrays, **kv):
    writer = gguf.GGUFWriter(str(path), "")
    writer.kv_data[0].clear()
    for key, value in {"chunk_count": 1, "chunk_size": 512, **kv}.items():
        if value is not None:
            writer.add_uint32(f"imatrix.{key}", value)
    for name, values in arrays.items():
        writer.add_tensor(name, np.asarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SUMS, COUNTS = np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)


@pytest.mark.parametrize(
    ("arrays", "kv", "reason"),
    [
        ({"a.in_sum2": SUMS}, {}, r"entry a has no \.counts"),
        ({"a.counts": COUNTS}, {}, r"entry a has no \.in_sum2"),
        ({"a.in_sum2": SUMS, "a.counts": COUNTS}, {"chunk_size": None}, "lacks .*chunk_size"),
        ({"a.in_sum2": SUMS.astype(np.float16), "a.counts": COUNTS}, {}, "entry a is not F32"),
        ({"a.in_sum2": SUMS, "a.counts": np.ones((3, 1), np.float32)}, {}, "8 sums for 3 matri"),
        ({"a.in_sum2": -SUMS, "a.counts": COUNTS}, {}, "entry a has negative"),
        ({"a.in_sum2": SUMS * np.float32("nan"), "a.counts": COUNTS}, {}, "a has .* not finite"),
        ({"a.weight": SUMS}, {}, "no importance matrix"),
    ],
)
def test_broken_gguf_form(tmp_path, arrays, kv, reason):
    write_gguf(tmp_path / "i.gguf", arrays, **kv)
    with pytest.raises(InputError, match=reason):
        read_imatrix(tmp_path / "i.gguf")


def test_a_model_is_no_imatrix(tmp_path):
    with pytest.raises(InputError, match="is a GGUF but no importance matrix"):
        read_imatrix(tiny_gguf(tmp_path / "m.gguf", n_layer=1))


def old_entry(name, n_chunks, n_values, data):
    return struct.pack(f"<i{len(name)}sii", len(name), name, n_chunks, n_values) + data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "needs 4 bytes"),
        (b"hello world, this is text", "announces|absurd"),
        (struct.pack("<i", 0), "no entries"),
        (struct.pack("<I", 2**31), "absurd"),
        (struct.pack("<i", 2) + old_entry(b"a", 1, 4, bytes(16)), "entry 2|announces"),
        (struct.pack("<i", 1) + old_entry(b"a", 1, -(2**31), bytes(16)), "length of entry a"),
        (struct.pack("<i", 1) + old_entry(b"a", 1, 2**31 - 1, bytes(16)), r"entry a \(2147483647"),
        (struct.pack("<i", 1) + old_entry(b"a", 1, 0, bytes(16)), "entry a has no values"),
        (struct.pack("<i", 1) + struct.pack("<i", 2**30) + bytes(99), "bytes long"),
        (struct.pack("<i", 2) + old_entry(b"a", 1, 1, bytes(4)) * 2, "entry a occurs twice"),
        (struct.pack("<i", 1) + old_entry(b"a", 1, 1, b"\0\0\xa0\x7f"), "entry a .* not finite"),
    ],
)
def test_broken_old_form(tmp_path, data, reason):
    (tmp_path / "i.dat").write_bytes(data)
    with pytest.raises(InputError, match=reason):
        read_imatrix(tmp_path / "i.dat")


def test_old_form_cut_anywhere(both, tmp_path):
    write_imatrix(both, tmp_path / "i.dat", "dat")
    data = (tmp_path / "i.dat").read_bytes()
    (tmp_path / "i.dat").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=rf"entry {EXPS}"):
        read_imatrix(tmp_path / "i.dat")
    for cut in range(0, len(data) - 14, 97):
        (tmp_path / "i.dat").write_bytes(data[:cut])
        with pytest.raises(InputError):
            read_imatrix(tmp_path / "i.dat")


def test_missing_file_and_target(tmp_path, both):
    with pytest.raises(InputError, match="cannot be read"):
        read_imatrix(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be read"):
        read_imatrix(tmp_path)
    with pytest.raises(StorageError, match="does not exist"):
        write_imatrix(both, tmp_path / "none" / "i.gguf")
    assert not list(tmp_path.iterdir())


class TestMerge:
    small = imatrix({Q: entry([[1, 5, 2, 8]], 5120)}, chunk_count=10, datasets=("task.txt",))
    large = imatrix({Q: entry([[3, 1, 4, 0]], 512000)}, chunk_count=1000, datasets=("big.txt",))

    def test_by_mean_is_not_drowned(self):
        merged = merge_imatrices([(self.small, 0.5), (self.large, 0.5)])
        np.testing.assert_array_equal(merged.importance(Q), [[2, 3, 3, 4]])
        assert merged.datasets == ("task.txt", "big.txt")
        assert (merged.chunk_count, merged.chunk_size) == (1010, 512)

    def test_shares_need_not_add_to_one(self):
        merged = merge_imatrices([(self.small, 3), (self.large, 1)])
        np.testing.assert_allclose(merged.importance(Q), [[1.5, 4, 2.5, 6]], rtol=1e-6)

    def test_by_tokens(self):
        parts = [(self.small, 2.0), (self.large, 1.0)]
        merged = merge_imatrices(parts, weigh="tokens")
        sums = sum(w * i.entries[Q].sums.astype(float) for i, w in parts)
        counts = sum(w * i.entries[Q].counts.astype(float) for i, w in parts)
        np.testing.assert_allclose(merged.importance(Q), sums / counts, rtol=1e-6)

    def test_survives_a_file(self, tmp_path):
        merged = merge_imatrices([(self.small, 0.7), (self.large, 0.3)])
        write_imatrix(merged, tmp_path / "m.gguf")
        assert read_imatrix(tmp_path / "m.gguf").sha256() == merged.sha256()

    def test_expert_seen_by_one_part_only(self):
        a = imatrix({EXPS: entry([[1, 1], [2, 2], [7, 7]], [10, 10, 0])})
        b = imatrix({EXPS: entry([[3, 3], [8, 8], [9, 9]], [30, 0, 0])})
        merged = merge_imatrices([(a, 1), (b, 1)])
        np.testing.assert_allclose(merged.importance(EXPS), [[2, 2], [2, 2], [1, 1]])
        assert merged.unseen(EXPS) == (2,)

    def test_old_format_needs_its_chunk_size_only_by_tokens(self, tmp_path):
        write_imatrix(self.large, tmp_path / "b.dat", "dat")
        unknown = read_imatrix(tmp_path / "b.dat")
        merged = merge_imatrices([(self.small, 1), (unknown, 1)])
        np.testing.assert_allclose(merged.importance(Q), [[2, 3, 3, 4]], rtol=1e-6)
        assert not merged.counts_known
        with pytest.raises(InputError, match=r"give its\s+chunk size"):
            merge_imatrices([(self.small, 1), (unknown, 1)], weigh="tokens")
        known = read_imatrix(tmp_path / "b.dat", chunk_size=512)
        by_tokens = merge_imatrices([(self.small, 1), (known, 1)], weigh="tokens")
        expected = merge_imatrices([(self.small, 1), (self.large, 1)], weigh="tokens")
        same(by_tokens, expected, rtol=1e-6)

    def test_other_model(self):
        other = imatrix({Q: entry([[1] * 6], 100)})
        with pytest.raises(InputError, match=rf"4 and 6 values for {Q}.*cannot be merged"):
            merge_imatrices([(self.small, 1), (other, 1)])

    @pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
    def test_bad_weights(self, weight):
        with pytest.raises(ConfigError, match="weight above 0"):
            merge_imatrices([(self.small, weight)])

    def test_nothing(self):
        with pytest.raises(ConfigError):
            merge_imatrices([])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    return open_model(tiny_gguf(path, n_layer=1, n_expert=4))


class TestCheck:
    def test_fits(self, model, both):
        check_imatrix(both, model)

    def test_tied_embedding_may_be_absent(self, model, both):
        assert model.is_tied
        assert "token_embd.weight" not in both.entries
        check_imatrix(both, model)

    def test_old_format_fits(self, model, both, tmp_path):
        write_imatrix(both, tmp_path / "i.dat", "dat")
        check_imatrix(read_imatrix(tmp_path / "i.dat"), model)

    def test_other_width(self, model):
        data = imatrix({Q: entry(np.ones((1, 320)), 10)})
        with pytest.raises(InputError, match=rf"320 values for {Q}, but moe needs 256"):
            check_imatrix(data, model)

    def test_other_number_of_experts(self, model):
        data = imatrix({EXPS: entry(np.ones((8, 256)), np.ones(8))})
        with pytest.raises(InputError, match="made for another model"):
            check_imatrix(data, model)

    def test_more_layers(self, model, both):
        more = {f"blk.{i}.attn_q.weight": both.entries[Q] for i in range(9)}
        with pytest.raises(InputError, match="8 of 9 entries"):
            check_imatrix(imatrix(more), model)
