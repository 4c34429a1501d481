"""Corrections learned from joint measurements, and exchanges at constant bytes."""

import numpy as np
import pytest

from bitwright.allocator.choices import single_groups, solve_groups, weighted_cost
from bitwright.allocator.options import build_options
from bitwright.allocator.predictions import predict
from bitwright.allocator.steering import (
    Steering,
    fit_steering,
    log_factors,
    main_roles,
    steered,
    steering_between,
)
from bitwright.allocator.study import make_space
from bitwright.allocator.swaps import swaps
from bitwright.damage.pricing import DamageTable
from bitwright.engine.model_file import open_model
from bitwright.engine.tensors import role
from tests.allocator.tables import middle, table
from tests.tiny import tiny_gguf

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q6_K")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = tiny_gguf(tmp_path_factory.mktemp("steering") / "m-F16.gguf", n_layer=4)
    return build_options(open_model(path), ladder=LADDER)


def best(options, priced, part=0.4):
    cost = weighted_cost(options, priced, {"code": 1.0})
    room = middle(options, part) - options.fixed_bytes
    return options.complete(solve_groups(options, single_groups(options), cost, room).types)


def random_layouts(options, count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {n: options.offered[n][int(rng.integers(len(options.offered[n])))] for n in options.tensors}
        for _ in range(count)
    ]


def test_the_neutral_steering_changes_nothing(options):
    priced = table(options)
    found = steered(priced, Steering())
    np.testing.assert_array_equal(found.nats, priced.nats)


def test_a_factor_by_role_reaches_only_that_role(options):
    priced = table(options)
    found = steered(priced, Steering({"ffn_down": float(np.log(2))}))
    for t, name in enumerate(priced.tensors):
        expected = 2.0 if role(name) == "ffn_down" else 1.0
        np.testing.assert_allclose(found.nats[t], expected * priced.nats[t])


def test_depth_does_not_reach_the_embeddings(options):
    factors = dict(
        zip(options.tensors, log_factors(options.tensors, Steering({}, 0.5, 0.7)), strict=True)
    )
    assert factors["token_embd.weight"] == 0.0
    assert factors["blk.0.attn_q.weight"] != factors["blk.3.attn_q.weight"]


def test_an_exponent_bends_all_types_but_the_measured_one(options):
    priced = table(options)
    found = steered(priced, Steering(exponent=2.0))
    np.testing.assert_allclose(found.nats[:, 0], priced.nats[:, 0])
    ratio = priced.nats[:, 1:] / priced.nats[:, :1]
    np.testing.assert_allclose(found.nats[:, 1:], priced.nats[:, :1] * ratio**2)


def test_the_fit_finds_the_factors_behind_measurements(options):
    priced = table(options)
    truth = Steering({"ffn_down": 0.5, "attn_v": -0.4}, slope=0.3)
    real = steered(priced, truth)
    layouts = random_layouts(options, 60)
    measured = [(types, predict(real, types)["code"]) for types in layouts]
    fit = fit_steering(priced, "code", measured)
    assert fit.before > 0.1
    assert fit.after < 0.1 * fit.before
    fresh = random_layouts(options, 20, seed=9)
    corrected = steered(priced, fit.steering)
    scale = np.exp(fit.scale)
    off = [np.log(scale * predict(corrected, t)["code"] / predict(real, t)["code"]) for t in fresh]
    assert np.abs(off).max() < 0.1


def test_a_fit_of_few_measurements_stays_near_one(options):
    priced = table(options)
    types = best(options, priced)
    fit = fit_steering(priced, "code", [(types, 3 * predict(priced, types)["code"])])
    assert np.exp(fit.scale) == pytest.approx(3, rel=0.4)
    assert all(abs(v) < 0.3 for v in fit.steering.roles.values())
    assert fit_steering(priced, "code", []).steering == Steering()


