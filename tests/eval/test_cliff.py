"""Cliffs on made-up curves whose truth is known."""

import numpy as np
import pytest

from bitwright.eval.cliff import MIN_SIZES, find_cliff

BPW = np.array([8.5, 6.6, 5.6, 5.0, 4.5, 4.0, 3.6, 3.2, 2.8, 2.5, 2.1, 1.8])


def bent(place: float, above: float, below: float, noise: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    log = -5.0 + np.where(place < BPW, above * (BPW - place), below * (BPW - place))
    return np.exp(log + noise * rng.normal(size=len(BPW)))


@pytest.mark.parametrize("place", [3.4, 4.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_known_cliff_is_found_and_its_interval_holds_it(place: float, seed: int) -> None:
    kld = bent(place, -0.6, -2.5, 0.05, seed)
    found = find_cliff(BPW, kld, 0.05 * kld)
    assert found.found, found.reason
    assert found.break_bpw == pytest.approx(place, abs=0.25)
    assert found.low is not None
    assert found.high is not None
    assert found.low - 0.1 <= place <= found.high + 0.1
    assert found.slope_above == pytest.approx(-0.6, abs=0.15)
    assert found.slope_below == pytest.approx(-2.5, abs=0.4)


@pytest.mark.parametrize("seed", range(20))
def test_a_straight_line_has_no_cliff(seed: int) -> None:
    kld = bent(3.4, -1.2, -1.2, 0.08, seed)
    found = find_cliff(BPW, kld)
    assert not found.found
    assert found.break_bpw is None


@pytest.mark.parametrize("seed", range(20))
def test_a_smooth_bend_is_no_cliff(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log = -8.0 + 0.11 * (9.0 - BPW) ** 2 + 0.05 * rng.normal(size=len(BPW))
    assert not find_cliff(BPW, np.exp(log)).found


def test_a_curve_that_flattens_below_its_bend_is_no_cliff() -> None:
    found = find_cliff(BPW, bent(3.4, -2.5, -0.3, 0.02, 0))
    assert not found.found
    assert "flatter" in found.reason


def test_too_few_sizes_give_no_verdict() -> None:
    n = MIN_SIZES - 1
    found = find_cliff(BPW[:n], np.ones(n))
    assert not found.found
    assert str(MIN_SIZES) in found.reason


def test_points_without_damage_are_left_out() -> None:
    kld = bent(3.4, -0.6, -2.5, 0.02, 1)
    kld[0] = 0.0
    found = find_cliff(BPW, kld)
    assert found.found


def test_the_order_of_the_points_does_not_matter() -> None:
    kld = bent(3.4, -0.6, -2.5, 0.02, 1)
    order = np.random.default_rng(0).permutation(len(BPW))
    assert find_cliff(BPW[order], kld[order]) == find_cliff(BPW, kld)


def test_noisy_points_weigh_less() -> None:
    kld = bent(3.4, -0.6, -2.5, 0.0, 1)
    se = 0.02 * kld
    kld[3] *= 3.0  # one wild point, known to be wild
    se[3] = 2.0 * kld[3]
    found = find_cliff(BPW, kld, se)
    assert found.found
    assert found.break_bpw == pytest.approx(3.4, abs=0.1)
