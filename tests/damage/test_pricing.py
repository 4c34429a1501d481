"""Prices from probes: scaling, the massive-channel trap, order of bits, missing values."""

import dataclasses

import numpy as np
import pytest

from bitwright.damage.damage_map import DamageMap, tidy
from bitwright.damage.pricing import price_types, types_to_pack
from bitwright.errors import ConfigError, InputError

TYPES = ("Q2_K", "Q3_K", "Q4_K", "IQ3_S")
ERROR = {"Q2_K": 0.1, "Q3_K": 0.03, "Q4_K": 0.008, "IQ3_S": 0.028, "F16": 0.0, "Q4_0": 0.01}


def tensor(i: int) -> str:
    return f"blk.{i}.ffn_up.weight"


def made_map(
    damage: dict[str, tuple[float, float]], type_name: str = "Q2_K", se: float = 0.01
) -> DamageMap:
    """damage: tensor → (code, math)."""
    rows = [
        {"tensor": t, "role": "ffn_up", "layer": 0, "type": type_name, "category": c, "span": span}
        | {"kld_nats": kld * (1 if span == "scored" else 2), "se": se, "n_tokens": 9, "flips": 0}
        for t, values in damage.items()
        for c, kld in zip(("code", "math"), values, strict=True)
        for span in ("scored", "overall")
    ]
    both = {"code": 5, "math": 5}
    return DamageMap(tidy(rows), "k", "Q2_K", {}, dict.fromkeys(both, "chunks"), both)


def made_errors(names: list[str]) -> dict[tuple[str, str], float]:
    """Some tensors are twice as hard to pack as others, at every type alike."""
    return {(n, t): e * (1 + i % 2) for i, n in enumerate(names) for t, e in ERROR.items()}


NAMES = [tensor(i) for i in range(5)]
OFFERED = dict.fromkeys(NAMES, TYPES)


def test_a_price_is_the_probe_scaled_by_the_error_ratio() -> None:
    found = made_map(dict.fromkeys(NAMES, (0.5, 0.2)))
    table = price_types(found, made_errors(NAMES), OFFERED)
    assert table.types == ("Q2_K", "IQ3_S", "Q3_K", "Q4_K")
    assert table.nats.shape == (5, 4, 2)
    np.testing.assert_allclose(table.nats[3, :, 0], [0.5, 0.14, 0.15, 0.04])
    np.testing.assert_allclose(table.se[3, :, 1], [0.01, 0.0028, 0.003, 0.0008])
    assert table.measured.tolist() == [[True, False, False, False]] * 5
    squared = price_types(found, made_errors(NAMES), OFFERED, exponent=2.0, span="overall")
    np.testing.assert_allclose(squared.nats[0, 3], [1.0 * 0.0064, 0.4 * 0.0064])
    assert table.clamped == table.clipped == ()


def test_weighted_sums_categories() -> None:
    table = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), made_errors(NAMES), OFFERED)
    np.testing.assert_allclose(table.weighted({"code": 1.0, "math": 2.0})[:, 0], 0.9)
    np.testing.assert_allclose(table.weighted_se({"code": 3.0, "math": 4.0})[:, 0], 0.05)
    with pytest.raises(ConfigError, match="'chat'"):
        table.weighted({"chat": 1.0})


def test_one_massive_channel_cannot_mislead_by_more_than_the_factor() -> None:
    errors = made_errors(NAMES)
    errors[NAMES[1], "Q2_K"] = 1e-6  # the probe's error vanishes: ratios explode
    errors[NAMES[2], "Q4_K"] = 1e-9  # this type seems free
    table = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), errors, OFFERED)
    usual = 0.08
    assert table.nats[1, 3, 0] <= 0.5 * 8 * usual * 1.0001
    assert table.nats[2, 3, 0] == pytest.approx(0.5 * usual / 8)
    assert {(NAMES[1], "Q4_K"), (NAMES[2], "Q4_K")} <= set(table.clamped)
    assert {name for name, _ in table.clamped} == {NAMES[1], NAMES[2]}
    assert table.nats[1, 0, 0] == 0.5  # what was measured stays


