"""Intervals cover the truth as often as they say; parts of the text are made comparable."""

import numpy as np
import pytest

from bitwright.damage.intervals import Blocks, common_course, estimate, interval
from tests.damage.synthetic import made_sums

TENSORS, ROWS = 40, 16


@pytest.mark.parametrize(("blocks", "level"), [(8, 0.9), (16, 0.9), (32, 0.9), (32, 0.8)])
def test_intervals_cover_the_truth_at_their_nominal_rate(blocks: int, level: float) -> None:
    alone = together = 0.0
    seeds = 200
    for seed in range(seeds):
        truth, sums = made_sums(np.random.default_rng(seed), TENSORS, blocks, ROWS)
        sums[TENSORS // 2 :, blocks // 2 :] = np.nan  # half of them measured on half the text
        found = estimate(Blocks(sums, np.full(blocks, float(ROWS))))
        one = interval(found.nats, found.se, found.n_blocks, level)
        alone += float(((one.low <= truth) & (truth <= one.high)).mean())
        # Paired intervals are about damages relative to each other: the scale is free.
        scaled = truth * np.exp(np.mean(np.log(found.nats / truth)))
        two = interval(found.nats, found.paired_se, found.n_blocks, level)
        together += float(((two.low <= scaled) & (scaled <= two.high)).mean())
    assert alone / seeds == pytest.approx(level, abs=0.03)
    assert together / seeds == pytest.approx(level, abs=0.03)


def test_pairing_narrows_what_rows_have_in_common() -> None:
    _, sums = made_sums(np.random.default_rng(1), TENSORS, 32, ROWS)
    common = np.random.default_rng(2).lognormal(0, 1.0, 32)
    found = estimate(Blocks(sums * common, np.full(32, float(ROWS))))
    assert np.median(found.paired_se / found.se) < 0.5


def test_a_tensor_measured_on_easy_text_is_scaled_to_all_of_it() -> None:
    course = np.array([1.0, 1.0, 9.0, 9.0])
    sums = np.outer([1.0, 2.0, 4.0, 8.0], course)
    partial = sums.copy()
    partial[3, 2:] = np.nan
    found = estimate(Blocks(partial, np.full(4, 10.0)))
    assert found.nats == pytest.approx(sums.sum(axis=1) / 40)
    assert list(found.n_blocks) == [4, 4, 4, 2]


def test_all_text_gives_the_plain_mean() -> None:
    _, sums = made_sums(np.random.default_rng(0), 5, 12, ROWS)
    found = estimate(Blocks(sums, np.full(12, float(ROWS))))
    assert found.nats == pytest.approx(sums.sum(axis=1) / (12 * ROWS), rel=1e-12)


def test_without_damage_or_anchors_the_course_is_even() -> None:
    rows = np.array([10.0, 30.0])
    nothing = np.zeros((2, 2))
    assert common_course(Blocks(nothing, rows), np.ones((2, 2), bool)) == pytest.approx(
        [0.25, 0.75]
    )
    crossed = np.array([[1.0, np.nan], [np.nan, 1.0]])
    even = common_course(Blocks(crossed, rows), ~np.isnan(crossed))
    assert even == pytest.approx([0.25, 0.75])


def test_unknown_errors_give_endless_intervals_and_negative_values_reach_zero() -> None:
    nats, se = np.array([1.0, -1e-9]), np.array([np.nan, 1e-8])
    found = interval(nats, se, np.array([1, 8]), 0.9)
    assert found.low[0] == 0.0
    assert found.high[0] == np.inf
    assert found.low[1] == 0.0
    assert 0 < found.high[1] < 1e-7
