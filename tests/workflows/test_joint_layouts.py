"""Bedrock's rounds and Tightrope's curve, with a made-up truth in place of a model."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bitwright.allocator.variants import predicted, steps_bytes
from bitwright.errors import BudgetError
from bitwright.eval.statistics import Interval
from bitwright.workflows.bedrock import settle
from bitwright.workflows.joint_layouts import balance
from bitwright.workflows.layout_meter import Meter
from bitwright.workflows.progress import Silent
from bitwright.workflows.sizes_spec import VariantSettings
from tests.allocator.test_variants import damage, group

CONTEXT = SimpleNamespace(
    spec=SimpleNamespace(variants=VariantSettings(curve_points=3)), reporter=Silent()
)
THRESHOLDS = {"code": 0.05, "chat": 0.05}


class Options:
    """Bytes are those of the groups' tensors and 1000 more."""

    def __init__(self, groups: list[Any]) -> None:
        self.bytes = {(t, s): g.size_bytes[s] for g in groups for t in g.tensors for s in g.steps}

    def complete(self, types: dict[str, str]) -> dict[str, str]:
        return types

    def layout_bytes(self, types: dict[str, str]) -> int:
        return 1000 + sum(self.bytes[item] for item in types.items())


@dataclass
class FakeMeter:
    """Measures ``factor`` times the sum, with ``half`` of it as the interval's half width.

    ``worse``: how much worse sums add up the larger they are (a power of sum over threshold).
    ``cliff``: part of the threshold from which on everything is three times as bad.
    """

    groups: list[Any]
    prices: dict[str, Any]
    factor: float
    half: float | None = 0.1
    worse: float = 0.0
    cliff: float = 1e9
    rounds: list[dict[str, Any]] = field(default_factory=list)
    thresholds_nats = THRESHOLDS
    ctx: Any = field(default_factory=lambda: CONTEXT)

    def measure(self, label: str, types: dict[str, str]) -> dict[str, Interval]:
        chosen = {g.name: types[g.tensors[0]] for g in self.groups}
        sums = predicted(self.groups, self.prices, chosen)
        found = {}
        for category, nats in sums.items():
            value = self.factor * nats * max(1.0, nats / THRESHOLDS[category]) ** self.worse
            value *= 3.0 if nats > self.cliff * THRESHOLDS[category] else 1.0
            width = None if self.half is None else self.half * value
            found[category] = Interval(
                value,
                None if width is None else value - width,
                None if width is None else value + width,
                9,
            )
        return found

    unsafe = Meter.unsafe


def made(factor: float, at_q2: float = 0.04, half: float | None = 0.1) -> tuple[Any, ...]:
    groups = [group(f"g{i}") for i in range(8)]
    prices = {g.name: damage(at_q2) for g in groups}
    return groups, prices, FakeMeter(groups, prices, factor, half), Options(groups)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.8])
def test_unsafe_together_backs_off_and_every_round_is_recorded(factor: float) -> None:
    groups, prices, meter, options = made(factor)
    lowest = {g.name: "Q2_K" for g in groups}
    chosen, correction = settle(meter, groups, prices, lowest, options)
    joint = meter.measure("again", {g.tensors[0]: chosen[g.name] for g in groups})
    assert meter.unsafe(joint) == []
    assert meter.rounds[0]["not_shown_safe"] == ["code", "chat"]
    (kept,) = [one for one in meter.rounds if one["kept"]]
    assert kept["not_shown_safe"] == []
    assert kept["raised"]
    assert 2 <= len(meter.rounds) <= 4
    assert correction["code"] == pytest.approx(1.1 * factor)


@pytest.mark.parametrize("worse", [0.5, 1.0])
def test_bytes_that_were_too_many_are_taken_back(worse: float) -> None:
    """The first layout is far over, where sums add up much worse than near the threshold."""
    groups, prices, meter, options = made(1.0)
    meter.worse = worse
    lowest = {g.name: "Q2_K" for g in groups}
    chosen, _ = settle(meter, groups, prices, lowest, options)
    first_safe = next(one for one in meter.rounds if not one["not_shown_safe"])
    (kept,) = [one for one in meter.rounds if one["kept"]]
    assert kept["size_bytes"] < first_safe["size_bytes"]
    assert kept["not_shown_safe"] == []
    assert steps_bytes(groups, chosen) == kept["size_bytes"]
    # No layout of fewer bytes that was measured is safe.
    assert all(
        one["not_shown_safe"] for one in meter.rounds if one["size_bytes"] < kept["size_bytes"]
    )


def test_taking_back_too_much_is_not_kept() -> None:
    """What the safe layout promises of fewer bytes is wrong: past a cliff the sums mislead."""
    groups, prices, meter, options = made(1.0)
    meter.cliff = 0.5
    chosen, _ = settle(meter, groups, prices, {g.name: "Q2_K" for g in groups}, options)
    safe_at = next(i for i, one in enumerate(meter.rounds) if not one["not_shown_safe"])
    trials = meter.rounds[safe_at + 1 :]
    assert any(one["not_shown_safe"] for one in trials), "a trial must go too far"
    (kept,) = [one for one in meter.rounds if one["kept"]]
    assert kept["not_shown_safe"] == []
    joint = meter.measure("again", {g.tensors[0]: chosen[g.name] for g in groups})
    assert meter.unsafe(joint) == []


def test_safe_together_is_left_alone() -> None:
    groups, prices, meter, options = made(1.0, at_q2=0.001)
    lowest = {g.name: "Q2_K" for g in groups}
    chosen, _ = settle(meter, groups, prices, lowest, options)
    assert chosen == lowest
    assert len(meter.rounds) == 1
    assert meter.rounds[0]["raised"] == []


def test_hopeless_thresholds_end_at_the_top_and_say_so() -> None:
    groups, prices, meter, options = made(1.0, at_q2=1e6)
    chosen, _ = settle(meter, groups, prices, {g.name: "Q2_K" for g in groups}, options)
    assert set(chosen.values()) == {"Q8_0"}
    assert meter.rounds[-1]["not_shown_safe"] == ["code", "chat"]


def test_too_little_text_ends_at_once() -> None:
    groups, prices, meter, options = made(1.0, half=None)
    lowest = {g.name: "Q2_K" for g in groups}
    chosen, _ = settle(meter, groups, prices, lowest, options)
    assert chosen == lowest
    assert len(meter.rounds) == 1


def test_tightrope_lies_between_its_neighbours() -> None:
    groups, prices, meter, options = made(1.0)
    bedrock = {g.name: "Q4_K" for g in groups}
    gambit = {g.name: "Q3_K" for g in groups}
    found, how = balance(meter, groups, prices, bedrock, gambit, options, None, {})
    sizes = [
        options.layout_bytes({g.tensors[0]: s[g.name] for g in groups})
        for s in (bedrock, found, gambit)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(how["curve"]) == 5
    named, _ = balance(meter, groups, prices, bedrock, gambit, options, sizes[0] - 600, {})
    assert options.layout_bytes({g.tensors[0]: named[g.name] for g in groups}) <= sizes[0] - 600
    with pytest.raises(BudgetError, match="between"):
        balance(meter, groups, prices, bedrock, gambit, options, 10, {})
