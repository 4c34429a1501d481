"""Safe types, and the threshold that executed scores teach."""

import numpy as np
import pytest

from bitwright.eval.statistics import Interval
from bitwright.eval.thresholds import (
    Step,
    calibrate,
    monotone,
    safe_for_all,
    safe_type,
    state_of,
    straddles,
)


def step(name: str, bpw: float, value: float, half: float | None) -> Step:
    low, high = (None, None) if half is None else (value - half, value + half)
    return Step(name, bpw, Interval(value, low, high, 10))


LADDER = [
    step("Q6_K", 6.6, 0.001, 0.0005),
    step("Q4_K", 4.5, 0.010, 0.005),
    step("Q3_K", 3.4, 0.045, 0.020),
    step("Q2_K", 2.6, 0.200, 0.050),
]


def test_shown_under_over_and_undecided() -> None:
    assert state_of(Interval(0.01, 0.005, 0.015, 9), 0.02) == "under"
    assert state_of(Interval(0.03, 0.025, 0.035, 9), 0.02) == "over"
    assert state_of(Interval(0.02, 0.01, 0.03, 9), 0.02) == "undecided"
    assert state_of(Interval(0.001, None, None, 1), 0.02) == "undecided"


def test_the_lowest_type_shown_safe_the_first_shown_over_and_those_between() -> None:
    found = safe_type(LADDER, 0.05)
    assert (found.lowest_safe, found.first_over, found.undecided) == ("Q4_K", "Q2_K", ("Q3_K",))
    assert straddles(LADDER, 0.05)
    assert not straddles(LADDER, 0.1)


def test_a_lucky_type_under_an_unsafe_one_is_not_safe() -> None:
    lucky = [*LADDER, step("IQ2_S", 2.5, 0.01, 0.001)]
    assert safe_type(lucky, 0.1).lowest_safe == "Q3_K"


def test_nothing_safe_and_everything_safe() -> None:
    none = safe_type(LADDER, 1e-6)
    assert (none.lowest_safe, none.first_over) == (None, "Q6_K")
    every = safe_type(LADDER, 1.0)
    assert (every.lowest_safe, every.first_over, every.undecided) == ("Q2_K", None, ())


def test_unknown_intervals_prove_nothing() -> None:
    assert safe_type([step("Q6_K", 6.6, 1e-6, None)], 1.0).lowest_safe is None


def test_the_weakest_category_decides_for_all() -> None:
    tough = [step(s.type, s.bpw, 0.001, 0.0005) for s in LADDER]
    lowest, verdicts = safe_for_all(
        {"code": tough, "tool_calling": LADDER}, {"code": 0.05, "tool_calling": 0.05}
    )
    assert lowest == "Q4_K"
    assert verdicts["code"].lowest_safe == "Q2_K"
    lowest, _ = safe_for_all(
        {"code": tough, "tool_calling": LADDER}, {"code": 0.05, "tool_calling": 1e-6}
    )
    assert lowest is None


def items(loss: float, n: int = 400) -> np.ndarray:
    found = np.ones(n)
    found[: round(loss * n)] = 0.0
    return found


def test_calibration_finds_the_kld_at_which_the_declared_share_is_lost() -> None:
    kld = [0.001, 0.01, 0.1, 1.0]
    scores = np.stack([items(0.0), items(0.02), items(0.18), items(0.6)])
    found = calibrate(kld, scores, items(0.0), 0.10, np.random.default_rng(0))
    assert found.reached
    assert found.kld_nats == pytest.approx(0.01 * 10**0.5, rel=1e-6)
    assert 0.01 < found.low < found.kld_nats < found.high < 0.1


def test_calibration_does_not_depend_on_the_files_order() -> None:
    kld = [1.0, 0.001, 0.1, 0.01]
    scores = np.stack([items(0.6), items(0.0), items(0.18), items(0.02)])
    found = calibrate(kld, scores, items(0.0), 0.10, np.random.default_rng(0))
    assert found.kld_nats == pytest.approx(0.01 * 10**0.5, rel=1e-6)


def test_a_score_that_never_falls_gives_the_largest_kld_seen() -> None:
    scores = np.stack([items(0.0), items(0.01)])
    found = calibrate([0.01, 0.2], scores, items(0.0), 0.10, np.random.default_rng(0))
    assert not found.reached
    assert found.kld_nats == pytest.approx(0.2)


def test_a_first_file_that_lost_too_much_is_no_threshold_itself() -> None:
    scores = np.stack([items(0.2), items(0.6)])
    found = calibrate([0.04, 0.5], scores, items(0.0), 0.10, np.random.default_rng(0))
    assert found.reached
    assert found.kld_nats == pytest.approx(0.02)


def test_monotone_pools_what_falls() -> None:
    assert monotone(np.array([1.0, 3.0, 2.0, 4.0])).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert monotone(np.array([3.0, 2.0, 1.0])).tolist() == [2.0, 2.0, 2.0]
