"""Groups, walks, backing off and the knee, on made-up ladders and a tiny model."""

import numpy as np
import pytest

from bitwright.allocator.options import build_options
from bitwright.allocator.variants import (
    Group,
    assembled,
    back_off,
    between,
    check_size,
    curve_budgets,
    damage_share,
    knee,
    make_groups,
    nearer_correction,
    next_correction,
    next_step,
    one_past,
    predicted,
    priced,
)
from bitwright.engine.model_file import open_model
from bitwright.errors import BudgetError, ConfigError
from tests.tiny import tiny_gguf

STEPS = ("Q8_0", "Q6_K", "Q4_K", "Q3_K", "Q2_K")
BITS = {"Q8_0": 8.5, "Q6_K": 6.5625, "Q4_K": 4.5, "Q3_K": 3.4375, "Q2_K": 2.625}
K = ("Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0")


def group(name, weights=4096):
    return Group(
        name,
        (f"{name}.weight",),
        STEPS,
        {s: {f"{name}.weight": s} for s in STEPS},
        {s: int(weights * BITS[s] / 8) for s in STEPS},
    )


def damage(at_q2, per_bit=4.0, categories=("code", "chat")):
    return {
        s: dict.fromkeys(categories, at_q2 / per_bit ** (BITS[s] - BITS["Q2_K"])) for s in STEPS
    }


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants")
    model = open_model(tiny_gguf(folder / "tiny-F16.gguf", n_layer=4))
    return build_options(model, ladder=K)


# Groups


def test_groups_hold_every_free_tensor_once(options):
    for by in ("role", "role-band", "tensor"):
        groups = make_groups(options, by, 2)
        held = [t for g in groups for t in g.tensors]
        assert sorted(held) == sorted(options.tensors)


def test_bands_cut_the_depth_evenly_and_are_named_by_their_layers(options):
    names = {g.name for g in make_groups(options, "role-band", 2)}
    assert {"attn_q.0-1", "attn_q.2-3", "token_embd"} <= names
    roles = {g.name for g in make_groups(options, "role", 2)}
    assert {"attn_q", "ffn_down", "token_embd"} <= roles
    odd = {g.name for g in make_groups(options, "role-band", 3)}
    assert {"attn_q.0-1", "attn_q.2-2", "attn_q.3-3"} <= odd


def test_experts_are_groups_apart(tmp_path):
    model = open_model(tiny_gguf(tmp_path / "moe-F16.gguf", n_expert=4, n_layer=2))
    names = {g.name for g in make_groups(build_options(model, ladder=K), "role", 1)}
    assert any(name.endswith("_exps") for name in names)
    assert any("attn" in name for name in names)


def test_a_groups_bytes_are_those_of_the_file(options):
    groups = make_groups(options, "role", 1)
    top = {g.name: g.steps[0] for g in groups}
    low = top | {groups[1].name: groups[1].steps[-1]}
    saved = groups[1].size_bytes[groups[1].steps[0]] - groups[1].size_bytes[groups[1].steps[-1]]
    assert (
        options.layout_bytes(assembled(groups, top)) - options.layout_bytes(assembled(groups, low))
        == saved
    )


def test_unknown_groups_are_refused(options):
    with pytest.raises(ConfigError, match="role-band"):
        make_groups(options, "layers", 2)


# Walks


def walk(states_of, start="Q4_K"):
    """Steps in the order in which they are measured."""
    states = {}
    while (step := next_step(STEPS, states, BITS[start])) is not None:
        states[step] = states_of[step]
    return list(states)


def test_a_walk_goes_down_from_its_start_until_it_is_over_everywhere():
    states = dict.fromkeys(STEPS, "safe") | {"Q3_K": "mixed", "Q2_K": "over"}
    assert walk(states) == ["Q4_K", "Q3_K", "Q2_K"]


def test_a_walk_stops_below_the_first_step_that_is_over_for_every_category():
    states = dict.fromkeys(STEPS, "safe") | {"Q3_K": "over", "Q2_K": "over"}
    assert walk(states) == ["Q4_K", "Q3_K"]


def test_a_walk_goes_up_only_where_its_start_is_not_safe():
    states = {"Q8_0": "safe", "Q6_K": "safe", "Q4_K": "mixed", "Q3_K": "over", "Q2_K": "over"}
    assert walk(states) == ["Q4_K", "Q6_K", "Q3_K"]


def test_a_walk_ends_at_the_top_when_nothing_is_safe():
    assert walk(dict.fromkeys(STEPS, "over")) == ["Q4_K", "Q6_K", "Q8_0"]


def test_a_start_under_the_whole_ladder_is_its_lowest_step():
    assert next_step(STEPS, {}, 1.0) == "Q2_K"


# Prices


def test_steps_above_the_measured_ones_are_priced_by_their_further_bits():
    measured = {"Q3_K": {"code": 0.02}, "Q2_K": {"code": 0.1}}
    found = priced(group("a"), measured)
    assert found["Q3_K"] == {"code": 0.02}
    assert found["Q4_K"]["code"] == pytest.approx(0.02 / 4 ** (4.5 - 3.4375))
    assert list(found) == ["Q2_K", "Q3_K", "Q4_K", "Q6_K", "Q8_0"]


# Backing off


