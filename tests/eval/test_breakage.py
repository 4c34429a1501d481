"""Breakage intervals and the first to break, on items whose truth is known."""

import numpy as np
import pytest

from bitwright.eval.breakage import (
    SizeScores,
    breakage,
    compare_paired,
    first_to_break,
    more_items,
)

BPW = np.array([8.5, 5.0, 3.8, 3.4, 2.5, 1.7])


def sizes(losses: list[float], n: int, seed: int = 0, category: str = "tool_calling") -> SizeScores:
    """Each size loses its share of the items that the reference has right, and wins none."""
    rng = np.random.default_rng(seed)
    reference = (rng.random(n) < 0.8).astype(np.float64)
    scores = np.stack([reference * (rng.random(n) >= loss) for loss in losses])
    return SizeScores(category, BPW[: len(losses)], reference, scores)


def test_a_break_between_two_sizes() -> None:
    found = breakage(sizes([0.0, 0.0, 0.01, 0.01, 0.3, 0.7], 300), 0.10)
    assert found.last_unharmed_bpw == 3.4
    assert found.first_harmed_bpw == 2.5
    assert found.more_items is None
    assert found.verdict == "breaks between 3.40 and 2.50 bpw"
    assert [d.bpw for d in found.drops] == sorted(BPW, reverse=True)


def test_few_items_establish_nothing_and_say_how_many_would() -> None:
    found = breakage(sizes([0.0, 0.0, 0.04, 0.1, 0.15, 0.2], 15), 0.10)
    assert found.last_unharmed_bpw is None
    assert found.first_harmed_bpw is None
    assert found.verdict == "not established"
    assert found.more_items is not None
    assert 5 < found.more_items < 2000


def test_no_change_at_all_on_few_items_is_not_shown_unharmed() -> None:
    """Ten unchanged items do not prove a loss under 5 %."""
    found = breakage(sizes([0.0], 10), 0.05)
    assert found.drops[0].value == 0.0
    assert found.drops[0].state == "undecided"
    assert breakage(sizes([0.0], 400), 0.05).drops[0].state == "unharmed"


def test_nothing_breaks() -> None:
    found = breakage(sizes([0.0] * 6, 300), 0.10)
    assert found.last_unharmed_bpw == 1.7
    assert found.first_harmed_bpw is None
    assert found.verdict == "unharmed down to 1.70 bpw"


def test_everything_is_broken() -> None:
    found = breakage(sizes([0.5] * 6, 300), 0.10)
    assert found.last_unharmed_bpw is None
    assert found.first_harmed_bpw == 8.5
    assert "no size is shown unharmed" in found.verdict


def test_a_recovered_size_below_the_break_does_not_count() -> None:
    found = breakage(sizes([0.0, 0.4, 0.0, 0.0, 0.4, 0.8], 300), 0.10)
    assert found.last_unharmed_bpw == 8.5
    assert found.first_harmed_bpw == 5.0


def test_the_order_of_sizes_does_not_matter() -> None:
    given = sizes([0.0, 0.0, 0.01, 0.05, 0.3, 0.7], 200)
    order = np.array([3, 0, 5, 1, 4, 2])
    turned = SizeScores(given.category, given.bpw[order], given.reference, given.scores[order])
    assert breakage(turned, 0.1) == breakage(given, 0.1)


def test_graded_items_are_compared_by_their_differences() -> None:
    rng = np.random.default_rng(3)
    reference = rng.random(120)
    scores = np.stack([reference, reference - 0.02, reference - 0.3 + 0.1 * rng.random(120)])
    found = breakage(SizeScores("code", BPW[:3], reference, scores), 0.10)
    assert [d.state for d in found.drops] == ["unharmed", "unharmed", "harmed"]


