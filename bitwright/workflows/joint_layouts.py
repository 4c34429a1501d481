"""Three whole layouts from group ladders: Bedrock, Gambit one step past it, Tightrope between."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.variants import (
    Group,
    assembled,
    between,
    check_size,
    curve_budgets,
    damage_share,
    knee,
    one_past,
    priced,
)
from bitwright.corpora.records import Corpus
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.workflows.bedrock import Steps, settle
from bitwright.workflows.context import RunContext
from bitwright.workflows.layout_meter import Meter
from bitwright.workflows.stage_ladders import Ladders


@dataclass(frozen=True, slots=True)
class Builds:
    """Steps of each build by group, whole layouts, and what was done to get there."""

    steps: Mapping[str, Steps]
    types: Mapping[str, Mapping[str, str]]
    rounds: Sequence[Mapping[str, Any]]
    tightrope: Mapping[str, Any]


def build_layouts(
    ctx: RunContext,
    groups: Sequence[Group],
    ladders: Ladders,
    thresholds_nats: Mapping[str, float],
    options: OptionSet,
    corpora: Mapping[str, Corpus],
    packer: Packer,
    imatrix: Imatrix,
    size_bytes: int | None,
) -> Builds:
    """Bedrock, Gambit and Tightrope.

    Raises:
        BudgetError: the size named for Tightrope is not between the other two.
    """
    ctx.reporter.stage("builds", "whole layouts on the select split")
    prices = {g.name: _completed(g, priced(g, _values(ladders, g))) for g in groups}
    lowest = {g.name: ladders.lowest_safe[g.name] or g.steps[0] for g in groups}
    with Meter(ctx, corpora, packer, imatrix, thresholds_nats) as meter:
        bedrock, correction = settle(meter, groups, prices, lowest, options)
        gambit = {g.name: one_past(g, bedrock[g.name]) for g in groups}
        tightrope, how = balance(
            meter, groups, prices, bedrock, gambit, options, size_bytes, correction
        )
    steps = {"Bedrock": bedrock, "Tightrope": tightrope, "Gambit": gambit}
    types = {name: options.complete(assembled(groups, s)) for name, s in steps.items()}
    return Builds(steps, types, meter.rounds, how)


def _values(ladders: Ladders, group: Group) -> dict[str, dict[str, float]]:
    return {
        step: {c: i.value or 0.0 for c, i in found.items()}
        for step, found in ladders.damages[group.name].items()
    }


def _completed(
    group: Group, prices: Mapping[str, Mapping[str, float]]
) -> dict[str, Mapping[str, float]]:
    """A price for every step: below the lowest measured one, that one's, four times a bit."""
    found = dict(prices)
    last: Mapping[str, float] = {}
    for step in group.steps:
        if step in found:
            last = found[step]
        else:
            found[step] = last = {c: 4.0 * nats for c, nats in last.items()}
    return found


def balance(
    meter: Meter,
    groups: Sequence[Group],
    prices: Mapping[str, Mapping[str, Mapping[str, float]]],
    bedrock: Steps,
    gambit: Steps,
    options: OptionSet,
    size_bytes: int | None,
    correction: Mapping[str, float],
) -> tuple[Steps, dict[str, Any]]:
    """Tightrope's steps: at the named size, or at the knee of the measured curve."""
    thresholds = {c: t / correction.get(c, 1.0) for c, t in meter.thresholds_nats.items()}
    high = options.layout_bytes(assembled(groups, bedrock))
    low = options.layout_bytes(assembled(groups, gambit))
    fixed = high - sum(g.size_bytes[bedrock[g.name]] for g in groups)

    def at(size: int) -> Steps:
        return between(groups, prices, bedrock, gambit, thresholds, size - fixed)

    if size_bytes is not None:
        check_size(size_bytes, low, high)
        return at(size_bytes), {"how": "at the named size", "size_bytes": size_bytes}
    budgets = curve_budgets(high, low, meter.ctx.spec.variants.curve_points)
    curve = [bedrock, *(at(size) for size in budgets), gambit]
    distinct = [s for i, s in enumerate(curve) if s not in curve[:i]]
    sizes = [options.layout_bytes(assembled(groups, s)) for s in distinct]
    shares = []
    for i, steps in enumerate(distinct):
        joint = meter.measure(f"curve-{i}", options.complete(assembled(groups, steps)))
        nats = {c: one.value or 0.0 for c, one in joint.items()}
        shares.append(damage_share(nats, meter.thresholds_nats))
    index, found = knee(sizes, shares)
    return distinct[index], {
        "how": "at the knee of the curve" if found else "no knee found: middle of the sizes",
        "curve": [list(point) for point in zip(sizes, shares, strict=True)],
    }
