import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from bitwright.allocator.candidates import between, predict, propose
from bitwright.allocator.options import build_options
from bitwright.damage.pricing import DamageTable
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.model_file import open_model
from bitwright.engine.tensors import role
from bitwright.engine.upstream import upstream_layout
from bitwright.errors import BudgetError, ConfigError
from tests.tiny import tiny_gguf

LADDER = ("Q2_K", "Q4_K", "Q8_0")
CATEGORIES = ("chat", "code", "math")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(tiny_gguf(tmp_path_factory.mktemp("candidates") / "m-F16.gguf", n_layer=1))


@pytest.fixture(scope="module")
def options(model):
    return build_options(model, ladder=LADDER)


def table(options, exponent=1.0, seed=0):
    """Damage that falls fourfold per bit from a random probe, per tensor and category."""
    rng = np.random.default_rng(seed)
    probe = rng.lognormal(-4, 1.5, (len(options.tensors), 1, len(CATEGORIES)))
    types = tuple(sorted({t for o in options.offered.values() for t in o}, key=bits))
    ratio = np.array([4.0 ** (TYPES["Q2_K"].bpw - TYPES[t].bpw) for t in types]) ** exponent
    nats = probe * ratio[None, :, None]
    for i, name in enumerate(options.tensors):
        nats[i, [t not in options.offered[name] for t in types]] = np.nan
    measured = np.zeros(nats.shape[:2], bool)
    return DamageTable(options.tensors, types, CATEGORIES, nats, nats / 10, measured)


def bits(name):
    return TYPES[name].bpw


def tables(options):
    return {e: table(options, e) for e in (0.75, 1.0, 1.25)}


def middle(options, part=0.4):
    return int(options.smallest_bytes + part * (options.largest_bytes - options.smallest_bytes))


def test_candidates_fit_the_budget_and_are_whole_and_distinct(options):
    budget = middle(options)
    found = propose(options, tables(options), budget, "code")
    assert found[0].label == "target"
    assert len({c.label for c in found}) == len(found)
    assert len({tuple(c.types.items()) for c in found}) == len(found)
    for one in found:
        assert one.size_bytes == options.layout_bytes(one.types) <= budget
        assert set(one.types) == set(options.sizes.alignment)
        assert set(one.predicted) == set(CATEGORIES)
        assert one.how
    assert found == propose(options, tables(options), budget, "code")


def test_the_target_candidate_is_the_optimum_of_brute_force(options):
    budget, priced = middle(options), table(options)
    best = math.inf
    for choice in product(LADDER, repeat=len(options.tensors)):
        types = dict(zip(options.tensors, choice, strict=True))
        if sum(options.option_bytes(*i) for i in types.items()) <= budget - options.fixed_bytes:
            best = min(best, predict(priced, types)["code"])
    found = propose(options, {1.0: priced}, budget, "code")
    assert found[0].predicted["code"] == pytest.approx(best, rel=1e-9)


def test_no_control_is_predicted_better_than_the_target_candidate(options):
    for part in (0.05, 0.3, 0.6, 0.9):
        found = propose(options, {1.0: table(options)}, middle(options, part), "code")
        assert all(c.predicted["code"] >= found[0].predicted["code"] - 1e-12 for c in found)


def test_the_role_rule_gives_each_role_one_type_and_uniform_all(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "m-F16.gguf", n_layer=4))
    options = build_options(model, ladder=LADDER)
    found = {c.label: c for c in propose(options, tables(options), middle(options), "code")}
    by_role = {}
    for name, kind in found["role-rule"].types.items():
        by_role.setdefault(role(name), set()).add(kind)
    assert all(len(kinds) == 1 for kinds in by_role.values())
    assert len({next(iter(kinds)) for kinds in by_role.values()}) > 1
    assert len(set(found["uniform"].types.values())) == 1
    assert found["uniform"].predicted["code"] >= found["role-rule"].predicted["code"]


def test_identical_layouts_keep_their_first_label(options):
    found = propose(options, tables(options), options.smallest_bytes, "code")
    assert [c.label for c in found] == ["target"]
    assert found[0].types == options.smallest_layout()
    found = propose(options, tables(options), options.largest_bytes + 5, "code")
    assert [c.label for c in found] == ["target"]
    assert set(found[0].types.values()) == {"Q8_0"}


