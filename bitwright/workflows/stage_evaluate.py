"""Stage 6: the final numbers, on text that nothing was tuned on, scored once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.corpora.records import Chunk, Corpus
from bitwright.engine.session import Session, SessionOptions
from bitwright.eval.divergence import Candidate, ScoreTable, noise_floor, score_layouts
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of

Chunks = Mapping[str, Sequence[Chunk]]


@dataclass(frozen=True, slots=True)
class Scored:
    """Token tables of every file on one split, and the reference's noise against itself."""

    table: ScoreTable
    noise_nats: Mapping[str, float | None]


def split_chunks(ctx: RunContext, corpora: Mapping[str, Corpus], split: str) -> Chunks:
    """The chunks of one split, target first."""
    return {category: corpora[category].split(split) for category in ctx.categories}


def report_options(ctx: RunContext) -> SessionOptions:
    """The final numbers are against the file as it is, in its own type."""
    return replace(ctx.options, working_type="file")


def score_on(
    ctx: RunContext,
    stage: str,
    candidates: Sequence[Candidate],
    chunks: Chunks,
    options: SessionOptions,
) -> Scored:
    """Score layouts against the reference; finished parts are taken from the run folder.

    ``stage`` names the folder of the token tables ('select' or 'report').
    """
    store = ctx.folder.file(stage, "tokens", "x").parent
    key = key_of(
        "reference", ctx.model.sha256(), ctx.engine_key(), options.working_type, METRICS_VERSION
    )
    n_chunks = sum(len(found) for found in chunks.values())
    ctx.reporter.stage(stage, f"{len(candidates)} layouts and the reference on {n_chunks} chunks")
    with Session(ctx.model, options) as session:
        noise = noise_floor(session, chunks)
        table = score_layouts(
            session, candidates, chunks, store=store, key=key, progress=ctx.reporter.step
        )
    return Scored(table, noise)


def record_scores(
    ctx: RunContext, stage: str, scored: Scored, chunks: Chunks, result: dict[str, Any]
) -> None:
    """The stage's manifest: what was scored, on which chunks."""
    inputs = {
        "chunks": {c: chunks_sha256(found) for c, found in chunks.items()},
        "labels": list(scored.table.labels),
    }

    def compute() -> tuple[dict[str, Any], list[Path]]:
        return {**result, "noise_nats": dict(scored.noise_nats)}, []

    ctx.folder.stage(stage, key_of(stage, inputs, result), compute, inputs=inputs)
