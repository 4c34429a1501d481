"""Stage 2: one imatrix per category; every mix of them is then arithmetic.

A mix is by shares, not by tokens seen: the mean squared activations of each category are added
with the mix's weights, so a large general text cannot drown a small task, and another mix later
costs no new pass over the text.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.corpora.records import Chunk, Corpus
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_collect import IMATRIX_VERSION, collect_imatrix
from bitwright.engine.imatrix_coverage import coverage_notes
from bitwright.engine.imatrix_file import read_imatrix, write_imatrix
from bitwright.engine.imatrix_merge import merge_imatrices
from bitwright.engine.session import Session
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import chunks_sha256, key_of
from bitwright.workflows.spec import Mix

SHOWN_NOTES = 6

Imatrices = Mapping[str, Imatrix]


def collect_imatrices(ctx: RunContext, corpora: Mapping[str, Corpus]) -> tuple[Imatrices, str]:
    """The 'general' and the 'task' imatrix, from the run folder or collected, and the key."""
    mixes = {"general": dict(ctx.spec.imatrix.general), "task": dict(ctx.spec.imatrix.task)}
    described = "; ".join(f"{name} = {describe_mix(mix)}" for name, mix in mixes.items())
    ctx.reporter.stage("imatrix", described)
    needed = [c for c in ctx.categories if any(c in mix for _, mix in ctx.spec.imatrix.named())]
    keys = _collect_categories(ctx, {c: corpora[c].split("calibrate") for c in needed})
    inputs = {"mixes": mixes, "categories": keys}
    key = key_of("imatrix", inputs)
    result = ctx.folder.stage("imatrix", key, lambda: _merge(ctx, mixes), inputs=inputs)
    notes = result["task"].get("notes", ())
    for note in notes[:SHOWN_NOTES]:
        ctx.reporter.note(note)
    if len(notes) > SHOWN_NOTES:
        ctx.reporter.note(f"and {len(notes) - SHOWN_NOTES} more such tensors: see the report")
    return {n: read_imatrix(ctx.folder.path / "imatrix" / f"{n}.gguf") for n in mixes}, key


def describe_mix(mix: Mix) -> str:
    """``70 % code + 30 % general``."""
    total = sum(mix.values())
    return " + ".join(f"{100 * share / total:.3g} % {c}" for c, share in mix.items())


def mixed_imatrix(ctx: RunContext, mix: Mix) -> Imatrix:
    """The imatrix of a mix, from those of its categories in the run folder."""
    folder = ctx.folder.path / "imatrix"
    return merge_imatrices(
        [(read_imatrix(folder / f"category-{c}.gguf"), part) for c, part in mix.items()]
    )


def _collect_categories(ctx: RunContext, chunks: Mapping[str, tuple[Chunk, ...]]) -> dict[str, str]:
    """Collect what the run folder does not hold yet; the key of each category's imatrix."""
    inputs = {
        c: {
            "model": ctx.model.sha256(),
            "chunks": chunks_sha256(found),
            "version": IMATRIX_VERSION,
        }
        for c, found in chunks.items()
    }
    keys = {c: key_of("imatrix-category", given, ctx.engine_key()) for c, given in inputs.items()}
    todo = [c for c in chunks if not ctx.folder.is_done(f"imatrix-{c}", keys[c])]
    if not todo:
        return keys
    ctx.folder.check_writable()
    total, done = sum(len(chunks[c]) for c in todo), 0
    with Session(ctx.model, ctx.options) as session:
        for category in todo:

            def step(count: int, *, before: int = done, label: str = category) -> None:
                ctx.reporter.step(before + count, total, label)

            def compute(category: str = category) -> tuple[dict[str, Any], list[Path]]:
                batches = [(chunk.tokens, chunk.starts) for chunk in chunks[category]]
                found = collect_imatrix(session, batches, dataset=category, progress=step)
                return _save(ctx, f"category-{category}", found)

            ctx.folder.stage(
                f"imatrix-{category}", keys[category], compute, inputs=inputs[category]
            )
            done += len(chunks[category])
    return keys


def _merge(ctx: RunContext, mixes: Mapping[str, Mix]) -> tuple[dict[str, Any], list[Path]]:
    result: dict[str, Any] = {}
    files: list[Path] = []
    for name, mix in mixes.items():
        result[name], written = _save(ctx, name, mixed_imatrix(ctx, mix))
        files += written
    return result, files


def _save(ctx: RunContext, name: str, imatrix: Imatrix) -> tuple[dict[str, Any], list[Path]]:
    path = ctx.folder.file("imatrix", f"{name}.gguf")
    write_imatrix(imatrix, path)
    notes = list(coverage_notes(imatrix))
    facts = {"sha256": imatrix.sha256(), "chunks": imatrix.chunk_count, "notes": notes}
    return facts, [path]