def test_more_budget_never_raises_the_predicted_damage(options):
    priced = {1.0: table(options)}
    sizes = np.linspace(options.smallest_bytes, options.largest_bytes, 12).astype(int)
    damages = [propose(options, priced, int(s), "code")[0].predicted["code"] for s in sizes]
    assert all(b <= a + 1e-12 for a, b in pairwise(damages))


def test_pins_and_fixed_tensors_stay(model):
    pinned = build_options(model, ladder=LADDER, pins={"blk.0.ffn_down.weight": "Q5_K"})
    found = propose(pinned, tables(pinned), middle(pinned), "code")
    assert {c.types["blk.0.ffn_down.weight"] for c in found} == {"Q5_K"}


def test_everything_pinned_leaves_one_candidate(model):
    pinned = build_options(model, ladder=LADDER, pins={"*": "Q5_K"})
    empty = DamageTable((), LADDER, CATEGORIES, np.zeros((0, 3, 3)), np.zeros((0, 3, 3)),
                        np.zeros((0, 3), bool))  # fmt: skip
    found = propose(pinned, {1.0: empty}, pinned.smallest_bytes, "code")
    assert [set(c.types.values()) for c in found] == [{"Q5_K"}]


def test_odd_rows_are_solved_with_their_replacements(tmp_path):
    path = tiny_gguf(tmp_path / "m-F16.gguf", n_embd=96, n_ff=256, n_head=3, n_kv=1, n_layer=1)
    options = build_options(open_model(path), ladder=("Q2_K", "Q3_K", "Q4_K"))
    budget = middle(options)
    for one in propose(options, tables(options), budget, "code"):
        assert one.size_bytes <= budget
        assert one.types["blk.0.attn_q.weight"] in {"Q4_0", "Q5_0"}
        assert one.types["blk.0.ffn_down.weight"] in {"Q2_K", "Q3_K", "Q4_K"}


def test_what_cannot_be_proposed_is_refused(options):
    priced = tables(options)
    with pytest.raises(BudgetError, match="smallest layout"):
        propose(options, priced, options.smallest_bytes - 1, "code")
    with pytest.raises(ConfigError, match="chat, code, math"):
        propose(options, priced, options.largest_bytes, "poetry")
    with pytest.raises(ConfigError, match="no damage table"):
        propose(options, {}, options.largest_bytes, "code")
    one = priced[1.0]
    short = replace(one, tensors=one.tensors[1:], nats=one.nats[1:], se=one.se[1:])
    with pytest.raises(ConfigError, match=f"no row for {one.tensors[0]}"):
        propose(options, {1.0: short}, options.largest_bytes, "code")


# Predictions


def test_predict_sums_the_table_and_leaves_out_what_was_not_measured(options):
    priced = table(options)
    one, two = options.tensors[:2]
    found = predict(priced, {one: "Q2_K", two: "Q8_0", "unknown.weight": "Q2_K"})
    expected = priced.nats[0, 0] + priced.nats[1, priced.types.index("Q8_0")]
    assert [found[c] for c in CATEGORIES] == pytest.approx(list(expected))
    assert predict(priced, {one: "F16"}) == dict.fromkeys(CATEGORIES, 0.0)


def test_types_outside_the_table_are_priced_by_their_bits(options):
    priced = table(options)  # exactly fourfold per bit, so that every type lies on the line
    name = options.tensors[0]
    for kind in ("Q3_K", "IQ3_S", "Q6_K", "IQ2_XXS", "IQ1_S", "Q5_0"):
        expected = priced.nats[0, 0] * 4.0 ** (TYPES["Q2_K"].bpw - TYPES[kind].bpw)
        found = predict(priced, {name: kind})
        assert [found[c] for c in CATEGORIES] == pytest.approx(list(expected)), kind


def test_a_stock_layout_gets_a_prediction(model, options):
    found = predict(table(options), upstream_layout(model, "IQ4_XS"))
    assert all(0 < nats < 1 for nats in found.values())


def test_between_handles_zeros_and_ends():
    assert between([], 3.0) != between([], 3.0)
    assert between([(2.0, 1.0)], 3.0) == 0.25
    assert between([(2.0, 1.0), (4.0, 0.0)], 3.0) == 0.5
    assert between([(2.0, 4.0), (4.0, 1.0)], 3.0) == pytest.approx(2.0)
    assert between([(3.0, 4.0), (3.0, 1.0)], 3.0) in (1.0, 4.0)