def test_more_bits_never_cost_more_inside_a_family() -> None:
    errors = made_errors(NAMES)
    errors[NAMES[0], "Q3_K"] = 0.15  # packs worse than Q2_K here
    errors[NAMES[0], "Q4_K"] = 0.035
    table = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), errors, OFFERED)
    q2, _, q3, q4 = table.nats[0, :, 0]
    assert q2 == 0.5
    assert q2 >= q3 >= q4
    low = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2)), "Q3_K"), errors, OFFERED)
    assert low.nats[0, 2, 0] == 0.5  # measured
    assert low.nats[0, 0, 0] >= 0.5


def test_negative_damage_counts_as_nothing_and_keeps_its_noise() -> None:
    damage = dict.fromkeys(NAMES, (0.5, 0.2)) | {NAMES[4]: (-1e-4, 0.2)}
    table = price_types(made_map(damage), made_errors(NAMES), OFFERED)
    assert (table.nats[4, :, 0] == 0.0).all()
    assert (table.se[4, :, 0] > 0).all()
    assert table.clipped == ((NAMES[4], "code"),)


def test_damage_under_the_noise_floor_counts_as_nothing() -> None:
    found = made_map(dict.fromkeys(NAMES, (0.5, 0.2)))
    found = dataclasses.replace(found, noise_floor={"code": 0.01, "math": 0.11})
    table = price_types(found, made_errors(NAMES), OFFERED)
    assert (table.nats[:, :, 0] > 0).all()
    assert (table.nats[:, :, 1] == 0).all()
    assert table.clipped == tuple((name, "math") for name in NAMES)


def test_types_that_are_not_offered_have_no_price() -> None:
    offered = OFFERED | {NAMES[0]: ("Q4_0", "F16")}
    table = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), made_errors(NAMES), offered)
    given = ~np.isnan(table.nats[0]).any(axis=1)
    assert [t for t, there in zip(table.types, given, strict=True) if there] == ["Q4_0", "F16"]
    assert (np.isnan(table.weighted({"code": 1.0})[0]) == ~given).all()
    assert table.nats[0, table.types.index("F16"), 0] == 0.0
    assert not table.measured[0].any()


def test_an_all_zero_tensor_is_priced_like_the_others() -> None:
    errors = made_errors(NAMES) | {(NAMES[0], t): 0.0 for t in ERROR}
    table = price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), errors, OFFERED)
    assert np.isfinite(table.nats).all()


def test_a_second_probe_prices_the_types_next_to_it() -> None:
    low = made_map(dict.fromkeys(NAMES, (0.5, 0.2)))
    high = made_map({NAMES[0]: (0.06, 0.02)}, "Q4_K")
    both = dataclasses.replace(
        low, rows=tidy([*low.rows.to_dict("records"), *high.rows.to_dict("records")])
    )
    offered = dict.fromkeys(NAMES, (*TYPES, "Q5_K"))
    errors = made_errors(NAMES) | {(n, "Q5_K"): 0.002 * (1 + i % 2) for i, n in enumerate(NAMES)}
    table = price_types(both, errors, offered)
    q4, q5 = table.types.index("Q4_K"), table.types.index("Q5_K")
    assert table.measured[0, q4]
    assert table.nats[0, q4, 0] == 0.06
    assert table.nats[0, q5, 0] == pytest.approx(0.015)
    assert table.nats[1, q5, 0] == pytest.approx(0.01)


def test_the_probed_type_is_packed_too() -> None:
    found = made_map({tensor(0): (1.0, 1.0)})
    assert types_to_pack(found, {tensor(0): ("Q4_K",)}) == {tensor(0): ("Q4_K", "Q2_K")}


def test_unmeasured_is_not_zero() -> None:
    found = made_map(dict.fromkeys(NAMES[1:], (0.5, 0.2)))
    with pytest.raises(InputError, match=r"1 of 5 tensors .*blk\.0"):
        price_types(found, made_errors(NAMES), OFFERED)
    blank = made_map({n: (0.5, float("nan")) for n in NAMES})
    with pytest.raises(InputError, match="'math' has no scored tokens"):
        price_types(blank, made_errors(NAMES), OFFERED)
    errors = made_errors(NAMES)
    del errors[NAMES[2], "Q2_K"]
    with pytest.raises(InputError, match=r"packing error of blk\.2.* at Q2_K"):
        price_types(made_map(dict.fromkeys(NAMES, (0.5, 0.2))), errors, OFFERED)
    with pytest.raises(ConfigError, match="span"):
        price_types(found, errors, {}, span="all")