def test_the_interval_holds_the_true_drop() -> None:
    """95 % intervals of a drop of 6 points hold it in about 95 % of 400 samples."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        reference = (rng.random(150) < 0.8).astype(np.float64)
        u = rng.random(150)
        size = np.where(reference == 1.0, u >= 0.1, u < 0.1).astype(np.float64)
        found = compare_paired(reference, size, False)
        held += found.low <= 0.06 <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_no_false_harm_over_many_sizes() -> None:
    """Sizes that differ by luck only are called harmed in under 5 % of 100 runs."""
    rng = np.random.default_rng(6)
    false = 0
    for _ in range(100):
        reference = rng.integers(0, 2, 150).astype(np.float64)
        flips = rng.random((6, 150)) < 0.15  # as many up as down, on average
        scores = np.where(flips, 1.0 - reference, reference)
        found = breakage(SizeScores("x", BPW, reference, scores), 0.02)
        false += found.first_harmed_bpw is not None
    assert false / 100 < 0.05


def test_likelihoods_may_be_negative() -> None:
    """Bits per byte with the sign changed: 10 % more bits are a loss of 10 %."""
    rng = np.random.default_rng(3)
    reference = -1.4 + 0.2 * rng.random(100)
    scores = np.stack([reference * f + 0.01 * rng.random(100) for f in (1.0, 1.05, 1.3)])
    found = breakage(SizeScores("code", np.array([5.0, 3.0, 2.0]), reference, scores), 0.10)
    assert (found.last_unharmed_bpw, found.first_harmed_bpw) == (3.0, 2.0)
    first = first_to_break(
        [SizeScores("code", np.array([5.0, 3.0, 2.0]), reference, scores)], 0.1, rng
    )
    low, high = first.break_bpw["code"]
    assert low == pytest.approx(2.8, abs=0.1)
    assert high == pytest.approx(2.8, abs=0.1)


def test_the_items_asked_for_would_decide() -> None:
    """With the same rates on as many items as were asked for, the size is decided; with a tenth
    fewer it is not."""
    reference, size = np.ones(40), np.ones(40)
    size[:2] = 0.0  # 5 % lost, 10 % allowed
    pair = compare_paired(reference, size, False)
    more = more_items(pair, 0.10, 40, 1)
    assert more is not None
    for n, decided in ((40 + more, True), (int(0.85 * (40 + more)), False)):
        changed = np.ones(n)
        changed[: round(0.05 * n)] = 0.0
        found = breakage(SizeScores("x", np.array([3.0]), np.ones(n), changed[None]), 0.10)
        assert (found.drops[0].state != "undecided") == decided


def test_a_loss_at_the_very_margin_is_decided_by_harm_only() -> None:
    rng = np.random.default_rng(0)
    reference = rng.random(50)
    graded = compare_paired(reference, reference - 0.1 + 0.4 * (rng.random(50) - 0.5), True)
    assert more_items(graded, graded.value, 50, 6) is not None
    same = compare_paired(np.ones(50), np.ones(50), False)
    assert more_items(same, 0.0, 50, 6) is None


def test_the_category_that_breaks_first_is_named_when_it_is_sure() -> None:
    tools = sizes([0.0, 0.0, 0.05, 0.3, 0.5, 0.8], 300, 1)
    sums = sizes([0.0, 0.0, 0.0, 0.0, 0.05, 0.6], 300, 2, "math")
    found = first_to_break([sums, tools], 0.1, np.random.default_rng(0))
    assert found.category == found.leader == "tool_calling"
    assert found.probability > 0.99
    assert sum(found.probabilities.values()) == pytest.approx(1.0)
    low, high = found.break_bpw["tool_calling"]
    assert low is not None
    assert high is not None
    assert 3.4 < low <= high < 3.8


def test_two_alike_are_undecided() -> None:
    tools = sizes([0.0, 0.0, 0.05, 0.3, 0.5, 0.8], 300, 1)
    sums = sizes([0.0, 0.0, 0.05, 0.3, 0.5, 0.8], 300, 2, "math")
    found = first_to_break([sums, tools], 0.1, np.random.default_rng(0))
    assert found.category is None
    assert found.leader is not None
    assert found.probability < 0.95


def test_first_to_break_is_stable_over_seeds() -> None:
    tools = sizes([0.0, 0.0, 0.05, 0.3, 0.5, 0.8], 300, 1)
    sums = sizes([0.0, 0.0, 0.0, 0.0, 0.05, 0.6], 300, 2, "math")
    named = {
        first_to_break([sums, tools], 0.1, np.random.default_rng(seed)).category
        for seed in range(5)
    }
    assert named == {"tool_calling"}


def test_nothing_breaks_first_where_nothing_breaks() -> None:
    found = first_to_break([sizes([0.0] * 6, 100)], 0.1, np.random.default_rng(0))
    assert found.category is None
    assert found.leader is None
    assert found.probability == 0.0
