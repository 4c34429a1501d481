"""Stage 6: the final numbers, on text that nothing was tuned on, scored once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.corpora.records import Chunk, Corpus
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.working_type import resolve_working_type
from bitwright.errors import StorageError
from bitwright.eval.divergence import (
    Candidate,
    ScoreTable,
    document_ids,
    noise_floor,
    score_layouts,
)
from bitwright.eval.tokens import load_tables, save_tables
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
    """The final numbers are against the file as it is, in its own type.

    But in the type that the user named, and in F16 for a BF16 file on a CPU without BF16: the
    values are the same down to 6e-5, and emulated BF16 takes several times longer.
    """
    options = ctx.options
    if options.working_type != "auto":
        return options
    resolved = resolve_working_type("auto", ctx.model.reference_type, options.gpu_layers)
    emulated = ctx.model.reference_type == "BF16" and resolved == "F16"
    return options if emulated else replace(options, working_type="file")


def score_on(
    ctx: RunContext,
    stage: str,
    candidates: Sequence[Candidate],
    chunks: Chunks,
    options: SessionOptions,
) -> Scored:
    """Score layouts against the reference; finished parts are taken from the run folder.

    ``stage`` names the folder of the token tables ('select' or 'report'). A rerun of a finished
    one loads no model.
    """
    reference = key_of(
        "reference", ctx.model.sha256(), ctx.engine_key(), options.working_type, METRICS_VERSION
    )
    inputs = {
        "reference": reference,
        "chunks": {c: chunks_sha256(found) for c, found in chunks.items()},
        "documents": {c: key_of(document_ids(found)) for c, found in chunks.items()},
        "layouts": {c.label: key_of(dict(c.layout), c.key) for c in candidates},
    }
    key = key_of(stage, inputs)
    paths = {
        c.label: ctx.folder.file(stage, "scores", f"{number}.npz")
        for number, c in enumerate(candidates)
    }
    n_chunks = sum(len(found) for found in chunks.values())
    ctx.reporter.stage(stage, f"{len(candidates)} layouts and the reference on {n_chunks} chunks")

    def compute() -> tuple[dict[str, Any], list[Path]]:
        store = ctx.folder.file(stage, "tokens", "x").parent
        with Session(ctx.model, options) as session:
            noise = noise_floor(session, chunks)
            table = score_layouts(
                session, candidates, chunks, store=store, key=reference, progress=ctx.reporter.step
            )
        for label, path in paths.items():
            save_tables([table.table(label, c) for c in table.categories], path, key)
        return {"noise_nats": noise}, list(paths.values())

    # What two runs must have in common to be compared; the key holds it as `reference`.
    told = {
        "model": ctx.model.sha256(),
        "engine": {**ctx.engine_key(), "working_type": options.working_type},
        "metrics": METRICS_VERSION,
    }
    result = ctx.folder.stage(f"{stage}-scores", key, compute, inputs={**inputs, **told})
    return Scored(_loaded(paths, chunks, key), result["noise_nats"])


def _loaded(paths: Mapping[str, Path], chunks: Chunks, key: str) -> ScoreTable:
    """The tables that `score_on` has just saved, or an earlier run."""
    documents = {c: document_ids(found) for c, found in chunks.items()}
    tables = {}
    for label, path in paths.items():
        found = load_tables(path, key, label, documents)
        if found is None:
            raise StorageError(f"the scores in {path} are damaged: remove the file and run again")
        tables.update({(label, table.category): table for table in found})
    return ScoreTable(tuple(paths), tuple(documents), tables)


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
