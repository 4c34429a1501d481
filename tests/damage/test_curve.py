"""The type curve from a map's own pairs, and which pairs are worth measuring."""

from collections.abc import Mapping

import numpy as np
import pytest

from bitwright.damage.curve import TypeCurve, describe_curve, fit_curve
from bitwright.damage.damage_map import DamageMap, tidy
from bitwright.damage.pricing import price_types
from bitwright.damage.second_probes import SHARE, misleading, second_probes

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
ERRORS = dict(zip(LADDER, (0.1, 0.032, 7e-3, 1.8e-3, 5e-4, 4e-5), strict=True))
EXPONENT, FACTOR = 1.1, {"Q3_K": 0.8, "Q4_K": 0.9, "Q6_K": 1.3}
ROLES = ("attn_q", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = (*(f"blk.{i}.{role}.weight" for i in range(6) for role in ROLES), "output.weight")


def true_nats(sensitivity: float, type_name: str) -> float:
    ratio = (ERRORS[type_name] / ERRORS["Q2_K"]) ** EXPONENT
    return sensitivity * ratio * FACTOR.get(type_name, 1.0)


def made_map(pairs: Mapping[tuple[str, str], float], floor: float = 0.0) -> DamageMap:
    rows = [
        {
            **{"tensor": tensor, "role": "r", "layer": 0, "type": type_name, "category": "code"},
            **{"span": "scored", "kld_nats": nats, "se": 0.05 * nats, "n_tokens": 9, "flips": 0},
        }
        for (tensor, type_name), nats in pairs.items()
    ]
    return DamageMap(tidy(rows), "key", "Q2_K", {"code": floor}, {"code": "tokens"}, {"code": 1})


@pytest.fixture
def sensitivity() -> dict[str, float]:
    values = np.exp(np.random.default_rng(0).normal(-5, 1.2, len(TENSORS)))
    return dict(zip(TENSORS, map(float, values), strict=True))


@pytest.fixture
def errors() -> dict[tuple[str, str], float]:
    scale = np.random.default_rng(1).uniform(0.7, 1.4, len(TENSORS))
    return {(t, y): s * e for t, s in zip(TENSORS, scale, strict=True) for y, e in ERRORS.items()}


def probed(sensitivity: Mapping[str, float], spread: float = 0.0) -> DamageMap:
    """At Q2_K everywhere, at further types on every third tensor."""
    rng = np.random.default_rng(2)
    pairs = {(t, "Q2_K"): s for t, s in sensitivity.items()}
    for i, tensor in enumerate(TENSORS[::3]):
        for type_name in LADDER[1 + i % 2 :: 2]:
            noise = float(np.exp(rng.normal(0, spread)))
            pairs[tensor, type_name] = true_nats(sensitivity[tensor], type_name) * noise
    return made_map(pairs)


def test_exponent_and_factors_are_found(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    found = fit_curve(probed(sensitivity), errors)
    assert found.exponent == pytest.approx(EXPONENT, abs=0.06)
    assert found.r2 > 0.99
    assert found.n_pairs > 20
    price = found.log_ratio(np.log(ERRORS["Q4_K"] / ERRORS["Q2_K"]), "Q4_K", "Q2_K")
    assert price == pytest.approx(np.log(true_nats(1.0, "Q4_K")), abs=0.1)
    assert describe_curve(found)["n_pairs"] == found.n_pairs


def test_few_pairs_leave_the_plain_ratio(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    alone = made_map({(t, "Q2_K"): s for t, s in sensitivity.items()})
    assert fit_curve(alone, errors) == TypeCurve()
    assert describe_curve(TypeCurve()) == {}


def test_damage_under_the_floor_does_not_bend_the_curve(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    plain = probed(sensitivity)
    rows = dict(
        zip(
            zip(plain.rows["tensor"], plain.rows["type"], strict=True),
            plain.rows["kld_nats"],
            strict=True,
        )
    )
    noisy = {pair: nats if nats > 1e-6 else 1e-6 for pair, nats in rows.items()}
    assert fit_curve(made_map(noisy, 1e-6), errors).exponent == pytest.approx(EXPONENT, abs=0.08)


def test_what_the_curve_leaves_open_is_in_the_standard_errors(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    damage_map = probed(sensitivity, spread=0.3)
    curve = fit_curve(damage_map, errors)
    assert curve.log_spread("Q4_K") == pytest.approx(0.3, abs=0.12)
    table = price_types(damage_map, errors, dict.fromkeys(TENSORS, LADDER))
    relative = table.se[..., 0] / table.nats[..., 0]
    assert relative[table.measured] == pytest.approx(0.05)
    assert (relative[~table.measured] > 0.15).all()
    assert table.curve == curve


def test_second_probes_reach_every_type_and_the_big_spenders(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    damage_map = made_map({(t, "Q2_K"): s for t, s in sensitivity.items()})
    found = second_probes(damage_map, errors, dict.fromkeys(TENSORS, LADDER))
    assert len(found) == len(set(found)) <= max(8, int(SHARE * len(TENSORS)))
    assert {t for _, t in found} == set(LADDER[1:])
    assert "output.weight" in {tensor for tensor, _ in found}
    assert len({tensor for tensor, _ in found}) > 6
    assert all(t != "Q2_K" for _, t in found)


def test_a_tensor_whose_errors_mislead_is_measured_at_all_types(
    sensitivity: dict[str, float], errors: dict[tuple[str, str], float]
) -> None:
    trap = "blk.2.ffn_down.weight"
    errors[trap, "Q2_K"] = 1e-4  # one massive channel hides the error of all others
    offered = dict.fromkeys(TENSORS, LADDER)
    assert misleading(dict.fromkeys(TENSORS, "Q2_K"), errors, offered) == [trap]
    damage_map = made_map({(t, "Q2_K"): s for t, s in sensitivity.items()})
    found = second_probes(damage_map, errors, offered)
    assert {t for tensor, t in found if tensor == trap} >= {"Q3_K", "Q4_K", "Q5_K", "Q6_K"}
