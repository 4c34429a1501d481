"""Ladders of groups with a made-up damage: safe types, cliffs where there are some, and walks."""

import math
from typing import Any

import pytest

from bitwright.allocator.variants import Group
from bitwright.engine.ggml_types import TYPES
from bitwright.eval.statistics import Interval
from bitwright.workflows.stage_ladders import judged

STEPS = (
    *("Q8_0", "Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "Q2_K"),
    *("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
CLIFF_BPW = 3.0


def group(name: str) -> Group:
    return Group(
        name,
        (f"{name}.weight",),
        STEPS,
        {s: {f"{name}.weight": s} for s in STEPS},
        {s: int(1000 * TYPES[s].bpw) for s in STEPS},
    )


def smooth(bpw: float) -> float:
    """Four times the damage for a bit less, as a straight line in logarithms."""
    return 0.02 * 4.0 ** (2.5 - bpw)


def with_cliff(bpw: float) -> float:
    """The same, and forty times more for each bit under the cliff."""
    return smooth(bpw) * 40.0 ** max(0.0, CLIFF_BPW - bpw)


def damages(curve: Any, noise: float = 0.02) -> dict[str, dict[str, Interval]]:
    """Step → category → interval; the noise is a fixed wave, so that no seed is lucky."""
    found = {}
    for i, step in enumerate(STEPS):
        nats = curve(TYPES[step].bpw) * math.exp(noise * math.sin(2.4 * i))
        found[step] = {"code": Interval(nats, 0.9 * nats, 1.1 * nats, 9)}
    return found


def test_a_cliff_is_found_in_the_group_that_has_one_and_in_no_other() -> None:
    groups = [group("steep"), group("even")]
    measured = {"steep": damages(with_cliff), "even": damages(smooth)}
    found = judged(groups, measured, {"code": 0.05})
    steep, even = found.cliffs["steep"]["code"], found.cliffs["even"]["code"]
    assert steep.found
    assert steep.low is not None
    assert steep.high is not None
    assert steep.low <= CLIFF_BPW <= steep.high
    assert not even.found
    assert even.reason == "no cliff found: a smooth curve fits as well"


def test_safe_types_end_above_the_cliff() -> None:
    groups = [group("steep"), group("even")]
    measured = {"steep": damages(with_cliff), "even": damages(smooth)}
    found = judged(groups, measured, {"code": 0.05})
    assert TYPES[str(found.lowest_safe["steep"])].bpw > TYPES[str(found.lowest_safe["even"])].bpw
    verdict = found.verdicts["steep"]["code"]
    assert verdict.first_over is not None
    assert TYPES[verdict.first_over].bpw < CLIFF_BPW


@pytest.mark.parametrize("width", [0.1, 3.0])
def test_wide_intervals_leave_types_undecided(width: float) -> None:
    measured = {
        step: {"code": Interval(i["code"].value, 0.0, (i["code"].value or 0.0) * (1 + width), 9)}
        for step, i in damages(smooth).items()
    }
    verdict = judged([group("a")], {"a": measured}, {"code": 0.05}).verdicts["a"]["code"]
    assert verdict.first_over is None  # every lower end is under the threshold
    assert ("IQ2_S" in verdict.undecided) == (width == 3.0)
    assert "IQ1_S" in verdict.undecided
