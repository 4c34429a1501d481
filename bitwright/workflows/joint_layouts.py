"""Three whole layouts from group ladders, each measured whole on the select split.

What is safe alone may not be safe together: Bedrock backs off until the joint damage is shown
under every threshold, and every round is recorded.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.variants import (
    Group,
    assembled,
    back_off,
    between,
    check_size,
    curve_budgets,
    damage_share,
    knee,
    next_correction,
    one_past,
    predicted,
    priced,
)
from bitwright.corpora.records import Corpus
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.errors import BudgetError
from bitwright.eval.divergence import Candidate, KeptReferences, score_layouts
from bitwright.eval.scores import category_rng
from bitwright.eval.statistics import Interval
from bitwright.eval.suite import load_suite
from bitwright.eval.thresholds import state_of
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of
from bitwright.workflows.stage_evaluate import report_options, split_chunks
from bitwright.workflows.stage_ladders import RESAMPLES, Ladders, kld_interval

Steps = dict[str, str]  # group → step
Joint = dict[str, Interval]  # category → KLD of the whole layout


@dataclass(frozen=True, slots=True)
class Builds:
    """Steps of each build by group, whole layouts, and what was done to get there."""

    steps: Mapping[str, Steps]
    types: Mapping[str, Mapping[str, str]]
    rounds: Sequence[Mapping[str, Any]]
    tightrope: Mapping[str, Any]


class Meter:
    """Measures whole layouts on the select split, each once; a context manager.

    The model is loaded at the first layout that the run folder does not hold, and its references
    are made once for all layouts.
    """

    def __init__(
        self,
        ctx: RunContext,
        corpora: Mapping[str, Corpus],
        packer: Packer,
        imatrix: Imatrix,
        thresholds_nats: Mapping[str, float],
    ) -> None:
        self.ctx, self.packer, self.imatrix_sha256 = ctx, packer, imatrix.sha256()
        self.thresholds_nats = thresholds_nats
        self.rounds: list[dict[str, Any]] = []
        self.chunks = split_chunks(ctx, corpora, "select")
        self.key = key_of("reference", ctx.model.sha256(), ctx.engine_key(), METRICS_VERSION)
        self.known: dict[str, Joint] = {}  # by layout
        self.stack = ExitStack()
        self.session: Session | None = None
        self.kept = KeptReferences()

    def measure(self, label: str, types: Mapping[str, str]) -> Joint:
        """KLD of each category with its interval."""
        layout = key_of(dict(types), self.imatrix_sha256)
        if layout not in self.known:
            self.known[layout] = self._measured(label, types, layout)
        return self.known[layout]

    def unsafe(self, joint: Joint) -> list[str]:
        """Categories not shown under their threshold."""
        return [c for c, t in self.thresholds_nats.items() if state_of(joint[c], t) != "under"]

    def _measured(self, label: str, types: Mapping[str, str], layout: str) -> Joint:
        candidate = Candidate(label, types, self.packer, self.imatrix_sha256)
        inputs = {
            "reference": self.key,
            "chunks": {c: chunks_sha256(found) for c, found in self.chunks.items()},
            "layout": layout,
            "resamples": RESAMPLES,
        }

        def compute() -> tuple[dict[str, Any], list[Path]]:
            scored = score_layouts(
                self._open(), [candidate], self.chunks, kept=self.kept, progress=self._step
            )
            suite = load_suite("divergence")
            found = {
                c: kld_interval(
                    scored.table(label, c).select(suite.category(c).codes()),
                    category_rng(suite, c),
                )
                for c in self.chunks
            }
            return {c: interval.as_dict() for c, interval in found.items()}, []

        stage = f"joint/{label}"
        found = self.ctx.folder.stage(stage, key_of("joint", inputs), compute, inputs=inputs)
        return {c: Interval(**found[c]) for c in self.thresholds_nats}

    def _open(self) -> Session:
        if self.session is None:
            self.session = self.stack.enter_context(
                Session(self.ctx.model, report_options(self.ctx))
            )
        return self.session

    def _step(self, done: int, total: int, label: str) -> None:
        self.ctx.reporter.step(done, total, label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stack.close()


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


def settle(
    meter: Meter,
    groups: Sequence[Group],
    prices: Mapping[str, Mapping[str, Mapping[str, float]]],
    lowest: Mapping[str, str],
    options: OptionSet,
) -> tuple[Steps, dict[str, float]]:
    """Bedrock's steps, shown safe together if that is possible, and measured over predicted."""
    chosen: Steps = dict(lowest)
    correction: dict[str, float] = {}
    for number in range(1, meter.ctx.spec.variants.back_off_rounds + 1):
        joint = meter.measure(f"bedrock-{number}", options.complete(assembled(groups, chosen)))
        sums = predicted(groups, prices, chosen)
        unsafe = meter.unsafe(joint)
        meter.rounds.append(_round(number, chosen, lowest, sums, joint, unsafe))
        highs = {c: i.high if i.high is not None else (i.value or 0.0) for c, i in joint.items()}
        correction = next_correction(correction, sums, highs)
        if not unsafe:
            return chosen, correction
        if all(joint[c].high is None for c in unsafe):
            meter.ctx.reporter.note(
                f"too little text to show anything on {', '.join(unsafe)}: give more select chunks"
            )
            return chosen, correction
        meter.ctx.reporter.note(
            f"safe alone, not shown safe together on {', '.join(unsafe)}: backing off"
        )
        try:
            chosen = back_off(groups, prices, lowest, meter.thresholds_nats, correction, number)
        except BudgetError:
            chosen = {g.name: g.steps[0] for g in groups}
            meter.ctx.reporter.note("backed off to the top of every ladder")
    return chosen, correction


def _round(
    number: int,
    chosen: Steps,
    lowest: Mapping[str, str],
    sums: Mapping[str, float],
    joint: Joint,
    unsafe: Sequence[str],
) -> dict[str, Any]:
    return {
        "round": number,
        "raised": sorted(name for name, step in chosen.items() if step != lowest[name]),
        "predicted_nats": dict(sums),
        "measured_nats": {c: [i.value, i.low, i.high] for c, i in joint.items()},
        "not_shown_safe": list(unsafe),
    }


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
