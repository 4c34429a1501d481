import re
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.allocator.layout import (
    Layout,
    anchored_rule,
    format_layout,
    layout_sha256,
    read_layout,
    write_layout,
)
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import PACKABLE
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import InputError
from tests.tiny import tiny_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("layout") / "m-F16.gguf"
    odd = {
        "blk.0.Odd name=x.weight": (np.ones((2, 256)), "F16"),
        "blk.1.ffn_odd.weight": (np.ones((4, 96)), "F16"),
    }
    return open_model(tiny_gguf(path, n_layer=12, n_ff=256, tied=False, extra_tensors=odd))


def quantizable(model):
    return [t.name for t in model.tensors if is_quantizable(t, model.arch)]


def rules(tmp_path, text):
    path = tmp_path / "rules.txt"
    path.write_text(text)
    return path


def test_the_file_has_one_anchored_escaped_rule_per_tensor():
    layout = Layout({"blk.10.attn_q.weight": "Q3_K", "blk.2.attn_q.weight": "q4_K"})
    assert format_layout(layout) == (
        "^blk\\.2\\.attn_q\\.weight$=Q4_K\n^blk\\.10\\.attn_q\\.weight$=Q3_K\n"
    )


def test_write_then_read_gives_the_same_layout(model, tmp_path):
    types = {n: ("Q3_K", "Q4_K", "IQ4_NL")[i % 3] for i, n in enumerate(quantizable(model))}
    types["blk.1.ffn_odd.weight"] = "Q5_0"
    path = tmp_path / "layout.txt"
    write_layout(Layout(types), path)
    found = read_layout(path, model)
    assert found.types == types
    assert found.notes == ()
    assert layout_sha256(found) == layout_sha256(Layout(MappingProxyType(types)))


@given(st.text(st.characters(codec="utf-8", min_codepoint=33), min_size=1, max_size=20))
def test_a_rule_survives_what_llama_quantize_does_to_it(name):
    rule = anchored_rule(name, "Q3_K")
    assert rule.split() == [rule]
    pattern, _, kind = rule.partition("=")
    assert kind == "Q3_K"
    assert re.search(pattern.lower().encode(), name.encode())
    for other in (name + "x", "x" + name, name.swapcase()):
        assert other == name or not re.search(pattern.lower().encode(), other.encode())


def test_the_hash_ignores_order_and_notes_and_sees_types():
    one = Layout({"a.weight": "Q3_K", "b.weight": "Q4_K"})
    same = Layout({"b.weight": "Q4_K", "a.weight": "Q3_K"}, notes=("x",))
    other = Layout({"b.weight": "Q3_K", "a.weight": "Q3_K"})
    assert layout_sha256(one) == layout_sha256(same) != layout_sha256(other)
    assert len(layout_sha256(one)) == 64


def test_the_first_rule_found_in_a_name_holds_and_overlaps_are_noted(model, tmp_path):
    # QZ-03: unanchored output.weight takes attn_output too, blk.1 takes blk.10 and blk.11.
    text = "output.weight=q6_K blk\\.10\\.attn_output\\.weight=q4_K\nblk.1=q8_0\n"
    found = read_layout(rules(tmp_path, text), model)
    assert found.types["output.weight"] == "Q6_K"
    assert found.types["blk.10.attn_output.weight"] == "Q6_K"
    assert found.types["blk.10.attn_q.weight"] == found.types["blk.1.attn_q.weight"] == "Q8_0"
    assert "blk.2.attn_q.weight" not in found.types
    overlaps = [note for note in found.notes if "no effect" in note]
    assert len(overlaps) == 2
    assert any("stay as they are" in note for note in found.notes)


@pytest.mark.parametrize("first", ["q3_K", "q5_K"])
def test_two_rules_on_one_tensor_in_both_orders(model, tmp_path, first):
    second = {"q3_K": "q5_K", "q5_K": "q3_K"}[first]
    found = read_layout(rules(tmp_path, f"blk.3.attn_q={first} attn_q={second}"), model)
    assert found.types["blk.3.attn_q.weight"] == first.upper()
    assert found.types["blk.4.attn_q.weight"] == second.upper()


def test_patterns_are_read_in_lower_case(model, tmp_path):
    assert len(read_layout(rules(tmp_path, "ATTN_Q=Q3_K"), model).types) == 12


def test_rows_that_a_type_does_not_fit_get_the_replacement_and_a_note(model, tmp_path):
    found = read_layout(rules(tmp_path, "ffn_odd=Q3_K"), model)
    assert found.types == {"blk.1.ffn_odd.weight": "Q4_0"}
    assert any("Q4_0" in note and "96" in note for note in found.notes)


def test_rules_for_tensors_that_are_never_quantized(model, tmp_path):
    with pytest.raises(InputError, match="never quantized"):
        read_layout(rules(tmp_path, "attn_norm=Q3_K"), model)
    stays = read_layout(rules(tmp_path, "attn_norm=F32 attn_q=Q3_K"), model)
    assert set(stays.types.values()) == {"Q3_K"}
    mixed = read_layout(rules(tmp_path, "blk=Q3_K"), model)
    assert "blk.0.attn_norm.weight" not in mixed.types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rules"),
        ("# a comment", "no rule"),
        ("attn_q", "no rule"),
        ("=q3_K", "no rule"),
        ("attn_q=", "no rule"),
        ("attn_q=q9", "not a tensor type"),
        ("attn_q=q8_K", "cannot pack"),
        ("attn_(q=q3_K", "no regular expression"),
        ("(?i)attn_q=q3_K", "does not know"),
        ("attn_zzz=q3_K", "matches no tensor"),
        ("^blk\\.99\\.attn_q\\.weight$=q3_K", "matches no tensor"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(model, tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_layout(rules(tmp_path, text), model)


def test_files_that_are_no_layouts_are_refused(model, tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_layout(tmp_path / "missing.txt", model)
    with pytest.raises(InputError, match="cannot be read"):
        read_layout(tmp_path, model)
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="not text"):
        read_layout(binary, model)


def test_every_type_that_can_be_packed_can_be_written(model, tmp_path):
    for kind in sorted(PACKABLE):
        path = tmp_path / f"{kind}.txt"
        write_layout(Layout({"output.weight": kind}), path)
        assert read_layout(path, model).types == {"output.weight": kind}
