import time

import numpy as np
import pytest

from bitwright.allocator.ladders import ladder, load_ladders
from bitwright.allocator.options import build_options
from bitwright.allocator.rules import load_rules
from bitwright.engine.file_plan import predict_size
from bitwright.engine.imatrix import Imatrix, ImatrixEntry
from bitwright.engine.model_file import open_model
from bitwright.engine.quantized_file import Provenance
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.upstream import upstream_layout
from bitwright.errors import BudgetError, ConfigError, InputError
from tests.tiny import split_gguf, tiny_gguf

K = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
ORIGIN = Provenance((("bitwright.version", "0"), ("bitwright.layout_sha256", "0" * 64)))
KINDS = {
    "dense": {},
    "moe": {"n_expert": 4, "n_layer": 1},
    "untied": {"tied": False, "n_layer": 1},
    "odd_rows": {"n_embd": 96, "n_ff": 352, "n_head": 3, "n_kv": 1, "n_layer": 1},
    "alignment": {"alignment": 128, "n_layer": 1},
    "bf16": {"dtype": "BF16", "n_layer": 1},
}


def make(folder, **changes):
    return open_model(tiny_gguf(folder / "tiny-F16.gguf", **changes), allow_requantize=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make(tmp_path_factory.mktemp("options"), n_layer=2)


def covering(model, *, but=(), experts_missing=0):
    entries = {}
    for info in model.tensors:
        if is_quantizable(info, model.arch) and info.name not in but:
            counts = np.full(info.n_matrices, 9, np.float32)
            counts[: experts_missing if info.n_matrices > 1 else 0] = 0
            entries[info.name] = ImatrixEntry(
                np.ones((info.n_matrices, info.n_per_row), np.float32), counts
            )
    return Imatrix(entries, 1, 512, ("x",))


# Ladders


def test_ladders_are_ordered_by_bits_and_unknown_ones_are_refused():
    assert ladder("K") == K
    iq = ladder("IQ")
    assert iq[0] == "IQ2_XXS"
    assert iq[-1] == "Q8_0"
    assert set(load_ladders()) == {"K", "IQ", "IQ1"}
    with pytest.raises(ConfigError, match="K, IQ"):
        ladder("k9")


# Sizes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["K", "IQ", "IQ1"])
def test_sizes_are_additive_for_every_layout(tmp_path, kind, name):
    model = make(tmp_path, **KINDS[kind])
    for origin in (None, ORIGIN):
        options = build_options(model, ladder=ladder(name), assume_imatrix=True, provenance=origin)
        rng = np.random.default_rng(0)
        for _ in range(5):
            types = {n: str(rng.choice(options.offered[n])) for n in options.tensors}
            full = options.complete(types)
            total = options.fixed_bytes + sum(options.option_bytes(n, t) for n, t in types.items())
            assert options.layout_bytes(types) == total == predict_size(model, full, origin)


@pytest.mark.parametrize("keep_split", [True, False])
def test_sizes_are_additive_for_split_models(tmp_path, keep_split):
    path = tiny_gguf(tmp_path / "m.gguf", n_layer=2, alignment=64)
    model = open_model(split_gguf(path, 3)[0])
    options = build_options(model, ladder=K, provenance=ORIGIN, keep_split=keep_split)
    for kind in K:
        types = {n: options.nearest(n, kind) for n in options.tensors}
        full = options.complete(types)
        assert options.layout_bytes(types) == predict_size(
            model, full, ORIGIN, keep_split=keep_split
        )


def test_stock_layouts_are_sized_too(dense):
    options = build_options(dense, ladder=K)
    stock = upstream_layout(dense, "IQ4_XS")
    assert options.layout_bytes(stock) == predict_size(dense, stock, None)


# What is offered


def test_tensors_are_offered_the_ladder_in_the_models_order(dense):
    options = build_options(dense, ladder=("q8_0", "Q3_K", "Q2_K"))
    assert set(options.offered.values()) == {("Q2_K", "Q3_K", "Q8_0")}
    order = [t.name for t in dense.tensors if is_quantizable(t, dense.arch)]
    assert list(options.tensors) == list(options.offered) == order
    assert set(options.fixed) | set(options.tensors) == {t.name for t in dense.tensors}
    assert options.fixed_quantizable == {}


def test_rows_that_blocks_do_not_divide_get_each_replacement_once(tmp_path):  # GG-06
    model = make(tmp_path, **KINDS["odd_rows"])
    options = build_options(model, ladder=K)
    assert options.offered["blk.0.attn_q.weight"] == ("Q4_0", "Q5_0", "Q5_1", "Q8_0")
    replaced = {(s.wanted, s.used) for s in options.substitutions}
    assert replaced == {
        *(("Q2_K", "Q4_0"), ("Q3_K", "Q4_0"), ("Q4_K", "Q5_0")),
        *(("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")),
    }
    assert any("Q3_K" in n and "Q4_0" in n and "3.44 → 4.50 bpw" in n for n in options.notes)
    iq = build_options(model, ladder=("IQ2_XS", "IQ3_S", "IQ4_XS"), assume_imatrix=True)
    assert iq.offered["blk.0.attn_q.weight"] == ("IQ4_NL",)


def test_tensors_that_are_never_quantized_are_counted_but_not_offered(tmp_path):  # GG-08
    plain = {
        "blk.0.ssm_conv1d.weight": (np.ones((256, 4)), "F32"),
        "blk.0.ssm_a": np.ones((256, 4)),
        "position_embd.weight": (np.ones((4, 256)), "F16"),
    }
    model = make(tmp_path, n_layer=1, n_expert=4, extra_tensors=plain)
    options = build_options(model, ladder=K)
    for name in (*plain, "blk.0.ffn_gate_inp.weight", "blk.0.attn_norm.weight"):
        assert options.fixed[name] == model.tensor(name).type
        assert options.reasons[name] == "never quantized"
    full = options.complete(dict.fromkeys(options.tensors, "Q2_K"))
    assert not set(full) & set(plain)
    for pin in ("blk.0.ffn_gate_inp.weight", "*_norm.weight"):
        with pytest.raises(ConfigError, match="never quantized"):
            build_options(model, ladder=K, pins={pin: "Q4_K"})


def test_tiny_tensors_go_to_f32(tmp_path):
    small = {"blk.0.small.weight": (np.ones((8, 256)), "F16")}
    model = make(tmp_path, n_layer=1, extra_tensors=small)
    options = build_options(model, ladder=K)
    assert options.fixed["blk.0.small.weight"] == "F32"
    assert options.reasons["blk.0.small.weight"] == "tiny"
    assert "blk.0.attn_k.weight" in options.tensors


def test_a_tied_head_is_counted_once_and_is_safe_until_measured(dense):  # GG-10
    options = build_options(dense, ladder=K)
    assert any("tied" in note for note in options.notes)
    assert "token_embd.weight" in options.tensors
    measured = [n for n in options.tensors if n != "token_embd.weight"]
    later = build_options(dense, ladder=K, measured=measured)
    assert later.fixed["token_embd.weight"] == "Q4_K"
    assert build_options(dense, ladder=K, measured=options.tensors).offered == options.offered


def test_tensors_that_are_not_executed_get_a_safe_type(tmp_path):  # GG-14
    head = {"blk.2.nextn.eh_proj.weight": (np.ones((256, 512)), "F16")}
    model = make(tmp_path, n_layer=2, extra_tensors=head)
    imatrix = covering(model, but=head)
    name = next(iter(head))
    measured = [t.name for t in model.tensors if t.name != name]
    options = build_options(model, ladder=("IQ2_XS", "Q4_K"), imatrix=imatrix, measured=measured)
    assert options.fixed[name] == "Q4_K"
    assert any(name in note and "not executed" in note for note in options.notes)
    forced = build_options(
        model, ladder=("IQ2_XS",), imatrix=imatrix, measured=measured, safe_type="Q6_K"
    )
    assert forced.fixed[name] == "Q6_K"


def test_per_layer_embeddings_are_shown_and_safe_unless_measured(tmp_path):  # GG-15
    table = {"per_layer_token_embd.weight": (np.ones((4096, 256)), "F16")}
    model = make(tmp_path, n_layer=1, extra_tensors=table)
    name = next(iter(table))
    others = [t.name for t in model.tensors if t.name != name]
    options = build_options(
        model, ladder=("IQ2_XXS", "Q2_K"), imatrix=covering(model, but=table), measured=others
    )
    assert options.fixed[name] == "Q4_K"
    assert any("per-layer embedding" in note and "%" in note for note in options.notes)
    asked = build_options(model, ladder=K, measured=others, pins={name: "Q2_K"})
    assert asked.fixed[name] == "Q2_K"


def test_types_that_need_importance_are_offered_only_where_it_is(tmp_path):  # IM-01, IM-09
    model = make(tmp_path, n_layer=1, n_expert=4, tied=False)
    steps = ("IQ2_XXS", "IQ3_XXS", "Q2_K")
    lacking = "blk.0.attn_q.weight"
    options = build_options(model, ladder=steps, imatrix=covering(model, but=[lacking]))
    assert options.offered[lacking] == ("Q2_K",)
    assert options.offered["blk.0.attn_k.weight"] == ("IQ2_XXS", "Q2_K", "IQ3_XXS")
    partly = build_options(model, ladder=steps, imatrix=covering(model, experts_missing=1))
    assert partly.offered["blk.0.ffn_up_exps.weight"] == ("Q2_K",)
    assert any("blk.0.ffn_up_exps.weight" in note for note in partly.notes)
    without = build_options(model, ladder=steps)
    assert without.offered[lacking] == ("Q2_K",)
    assert len(without.offered["token_embd.weight"]) == 3  # exempt, as the output
    assumed = build_options(model, ladder=steps, assume_imatrix=True)
    assert len(assumed.offered[lacking]) == 3
    nothing_left = build_options(model, ladder=("IQ2_XXS",))
    assert nothing_left.offered[lacking] == ("Q4_K",)
    with pytest.raises(ConfigError, match=r"2 tensor\(s\).*attn_k.*attn_q"):
        build_options(model, ladder=K, pins={"blk.0.attn_[qk].weight": "IQ2_XS"})


def test_quantized_input_is_never_offered_more_bits_than_it_has(tmp_path):
    model = make(tmp_path, n_layer=1, dtype="Q5_0")
    options = build_options(model, ladder=K)
    assert set(options.offered.values()) == {("Q2_K", "Q3_K", "Q4_K", "Q5_0")}


# Pins


def test_pins_match_by_name_or_glob_the_last_one_holds_and_counts_are_noted(dense):  # QZ-03
    pins = {"blk.*.attn_v.weight": "q6_K", "blk.1.*": "Q5_K", "output*": "Q8_0"}
    pins.pop("output*")
    options = build_options(dense, ladder=K, pins=pins)
    assert options.fixed["blk.0.attn_v.weight"] == "Q6_K"
    assert options.fixed["blk.1.attn_v.weight"] == "Q5_K"
    assert options.fixed["blk.1.attn_norm.weight"] == "F32"
    assert "matches 2 tensor(s)" in options.notes[0]
    assert "overrides the earlier pin(s) 'blk.*.attn_v.weight'" in options.notes[1]
    other = build_options(dense, ladder=K, pins=dict(reversed(pins.items())))
    assert other.fixed["blk.1.attn_v.weight"] == "Q6_K"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"output.weight": "Q6_K"}, "matches no tensor"),
        ({"blk.9.*": "Q6_K"}, "matches no tensor"),
        ({"attn_q": "Q6_K"}, "matches no tensor"),
        ({"*.attn_q.weight": "Q9"}, "not a tensor type"),
        ({"*.attn_q.weight": "Q8_K"}, "cannot pack"),
    ],
)
def test_pins_that_cannot_hold_are_refused(dense, pins, message):
    with pytest.raises(ConfigError, match=message):
        build_options(dense, ladder=K, pins=pins)