def settle(groups, prices, lowest, thresholds, truth):
    """The rounds of workflows/joint_layouts with a made-up truth in place of a model."""
    chosen, correction, rounds = dict(lowest), {}, 0
    while rounds < 20:
        rounds += 1
        measured = truth(chosen)
        correction = next_correction(correction, predicted(groups, prices, chosen), measured)
        if all(measured[c] < t for c, t in thresholds.items()):
            return chosen, rounds
        chosen = back_off(groups, prices, lowest, thresholds, correction)
    raise AssertionError("no end")


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_groups_safe_alone_and_unsafe_together_back_off_until_they_are_safe(factor):
    groups = [group(f"g{i}") for i in range(10)]
    prices = {g.name: damage(0.04) for g in groups}  # each alone under 0.05, together 0.4
    thresholds = {"code": 0.05, "chat": 0.05}
    lowest = {g.name: "Q2_K" for g in groups}

    def truth(chosen):
        return {c: factor * v for c, v in predicted(groups, prices, chosen).items()}

    assert truth(lowest)["code"] > 0.05
    chosen, rounds = settle(groups, prices, lowest, thresholds, truth)
    assert truth(chosen)["code"] < 0.05
    assert 1 < rounds <= 3
    assert any(step != "Q2_K" for step in chosen.values())


def test_backing_off_spends_bytes_where_they_buy_most():
    harmless, harmful = group("harmless"), group("harmful")
    prices = {"harmless": damage(0.001), "harmful": damage(0.2)}
    lowest = {"harmless": "Q2_K", "harmful": "Q2_K"}
    found = back_off([harmless, harmful], prices, lowest, {"code": 0.05}, {})
    assert found["harmless"] == "Q2_K"
    assert found["harmful"] != "Q2_K"


def test_no_group_goes_under_its_lowest_safe_step():
    groups = [group("a"), group("b")]
    prices = {g.name: damage(1e-6) for g in groups}
    found = back_off(groups, prices, {"a": "Q4_K", "b": "Q2_K"}, {"code": 1.0}, {})
    assert found == {"a": "Q4_K", "b": "Q2_K"}


def test_a_threshold_under_every_layout_is_refused():
    with pytest.raises(BudgetError, match="damage on code"):
        back_off([group("a")], {"a": damage(1.0)}, {"a": "Q2_K"}, {"code": 1e-9}, {})


def test_groups_safe_together_do_not_back_off():
    groups = [group(f"g{i}") for i in range(3)]
    prices = {g.name: damage(0.001) for g in groups}
    lowest = {g.name: "Q2_K" for g in groups}
    chosen, rounds = settle(
        groups, prices, lowest, {"code": 0.05}, lambda s: predicted(groups, prices, s)
    )
    assert (chosen, rounds) == (lowest, 1)


def test_corrections_never_fall():
    assert next_correction({"code": 2.0}, {"code": 0.1}, {"code": 0.1}) == {"code": 2.0}
    assert next_correction({}, {"code": 0.1}, {"code": 0.3})["code"] == pytest.approx(3.0)


def test_a_nearer_correction_lies_between_the_known_ones():
    assert nearer_correction({"code": 2.0}, {"code": 8.0}, None) == {"code": 2.0}
    assert nearer_correction({"code": 1.0}, {"code": 8.0}, {"code": 2.0}) == {"code": 4.0}
    assert nearer_correction({"code": 9.0}, {"code": 8.0}, None) == {"code": 8.0}


# Gambit and Tightrope


def test_gambit_is_one_step_past():
    assert one_past(group("a"), "Q4_K") == "Q3_K"
    assert one_past(group("a"), "Q2_K") == "Q2_K"


def test_tightrope_is_the_best_between_the_two_within_its_bytes():
    groups = [group("a"), group("b")]
    prices = {"a": damage(0.3), "b": damage(0.01)}
    high = {g.name: "Q4_K" for g in groups}
    low = {g.name: "Q3_K" for g in groups}
    sizes = groups[0].size_bytes
    found = between(groups, prices, high, low, {"code": 0.05}, sizes["Q4_K"] + sizes["Q3_K"])
    assert found == {"a": "Q4_K", "b": "Q3_K"}
    assert between(groups, prices, high, low, {"code": 0.05}, 2 * sizes["Q4_K"]) == high
    with pytest.raises(BudgetError):
        between(groups, prices, high, low, {"code": 0.05}, sizes["Q3_K"])


def test_the_knee_of_a_bent_curve_is_its_corner():
    sizes = [100, 90, 80, 70, 60, 50]
    shares = np.exp([0.0, 0.1, 0.2, 0.3, 1.6, 3.0])
    assert knee(sizes, shares) == (3, True)


def test_a_straight_or_hollow_curve_has_no_knee():
    sizes = [100, 90, 80, 70, 60]
    index, found = knee(sizes, np.exp([0.0, 1.0, 1.5, 1.8, 2.0]))
    assert not found
    assert sizes[index] == 80
    assert knee([100, 50], [1.0, 2.0]) == (0, False)


def test_sizes_for_tightrope():
    assert curve_budgets(100, 40, 5) == [90, 80, 70, 60, 50]
    assert curve_budgets(100, 100, 5) == []
    check_size(50, 40, 60)
    with pytest.raises(BudgetError, match="between"):
        check_size(70, 40, 60)


def test_damage_is_shared_by_threshold():
    assert damage_share({"a": 0.1, "b": 0.3}, {"a": 0.1, "b": 0.1}) == pytest.approx(2.0)
