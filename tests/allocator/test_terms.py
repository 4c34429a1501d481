"""Prices, names, side budgets and coherent groups: kept by every solved layout."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bitwright.allocator.candidates import HONEST, make_candidate, propose
from bitwright.allocator.choices import layer_groups, single_groups, solve_groups, weighted_cost
from bitwright.allocator.names import body_shares, honest_name
from bitwright.allocator.options import build_options
from bitwright.allocator.predictions import predict
from bitwright.allocator.terms import (
    SIGMAS,
    SideBudget,
    Terms,
    name_rule,
    off_target_prices,
    solve_within,
)
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.model_file import open_model
from bitwright.engine.tensors import is_quantizable, layer
from bitwright.engine.upstream import upstream_layout
from bitwright.errors import BudgetError, ConfigError
from tests.allocator.tables import middle, table
from tests.tiny import tiny_gguf

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return open_model(tiny_gguf(tmp_path_factory.mktemp("terms") / "m-F16.gguf", n_layer=3))


@pytest.fixture(scope="module")
def options(model):
    return build_options(model, ladder=LADDER)


def stock(model, name="Q3_K_S"):
    layout = upstream_layout(model, name, has_imatrix=True)
    return {n: t for n, t in layout.items() if is_quantizable(model.tensor(n), model.arch)}


def solved(options, priced, budget, terms, target="code"):
    cost = weighted_cost(options, priced, {target: 1.0})
    groups = single_groups(options, terms.coherent)
    room = budget - options.fixed_bytes
    return solve_within(options, groups, cost, room, priced, terms)


def test_a_price_holds_with_its_error_on_top(model, options):
    base = stock(model)
    budget = options.layout_bytes(base)
    bound = 0
    for seed in range(3):
        priced = table(options, seed)
        free = solved(options, priced, budget, Terms())
        terms = Terms(base, {"chat": 0.0, "math": 0.0})
        found = solved(options, priced, budget, terms)
        own, stocks = (predict(priced, options.complete(t)) for t in (found.types, base))
        for category in ("chat", "math"):
            assert own[category] <= stocks[category] * (1 + 1e-9)
        if not found.notes:  # kept with the error of every tensor's difference
            c = priced.categories.index("chat")
            off = [
                priced.se[t, priced.types.index(found.types[n]), c]
                - priced.se[t, priced.types.index(options.complete(base)[n]), c]
                for t, n in enumerate(options.tensors)
                if options.complete(base)[n] in priced.types
            ]
            assert own["chat"] + SIGMAS * np.sqrt(np.square(off).sum()) <= stocks["chat"] * 1.000001
        bound += found.types != free.types
    assert bound  # some of them do bind


def test_a_tighter_price_never_lowers_the_damage_on_the_target(model, options):
    base, priced = stock(model), table(options, 3, relative_se=1e-6)
    budget = options.layout_bytes(base)
    damages = []
    for epsilon in (0.0, 0.05, 0.2, 5.0):
        prices = {"chat": epsilon, "math": epsilon}
        found = solved(options, priced, budget, Terms(base, prices))
        damages.append(predict(priced, found.types)["code"])
    assert all(b <= a * (1 + 1e-8) for a, b in itertools.pairwise(damages))


def test_a_price_equals_brute_force(tmp_path):
    small = open_model(tiny_gguf(tmp_path / "s-F16.gguf", n_layer=1))
    options = build_options(small, ladder=("Q2_K", "Q4_K", "Q8_0"))
    priced = table(options, 5, relative_se=1e-9)
    base, budget = dict.fromkeys(options.tensors, "Q4_K"), middle(options, 0.3)
    limit = 1.5 * predict(priced, base)["chat"]
    best = np.inf
    for choice in itertools.product(("Q2_K", "Q4_K", "Q8_0"), repeat=len(options.tensors)):
        types = dict(zip(options.tensors, choice, strict=True))
        damage = predict(priced, types)
        if options.layout_bytes(types) <= budget and damage["chat"] <= limit:
            best = min(best, damage["code"])
    found = solved(options, priced, budget, Terms(base, {"chat": 0.5}))
    assert predict(priced, found.types)["code"] == pytest.approx(best, rel=1e-6)


def test_an_impossible_price_names_itself_and_what_is_possible(options):
    priced = table(options, 1)
    base = dict.fromkeys(options.tensors, "Q8_0")
    with pytest.raises(BudgetError, match=r"chat damage \(price 10%") as caught:
        solved(options, priced, middle(options, 0.1), Terms(base, {"chat": 0.1}))
    assert "size in bytes at" in str(caught.value)
    assert "chat damage (price 10% over the baseline) at" in str(caught.value)


def test_a_category_under_its_own_noise_is_no_limit(options):
    priced = table(options, 2, relative_se=50.0)
    base = dict.fromkeys(options.tensors, "Q8_0")
    found = solved(options, priced, middle(options, 0.1), Terms(base, {"chat": 0.0}))
    assert found.types


def test_prices_are_declared_by_category():
    categories = ("code", "chat", "math")
    assert off_target_prices({}, categories, "code") == {"chat": 0.1, "math": 0.1}
    found = off_target_prices({"default": 0.2, "chat": 0.05}, categories, "code")
    assert found == {"chat": 0.05, "math": 0.2}
    for wrong in ("code", "poetry"):
        with pytest.raises(ConfigError, match=wrong):
            off_target_prices({wrong: 0.1}, categories, "code")


def test_a_second_budget_by_pattern(options):
    priced, budget = table(options, 4), middle(options, 0.5)
    pattern = "blk.*.ffn_*"
    names = [n for n in options.tensors if ".ffn_" in n]
    size = sum(options.option_bytes(n, "Q3_K") for n in names)
    found = solved(options, priced, budget, Terms(side_budgets=(SideBudget(pattern, size),)))
    assert sum(options.option_bytes(n, found.types[n]) for n in names) <= size
    free = solved(options, priced, budget, Terms())
    assert sum(options.option_bytes(n, free.types[n]) for n in names) > size
    with pytest.raises(ConfigError, match="nothing"):
        solved(options, priced, budget, Terms(side_budgets=(SideBudget("nothing*", 1),)))
    with pytest.raises(BudgetError, match="relax it at least to that"):
        solved(options, priced, budget, Terms(side_budgets=(SideBudget(pattern, 1000),)))


def test_coherent_roles_share_a_type_in_each_layer(options):
    roles = ("ffn_up", "ffn_gate")
    found = solved(options, table(options, 6), middle(options), Terms(coherent=(roles,))).types
    for k in range(3):
        assert found[f"blk.{k}.ffn_up.weight"] == found[f"blk.{k}.ffn_gate.weight"]
    free = solved(options, table(options, 6), middle(options), Terms()).types
    assert any(free[f"blk.{k}.ffn_up.weight"] != free[f"blk.{k}.ffn_gate.weight"] for k in range(3))


def test_layer_groups_have_one_type_per_layer(options):
    cost = weighted_cost(options, table(options), {"code": 1.0})
    room = middle(options) - options.fixed_bytes
    found = solve_groups(options, layer_groups(options), cost, room).types
    for k in range(3):
        assert len({t for n, t in found.items() if layer(n) == k}) == 1


# Names (QZ-09)


def test_the_honest_candidate_earns_its_name_and_costs_no_less(model, options):
    base, priced = stock(model), table(options, 7)
    budget = options.layout_bytes(base) + 2000
    found = {c.label: c for c in propose(options, {1.0: priced}, budget, "code", None, "Q3_K_S")}
    share = {s.type: s.by_weights for s in body_shares(found[HONEST].types, model)}
    assert share["Q3_K"] >= 0.9
    named = honest_name(found[HONEST].types, model, target="code", size_bytes=budget)
    assert named.name == "Q3_K_S"
    assert found[HONEST].predicted["code"] >= found["target"].predicted["code"]
    free = {s.type: s.by_weights for s in body_shares(found["target"].types, model)}
    assert free.get("Q3_K", 0) < 0.9
    assert honest_name(found["target"].types, model, target="code", size_bytes=budget).name != (
        "Q3_K_S"
    )


def test_a_k_name_holds_no_iq_types(model):
    mixed = build_options(model, ladder=("IQ3_S", "Q3_K", "Q4_K", "Q6_K"), assume_imatrix=True)
    budget = middle(mixed, 0.35)
    found = {
        c.label: c for c in propose(mixed, {1.0: table(mixed, 1)}, budget, "code", None, "Q3_K_M")
    }
    assert not any(TYPES[t].family == "IQ" for t in found[HONEST].types.values())


def test_a_name_that_the_ladder_cannot_earn_has_no_candidate(model):
    options = build_options(model, ladder=("Q2_K", "Q4_K"))
    assert name_rule(options, "Q3_K_S") is None
    labels = [
        c.label
        for c in propose(options, {1.0: table(options)}, middle(options), "code", None, "Q3_K_S")
    ]
    assert HONEST not in labels


def test_pins_stay_under_every_term(model):
    pinned = build_options(model, ladder=LADDER, pins={"blk.0.ffn_down.weight": "Q8_0"})
    base = stock(model)
    budget = pinned.layout_bytes(pinned.complete(base)) + 100_000
    terms = Terms(base, {"chat": 0.1}, (SideBudget("blk.0.*", 10**7),), (("ffn_up", "ffn_gate"),))
    for one in propose(pinned, {1.0: table(pinned)}, budget, "code", terms, "Q3_K_S"):
        assert one.types["blk.0.ffn_down.weight"] == "Q8_0"
        assert one.size_bytes <= budget


def test_candidates_carry_exact_bytes(options):
    types = dict.fromkeys(options.tensors, "Q4_K")
    found = make_candidate(options, table(options), "x", types, "by hand")
    assert found.size_bytes == options.layout_bytes(types)
    fewer = replace(found, types={**types, options.tensors[0]: "Q2_K"})
    assert options.layout_bytes(fewer.types) < found.size_bytes
