import os
import random
import re
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from bitwright.engine.gguf_file import padded, parse_gguf, read_gguf
from bitwright.engine.gguf_values import KvEntry
from bitwright.errors import InputError
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "toy.gguf", n_layer=1, dtype="BF16")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(n_tensors: int, n_kv: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_kv) + body


def table_line(name: bytes, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", type_id, offset)


def refusal(data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        parse_gguf(data, Path("toy.gguf"))
    message = str(caught.value)
    assert message.startswith("toy.gguf") or "type id" in message
    assert "\n" not in message
    return message


def test_agrees_with_the_gguf_package(model):
    mine, theirs = read_gguf(model), gguf.GGUFReader(str(model))
    assert [t.name for t in mine.tensors] == [t.name for t in theirs.tensors]
    for a, b in zip(mine.tensors, theirs.tensors, strict=True):
        assert a.type == b.tensor_type.name
        assert a.shape == tuple(int(n) for n in b.shape)
        assert (a.offset, a.size_bytes) == (b.data_offset, b.n_bytes)
        assert (a.n_elements, a.n_per_row) == (int(b.n_elements), int(b.shape[0]))
    for key, entry in mine.kv.items():
        expected = theirs.fields[key].contents()
        assert entry.value == (tuple(expected) if isinstance(expected, list) else expected)
    assert mine.alignment == theirs.alignment
    assert mine.data_offset == theirs.data_offset
    assert mine.size_bytes == model.stat().st_size


def test_metadata_bytes_are_kept_verbatim(model):
    whole = model.read_bytes()
    joined = b"".join(text(e.key.encode()) + e.raw for e in read_gguf(model).kv.values())
    assert whole[24 : 24 + len(joined)] == joined


def test_shapes_of_experts(tmp_path):
    path = tiny_gguf(tmp_path / "moe.gguf", n_layer=1, n_expert=4)
    experts = {t.name: t for t in read_gguf(path).tensors}["blk.0.ffn_down_exps.weight"]
    assert (experts.n_per_row, experts.n_rows, experts.n_matrices) == (512, 1024, 4)


def test_custom_alignment(tmp_path):
    file = read_gguf(tiny_gguf(tmp_path / "a.gguf", n_layer=1, alignment=256))
    assert file.alignment == 256
    assert all(t.offset % 256 == 0 for t in file.tensors)


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda size, data: size - 1, r"cut short: tensor output_norm.weight ends"),
        (lambda size, data: data + 5000, r"cut short: tensor token_embd.weight ends at byte"),
        (lambda size, data: data - 200, r"needs \d+ bytes .* but only \d+ are left|announces"),
        (lambda size, data: 24, r"announces \d+ metadata entries"),
        (lambda size, data: 9, "the number of tensors needs 8 bytes"),
        (lambda size, data: 3, "not a GGUF file"),
        (lambda size, data: 0, r"is empty \(0 bytes\)"),
    ],
)
def test_partial_downloads(model, tmp_path, keep, reason):
    file = read_gguf(model)
    path = tmp_path / "part.gguf"
    end = file.tensors[-1].offset + file.tensors[-1].size_bytes
    size = keep(end, file.data_offset)
    path.write_bytes(model.read_bytes()[:size])
    with pytest.raises(InputError, match=reason) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    if "cut short: tensor" in str(caught.value):
        assert f"needs {end} bytes, but it has {size}" in str(caught.value)


def test_missing_last_padding_is_no_fault(model, tmp_path):
    file = read_gguf(model)
    end = file.tensors[-1].offset + file.tensors[-1].size_bytes
    path = tmp_path / "unpadded.gguf"
    path.write_bytes(model.read_bytes()[:end])
    assert len(read_gguf(path).tensors) == len(file.tensors)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GGML" + bytes(400), "is not a GGUF file: .*begins with b'GGML"),
        (header(0, 0, version=1), "version 1 is not supported"),
        (header(0, 0, version=99), "version 99 is not supported"),
        (header(0, 0, version=0), "version 0 is not supported"),
        (b"GGUF\0\0\0\3" + bytes([0, 0, 0, 0, 255, 255, 255, 255]) * 2, "big-endian file"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64,
            "Git LFS pointer: the model was not downloaded",
        ),
        (b"\n<!DOCTYPE html><html><title>401</title>", "an HTML page"),
        (b"<html><body>not found</body>", "an HTML page"),
        (b"PK\x03\x04" + bytes(100), "PyTorch"),
        (struct.pack("<Q", 80) + b'{"__metadata__":{}}', "safetensors"),
    ],
)
def test_foreign_files(data, reason):
    started = time.process_time()
    assert re.search(reason, refusal(data))
    assert time.process_time() - started < 1


