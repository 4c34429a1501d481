"""Group ladders: each group of weights walks down the types alone, in memory, until it is decided.

A round takes one step in every ladder that is still open: first on a few chunks of each category,
then, only where an interval still holds the threshold, on twice as many, and so on. Each part is
stored as it is measured, so that a killed run goes on where it stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.allocator.variants import Group, StepState, next_step
from bitwright.corpora.records import Chunk
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.eval.cliff import Cliff, find_cliff
from bitwright.eval.divergence import Candidate, KeptReferences, score_layouts
from bitwright.eval.scores import category_rng
from bitwright.eval.statistics import Interval, paired_difference
from bitwright.eval.suite import DivergenceSuite, load_suite
from bitwright.eval.thresholds import SafeType, Step, safe_for_all, state_of
from bitwright.eval.tokens import TokenTable, concatenate
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of
from bitwright.workflows.sizes_spec import VariantSettings
from bitwright.workflows.stage_evaluate import report_options

RESAMPLES = 600  # a decision, not a number to publish; the builds are measured anew

Chunks = Mapping[str, Sequence[Chunk]]
Damages = dict[str, dict[str, dict[str, Interval]]]  # group → step → category


@dataclass(frozen=True, slots=True)
class Ladders:
    """Measured damages, the verdict of each group, and how much text was used."""

    damages: Damages
    lowest_safe: Mapping[str, str | None]
    verdicts: Mapping[str, Mapping[str, SafeType]]
    cliffs: Mapping[str, Mapping[str, Cliff]]
    passes: int


def measure_ladders(
    ctx: RunContext,
    groups: Sequence[Group],
    chunks: Chunks,
    thresholds_nats: Mapping[str, float],
    packer: Packer,
    imatrix: Imatrix,
    settings: VariantSettings,
) -> Ladders:
    """Walk every ladder, from the run folder or measured."""
    inputs = {
        "model": ctx.model.sha256(),
        "imatrix": imatrix.sha256(),
        "chunks": {c: chunks_sha256(found) for c, found in chunks.items()},
        "groups": {g.name: [list(g.steps), key_of(dict(g.layouts))] for g in groups},
        "thresholds": dict(thresholds_nats),
        "start": settings.start,
        "first_chunks": settings.first_chunks,
        "metrics": METRICS_VERSION,
    }
    key = key_of("ladders", inputs, ctx.engine_key())
    ctx.reporter.stage("ladders", f"{len(groups)} groups, down from {settings.start}")

    def compute() -> tuple[dict[str, Any], list[Path]]:
        with Session(ctx.model, report_options(ctx)) as session:
            walk = _Walk(ctx, session, groups, chunks, thresholds_nats, packer, imatrix.sha256())
            walk.run(settings)
        damages = {
            group: {
                step: {c: i.as_dict() for c, i in found.items()} for step, found in steps.items()
            }
            for group, steps in walk.damages.items()
        }
        return {"damages": damages, "passes": walk.passes}, []

    stored = ctx.folder.stage("ladders", key, compute, inputs=inputs)
    damages: Damages = {
        group: {s: {c: Interval(**i) for c, i in by.items()} for s, by in steps.items()}
        for group, steps in stored["damages"].items()
    }
    return judged(groups, damages, thresholds_nats, int(stored["passes"]))


def judged(
    groups: Sequence[Group],
    damages: Damages,
    thresholds_nats: Mapping[str, float],
    passes: int = 0,
) -> Ladders:
    """Safe types and cliffs of measured ladders."""
    lowest: dict[str, str | None] = {}
    verdicts: dict[str, dict[str, SafeType]] = {}
    cliffs: dict[str, dict[str, Cliff]] = {}
    for group in groups:
        by_category = {
            c: [
                Step(step, TYPES[step].bpw, damages[group.name][step][c])
                for step in group.steps
                if step in damages[group.name]
            ]
            for c in thresholds_nats
        }
        lowest[group.name], verdicts[group.name] = safe_for_all(by_category, thresholds_nats)
        cliffs[group.name] = {
            c: find_cliff([s.bpw for s in steps], [s.kld.value or 0.0 for s in steps])
            for c, steps in by_category.items()
        }
    return Ladders(damages, lowest, verdicts, cliffs, passes)


class _Walk:
    """The rounds of one measurement."""

    def __init__(
        self,
        ctx: RunContext,
        session: Session,
        groups: Sequence[Group],
        chunks: Chunks,
        thresholds_nats: Mapping[str, float],
        packer: Packer,
        imatrix_sha256: str,
    ) -> None:
        self.ctx, self.session, self.groups = ctx, session, groups
        self.chunks, self.thresholds = chunks, thresholds_nats
        self.packer, self.imatrix_sha256 = packer, imatrix_sha256
        self.suite: DivergenceSuite = load_suite("divergence")
        self.damages: Damages = {g.name: {} for g in groups}
        self.states: dict[str, dict[str, StepState]] = {g.name: {} for g in groups}
        self.passes = 0
        self.kept = KeptReferences()
        self.store = ctx.folder.file("ladders", "tokens", "x").parent
        self.key = key_of("reference", ctx.model.sha256(), ctx.engine_key(), METRICS_VERSION)

    def run(self, settings: VariantSettings) -> None:
        """Rounds until every ladder is decided."""
        start = TYPES[settings.start].bpw
        most = max(len(g.steps) for g in self.groups)
        for number in range(1, 2 * most + 1):
            taken = {g.name: next_step(g.steps, self.states[g.name], start) for g in self.groups}
            steps = {g: taken[g.name] for g in self.groups if taken[g.name] is not None}
            if not steps:
                return
            self.ctx.reporter.step(number, most, f"{len(steps)} ladders open")
            self._take({g: s for g, s in steps.items() if s is not None}, settings.first_chunks)

    def _take(self, steps: Mapping[Group, str], first_chunks: int) -> None:
        candidates = {
            g.name: Candidate(f"{g.name}@{s}", g.layouts[s], self.packer, self.imatrix_sha256)
            for g, s in steps.items()
        }
        tables: dict[tuple[str, str], TokenTable] = {}
        found: dict[str, dict[str, Interval]] = {name: {} for name in candidates}
        for part in batches(self.chunks, first_chunks):
            for category, chunks in part.items():
                open_ = {n: c for n, c in candidates.items() if self._open(found[n], category)}
                self._score(open_, category, chunks, tables, found)
        for group, step in steps.items():
            self.damages[group.name][step] = found[group.name]
            self.states[group.name][step] = self._state(found[group.name])

    def _open(self, found: Mapping[str, Interval], category: str) -> bool:
        known = found.get(category)
        return known is None or state_of(known, self.thresholds[category]) == "undecided"

    def _score(
        self,
        candidates: Mapping[str, Candidate],
        category: str,
        chunks: Sequence[Chunk],
        tables: dict[tuple[str, str], TokenTable],
        found: dict[str, dict[str, Interval]],
    ) -> None:
        if not (candidates and chunks):
            return
        scored = score_layouts(
            self.session,
            list(candidates.values()),
            {category: chunks},
            store=self.store,
            key=self.key,
            kept=self.kept,
        )
        self.passes += len(chunks) * len(candidates)
        codes = self.suite.category(category).codes()
        for name, candidate in candidates.items():
            table = scored.table(candidate.label, category).select(codes)
            held = tables.get((name, category))
            tables[name, category] = table if held is None else joined(held, table)
            found[name][category] = kld_interval(
                tables[name, category], category_rng(self.suite, category)
            )

    def _state(self, found: Mapping[str, Interval]) -> StepState:
        states = {state_of(kld, self.thresholds[c]) for c, kld in found.items()}
        if states == {"under"}:
            return "safe"
        return "over" if states == {"over"} else "mixed"


def batches(chunks: Chunks, first: int) -> list[dict[str, Sequence[Chunk]]]:
    """The first chunks of each category, then as many again as there were, and so on."""
    found: list[dict[str, Sequence[Chunk]]] = []
    begin, end = 0, first
    longest = max((len(one) for one in chunks.values()), default=0)
    while begin < longest:
        found.append({c: one[begin:end] for c, one in chunks.items()})
        begin, end = end, 2 * end
    return found


def joined(a: TokenTable, b: TokenTable) -> TokenTable:
    """Two tables of one (label, category) on different chunks; a document may be in both."""
    documents = tuple(dict.fromkeys((*a.documents, *b.documents)))
    place = {name: i for i, name in enumerate(documents)}
    parts = [
        replace(
            t,
            document=np.array([place[name] for name in t.documents], dtype=np.int32)[t.document],
            documents=documents,
        )
        for t in (a, b)
    ]
    return concatenate(parts)


def kld_interval(
    table: TokenTable, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Interval:
    """Mean KLD in nats with its 95 % interval over documents."""
    none = replace(table, kld=np.zeros_like(table.kld))
    return paired_difference(table, none, rng, resamples=resamples)