def test_a_pin_that_does_not_fit_the_rows_says_what_does(tmp_path):
    model = make(tmp_path, **KINDS["odd_rows"])
    with pytest.raises(ConfigError, match=r"rows of 96.*these fit: .*Q4_0.*F16"):
        build_options(model, ladder=K, pins={"*.attn_q.weight": "Q4_K"})


def test_a_ladder_without_types_or_with_unknown_ones_is_refused(dense):
    with pytest.raises(ConfigError, match="no types"):
        build_options(dense, ladder=())
    with pytest.raises(InputError, match="Q9"):
        build_options(dense, ladder=("Q9",))


# Budgets at the edges: AL-01


def test_a_budget_under_the_floor_is_refused_with_the_floor(dense):
    options = build_options(dense, ladder=K, pins={"token_embd.weight": "F16"})
    least = options.smallest_bytes
    assert least == predict_size(dense, options.smallest_layout(), None)
    began = time.perf_counter()
    with pytest.raises(BudgetError, match=rf"{least:,} bytes .*bpw.*token_embd\.weight=F16"):
        options.require_feasible(least - 1)
    assert time.perf_counter() - began < 1
    options.require_feasible(least)


def test_notes_at_the_edges(dense):
    options = build_options(dense, ladder=K)
    least, most = options.smallest_bytes, options.largest_bytes
    assert "no freedom" in options.freedom_notes(least)[0]
    assert "no freedom" in options.freedom_notes(least + 1)[0]
    assert options.freedom_notes((least + most) // 2) == ()
    assert "0 bytes of the budget stay unused" in options.freedom_notes(most)[0]
    assert "77 bytes of the budget stay unused" in options.freedom_notes(most + 77)[0]


# The content files


@pytest.mark.parametrize(
    ("folder_file", "text", "load", "message"),
    [
        ("ladders", "schema = 1\n[ladders.A]\ntypes = ['Q9']", load_ladders, "not a tensor type"),
        ("ladders", "schema = 1\n[ladders.A]\ntypes = ['Q8_K']", load_ladders, "cannot pack"),
        ("ladders", "schema = 1\n[ladders.A]\ntypes = []", load_ladders, "at least 1"),
        ("ladders", "schema = 1\n[ladders.A]\ntype = ['Q2_K']", load_ladders, "types|type"),
        ("ladders", "schema = ", load_ladders, "not valid TOML"),
        ("names", "schema = 1\n[shares]\nS = 2", load_rules, r"shares\.S"),
        ("names", "schema = 2", load_rules, "names.toml"),
    ],
)
def test_broken_content_is_refused(tmp_path, monkeypatch, folder_file, text, load, message):
    (tmp_path / f"{folder_file}.toml").write_text(text)
    monkeypatch.setattr("bitwright.content.content_dir", lambda folder: tmp_path)
    with pytest.raises(ConfigError, match=message):
        load()


def test_the_rules_are_those_that_names_promise():
    rules = load_rules()
    assert (rules.shares.S, rules.shares.M, rules.shares.L) == (0.9, 0.7, 0.5)
    assert rules.unmeasured["other"] == "Q4_K"