def test_what_is_no_file(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="is a folder"):
        read_gguf(tmp_path)
    with pytest.raises(InputError, match="too long"):
        read_gguf(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(InputError, match="not a plain file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_unknown_type_id():
    line = table_line(b"blk.0.x.weight", (32,), 99, 0)
    message = refusal(header(1, 0, line + bytes(200)))
    assert "tensor blk.0.x.weight has type id 99, unknown to this version" in message


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([(b"a", (8,), 0, 0), (b"a", (8,), 0, 32)], "tensor a occurs twice"),
        ([(b"a", (64,), 0, 0), (b"b", (8,), 0, 32)], "tensor b overlaps or leaves a gap"),
        ([(b"a", (8,), 0, 0), (b"b", (8,), 0, 64)], "tensor b overlaps or leaves a gap"),
        ([(b"a", (8,), 0, 0), (b"b", (8,), 0, 33)], "tensor b is misaligned"),
        ([(b"a", (8,), 0, 2**63)], "overlaps or leaves a gap"),
        ([(b"a", (33,), 2, 0)], "rows of 33, no multiple of 32"),
        ([(b"a", (0, 4), 0, 0)], "impossible shape"),
        ([(b"a", (2**33, 2**33), 0, 0)], "impossible shape"),
        ([(b"a", (2**40,), 0, 0)], "cut short: tensor a"),
        ([(b"a", (1,) * 5, 0, 0)], "5 dimensions"),
        ([(b"x" * 64, (8,), 0, 0)], "64 bytes long"),
        ([(b"", (8,), 0, 0)], "0 bytes long"),
        ([(b"a\0b", (8,), 0, 0)], "no valid text"),
        ([(b"a\x1b[2J", (8,), 0, 0)], "no valid text"),
        ([(b"\xff\xfe", (8,), 0, 0)], "no valid text"),
    ],
)
def test_broken_tensor_tables(lines, reason):
    body = b"".join(table_line(*line) for line in lines)
    assert re.search(reason, refusal(header(len(lines), 0, body + bytes(300))))


@pytest.mark.parametrize("value", [0, 24, 2**31])
def test_bad_alignment(value):
    kv = text(b"general.alignment") + struct.pack("<II", 4, value)
    assert "power of two" in refusal(header(0, 1, kv))


def test_duplicate_key():
    kv = text(b"a.b") + struct.pack("<II", 4, 1)
    assert "a.b occurs twice" in refusal(header(0, 2, kv * 2))


def array(key: bytes, item_type: int, count: int, body: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", 9, item_type, count) + body


BOMBS = {
    "n_kv": header(0, 2**60, bytes(136)),
    "n_tensors": header(2**62, 0, bytes(136)),
    "both": header(2**63, 2**63, bytes(136)),
    "string": header(0, 1, text(b"k") + struct.pack("<IQ", 8, 2**63) + bytes(99)),
    "array of strings": header(0, 1, array(b"k", 8, 2**40, bytes(99))),
    "array of numbers": header(0, 1, array(b"k", 12, 2**61, bytes(99))),
    "array of bytes": header(0, 1, array(b"k", 0, 2**30, bytes(99))),
    "string in array": header(0, 1, array(b"k", 8, 2, struct.pack("<Q", 2**64 - 8) + bytes(99))),
    "nested": header(0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10000),
    "key": header(0, 1, struct.pack("<Q", 2**32) + bytes(99)),
    "tensor name": header(1, 0, struct.pack("<Q", 2**40) + bytes(99)),
    "dimensions": header(1, 0, text(b"a") + struct.pack("<I", 2**32 - 1) + bytes(99)),
    "value type": header(0, 1, text(b"k") + struct.pack("<I", 13) + bytes(99)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_header_bombs(name):
    started = time.process_time()
    refusal(BOMBS[name])
    assert time.process_time() - started < 0.5


def test_bombs_with_a_sparse_terabyte_behind_them(tmp_path):
    """The bytes that counts are compared with may be there: the header limit holds instead."""
    names = ("n_kv", "string", "array of strings", "array of bytes", "n_tensors")
    for name in names:
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(BOMBS[name])
        os.truncate(path, 1 << 40)
    many_empty = tmp_path / "empty strings.gguf"
    many_empty.write_bytes(header(0, 1, array(b"k", 8, 4_000_000)))
    os.truncate(many_empty, 1 << 40)
    code = """
import re, sys, time
from pathlib import Path
from bitwright.engine.gguf_file import read_gguf
from bitwright.errors import InputError
for path in sys.argv[1:]:
    started = time.process_time()
    try:
        read_gguf(Path(path))
        print(path, "was accepted")
    except InputError:
        pass
    seconds = time.process_time() - started
    if seconds > 2:
        print(path, seconds)
# Not ru_maxrss, which a child takes over from the process that started it.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) // 1024)
"""
    paths = [str(tmp_path / f"{name}.gguf") for name in names]
    ran = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
    )
    peak_mib = int(ran.stdout.strip())
    assert peak_mib < 200
    started = time.process_time()
    read_gguf(many_empty)
    assert time.process_time() - started < 2


def test_mutated_headers_are_refused_or_read(model):
    """Nothing but InputError, whatever the bytes say."""
    data = model.read_bytes()
    head_bytes = read_gguf(model).data_offset
    rng = random.Random(1)
    accepted = 0
    edges = (0, 1, 0x7F, 0x80, 0xFF)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(head_bytes)
            width = rng.choice((1, 4, 8))
            broken[at : at + width] = bytes(rng.choice(edges) for _ in range(width))
        if rng.random() < 0.1:
            del broken[rng.randrange(head_bytes) :]
        try:
            file = parse_gguf(bytes(broken), Path("fuzz.gguf"))
        except InputError:
            continue
        accepted += 1
        for entry in file.kv.values():
            assert isinstance(entry, KvEntry)
            entry.value  # noqa: B018 - decoding must not fail either
    assert 0 < accepted < 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_a_large_vocabulary_opens_quickly_and_decodes_on_demand(tmp_path):
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [f"token{i}é" for i in range(150_000)]
    writer.add_token_list(tokens)
    writer.add_token_merges([f"to {i}" for i in range(150_000)])
    writer.add_token_scores(np.arange(150_000, dtype=np.float32).tolist())
    writer.add_tensor("x.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    seconds = []
    for _ in range(3):
        started = time.process_time()
        file = read_gguf(path)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.2
    entry = file.kv["tokenizer.ggml.tokens"]
    assert entry.n_items == 150_000
    assert entry.value == tuple(tokens)


def test_padded():
    assert [padded(n, 32) for n in (0, 1, 32, 33)] == [0, 32, 32, 64]
