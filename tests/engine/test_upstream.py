"""Upstream's own layout and file."""

import re

import numpy as np
import pytest

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.model_file import open_model
from bitwright.engine.upstream import (
    FTYPES,
    anchored,
    default_type,
    ftype_name,
    parse_dry_run,
    upstream_layout,
    upstream_quantize,
)
from bitwright.errors import ConfigError, EngineError
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return open_model(tiny_gguf(tmp_path_factory.mktemp("up") / "t.gguf", tied=False))


@pytest.mark.parametrize("ftype", sorted(FTYPES))
def test_layout_of_every_ftype_names_every_tensor(tiny, ftype):
    layout = upstream_layout(tiny, ftype, has_imatrix=True)
    assert list(layout) == [info.name for info in tiny.tensors]
    assert layout["output_norm.weight"] == "F32"
    assert default_type(ftype) in layout.values()


def test_an_imatrix_changes_the_choice(tiny):
    with_data = upstream_layout(tiny, "IQ3_XXS", has_imatrix=True)
    assert with_data != upstream_layout(tiny, "IQ3_XXS", has_imatrix=False)
    assert with_data != upstream_layout(tiny, "IQ3_XXS")


def test_narrow_rows_fall_back(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "n.gguf", n_embd=64, n_ff=96))
    assert upstream_layout(model, "Q3_K_S")["blk.0.ffn_down.weight"] == "Q4_0"


def test_written_file_has_the_layout(tmp_path, tiny):
    upstream_quantize(tiny, tmp_path / "q.gguf", "Q3_K_M", None)
    types = {t.name: t.type for t in read_gguf(tmp_path / "q.gguf").tensors}
    assert types == upstream_layout(tiny, "Q3_K_M")
    assert list(tmp_path.iterdir()) == [tmp_path / "q.gguf"]


def test_own_layout_is_followed_exactly(tmp_path, tiny):
    layout = upstream_layout(tiny, "Q4_K_M")
    names = [name for name, kind in layout.items() if kind != "F32"]
    mixed = {name: ("Q2_K", "Q6_K", "F16")[i % 3] for i, name in enumerate(names)}
    upstream_quantize(tiny, tmp_path / "q.gguf", "Q4_K_M", None, mixed)
    types = {t.name: t.type for t in read_gguf(tmp_path / "q.gguf").tensors}
    assert types == layout | mixed


def test_a_layout_with_a_float_ftype_is_refused(tmp_path, tiny):
    with pytest.raises(ConfigError, match="ignores a layout"):
        upstream_quantize(tiny, tmp_path / "q.gguf", "F16", None, {"output.weight": "Q4_K"})


def test_failure_says_why_and_leaves_nothing(tmp_path, tiny):
    with pytest.raises(EngineError, match="imatrix"):
        upstream_quantize(tiny, tmp_path / "q.gguf", "IQ2_XXS", None)
    assert list(tmp_path.iterdir()) == []


def test_requantizing_a_quantized_file(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "t.gguf", dtype="Q8_0"), allow_requantize=True)
    upstream_quantize(model, tmp_path / "q.gguf", "Q4_K_S", None)
    again = open_model(tmp_path / "q.gguf", allow_requantize=True)
    assert again.reference_type == "Q4_K"


def test_names():
    assert ftype_name(" q3_k ") == "Q3_K_M"
    assert [default_type(n) for n in ("Q3_K_S", "Q2_K", "IQ3_M", "IQ4_XS", "Q8_0", "F16")] == [
        *("Q3_K", "Q2_K", "IQ3_S", "IQ4_XS", "Q8_0", "F16")
    ]
    with pytest.raises(ConfigError, match=r"'Q9' is not a stock type.*IQ2_XXS"):
        ftype_name("Q9")


def test_anchored_patterns_match_one_name():
    name = "blk.1.attn_q.weight"
    assert re.search(anchored(name), name)
    assert not re.search(anchored(name), "blk.11.attn_q.weight")
    assert not re.search(anchored(name), "blk.1xattn_q.weight")


def test_log_parser_on_a_long_name_and_a_repetition():
    line = "[   1/  47] a.very_long_tensor_name_that_fills_the_column.weight - [ 256, 2], "
    line += "type =    f16, size =     1.00 MiB ->     0.29 MiB (q4_K)\n"
    assert parse_dry_run("noise\n" + line) == {
        "a.very_long_tensor_name_that_fills_the_column.weight": "Q4_K"
    }
    with pytest.raises(EngineError, match="twice"):
        parse_dry_run(line + line)


def test_shards_are_read_as_one_model(tmp_path, tiny):
    from tests.tiny import split_gguf

    path = tiny_gguf(tmp_path / "t.gguf", tied=False)
    shards = split_gguf(path, 2)
    upstream_quantize(open_model(shards[1]), tmp_path / "q.gguf", "Q4_0", None)
    whole = open_model(tmp_path / "q.gguf", allow_requantize=True)
    upstream_quantize(tiny, tmp_path / "w.gguf", "Q4_0", None)
    other = open_model(tmp_path / "w.gguf", allow_requantize=True)
    for info in whole.tensors:
        assert np.array_equal(whole.raw(info.name), other.raw(info.name))