def test_few_roles_have_a_variable_each(options):
    assert set(main_roles(table(options), "code")) == {role(n) for n in options.tensors}


def test_embedding_and_output_have_a_variable_among_many_roles():
    """Their factors are what a study says of their share of the budget."""
    many = [f"blk.0.r{k}.weight" for k in range(12)]
    tensors = (*many, "token_embd.weight", "output.weight")
    nats = np.linspace(1.0, 0.1, len(tensors))[:, None, None]  # the two have least damage
    measured = np.ones((len(tensors), 1), bool)
    priced = DamageTable(tensors, ("Q2_K",), ("code",), nats, nats, measured)
    found = main_roles(priced, "code")
    assert found == (*(f"r{k}" for k in range(7)), "token_embd", "output", "other")
    assert len(make_space(priced, "code", pareto=True, mix=0.5)) == 15


def test_the_way_to_a_prior_is_by_role(options):
    priced = table(options)
    other = steered(priced, Steering({"attn_q": 0.8}))
    found = steering_between(priced, other, "code").roles
    assert found["attn_q"] == pytest.approx(0.8)
    assert found["ffn_up"] == pytest.approx(0.0)


# Additivity wrong by design: what is measured has to win over what is predicted.


def test_learning_beats_the_table_where_it_is_wrong_by_design(options):
    priced = table(options, seed=3)
    # The joint damage of feed-forward tensors is a third of the sum, attention's is three times it.
    wrong = {r: (-1.1 if r.startswith("ffn") else 1.1) for r in main_roles(priced, "code")}
    real = steered(priced, Steering(wrong))

    def joint(types):
        return predict(real, types)["code"]

    first = best(options, priced)
    measured = [(types, joint(types)) for types in (first, *random_layouts(options, 12))]
    learned = best(options, steered(priced, fit_steering(priced, "code", measured).steering))
    truly = joint(best(options, real))
    assert joint(learned) < joint(first)
    assert joint(learned) <= truly + 0.35 * (joint(first) - truly)


def test_swaps_fit_the_bytes_and_start_with_the_most_promising(options):
    priced = table(options, seed=5)
    budget = middle(options)
    start = best(options, table(options, seed=6))
    found = list(swaps(options, priced, start, budget, {"code": 1.0}))
    assert found
    for one in found:
        types = {**start, **one.types}
        assert options.layout_bytes(types) <= budget
        assert 1 <= len(one.types) <= 2
        change = predict(priced, types)["code"] - predict(priced, start)["code"]
        assert one.nats == pytest.approx(change, rel=1e-6, abs=1e-12)
    promise = [s.nats - s.se for s in found]
    assert promise == sorted(promise)
    assert len({tuple(sorted(s.types.items())) for s in found}) == len(found)


def test_measured_swaps_reach_what_the_wrong_table_missed(options):
    """AL-08: from the exact start, only swaps measured better by more than the noise are taken."""
    priced = table(options, seed=3)
    real = steered(priced, Steering({r: 0.9 * (-1) ** k for k, r in
                                     enumerate(main_roles(priced, "code"))}))  # fmt: skip
    rng, sigma = np.random.default_rng(0), 1e-4
    types, budget, evaluations = best(options, priced), middle(options), 0
    start = predict(real, types)["code"]
    seen, value = set(), start + rng.normal(0, sigma)
    while evaluations < 100:
        for one in swaps(options, priced, types, budget, {"code": 1.0}):
            fresh = {**types, **one.types}
            key = tuple(sorted(fresh.items()))
            if key in seen:
                continue
            seen.add(key)
            evaluations += 1
            measured = predict(real, fresh)["code"] + rng.normal(0, sigma)
            if measured < value - 2 * np.sqrt(2) * sigma:
                types, value = fresh, measured
                break
            if evaluations >= 100:
                break
        else:
            break
    assert predict(real, types)["code"] <= start
    assert options.layout_bytes(types) <= budget
