"""The whole path, read top to bottom:

build_corpora → collect_imatrices → choose_mix → measure_damage → allocate → score → write_model →
report
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.allocator.layout import Layout, layout_sha256
from bitwright.allocator.names import HonestName, file_stem, honest_name, nominal_ftype
from bitwright.corpora.records import Chunk, Corpus
from bitwright.corpora.store import corpus_sha256
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_file import write_imatrix
from bitwright.engine.quantized_file import Provenance, predict_size
from bitwright.eval.divergence import Candidate, ScoreTable
from bitwright.eval.scores import Comparison, compare, kld_ratio
from bitwright.eval.suite import DivergenceSuite, load_suite
from bitwright.report.wording import ratio_text
from bitwright.workflows.context import RunContext
from bitwright.workflows.mixes import TASK
from bitwright.workflows.preflight import Plan
from bitwright.workflows.result import FileEntry, build_result
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.spec import WorkflowSpec
from bitwright.workflows.stage_allocate import Allocation, allocate, stock_label
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import make_packer, measure_damage
from bitwright.workflows.stage_evaluate import (
    Scored,
    record_scores,
    report_options,
    score_on,
    split_chunks,
)
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_mix import choose_mix
from bitwright.workflows.stage_quantize import WrittenFile, provenance, write_model
from bitwright.workflows.stage_report import command_of, describe_run, write_report

OURS = "ours"


@dataclass(frozen=True, slots=True)
class RunResult:
    """result.json as a dictionary, and the files that the run left."""

    result: dict[str, Any]
    files: tuple[Path, ...]


def run_pipeline(ctx: RunContext, plan: Plan, model_name: str) -> RunResult:
    """Run every stage of a checked plan that the run folder does not hold yet.

    Raises:
        BitwrightError: see each stage; what was measured stays in the run folder.
    """
    suite = load_suite("divergence")
    corpora, _ = build_corpora(ctx)
    collected, collected_key = collect_imatrices(ctx, corpora)
    mix = choose_mix(ctx, plan, corpora, collected, collected_key, suite)
    damage_map, damage_key = measure_damage(
        ctx, corpora, mix.imatrices["task"], mix.key, plan.budget_bytes
    )
    allocation = allocate(ctx, plan, corpora, damage_map, mix, suite)
    imatrices = {**mix.imatrices, **allocation.mixes}
    entries = report_entries(ctx, plan, allocation)
    scored = score_report(ctx, corpora, entries, imatrices)
    baseline = stock_label(ctx.spec.baseline, "task")
    ours = f"{OURS}-{allocation.imatrix}"
    comparison = compare(scored.table, ours, baseline, ctx.spec.target, suite)
    chosen, verdict = decide(plan, ctx.spec, allocation, comparison)
    if allocation.reason:
        ctx.reporter.note(allocation.reason)
    entry = next(entry for entry in entries if entry.label == chosen)
    recipe = recipe_sha256(ctx, corpora, damage_key)
    written, name = write_chosen(ctx, plan, entry, imatrices[entry.imatrix], recipe, corpora)
    entries = [with_written(entry, chosen, written) for entry in entries]
    result = build_result(
        ctx.model,
        model_name,
        ctx.spec.target,
        plan.budget_bytes,
        entries,
        comparison,
        verdict,
        chosen,
        scored.table,
        suite,
        allocation.predicted_over_measured(allocation.ours, ctx.spec.target),
    )
    result["reason"] = allocation.reason
    result["command"] = command_of(ctx, model_name)
    if ctx.spec.damage.mode == "prior":
        result["not_measured"] = damage_map.notes[0]
    if mix.record is not None:
        result["imatrix_mix"] = dict(mix.record)
    if allocation.imatrix != TASK:
        result["study_mix"] = study_mix(ctx, allocation, scored.table, suite)
    result["price"] = kept_prices(allocation.prices, comparison)
    described = describe_run(
        ctx, {entry.label: entry.types for entry in entries}, {chosen: name}, recipe
    )
    record_scores(ctx, "evaluate", scored, split_chunks(ctx, corpora, "report"), described)
    result_path = ctx.folder.path / "result.json"
    write_atomic(result_path, json.dumps(result, indent=1, allow_nan=False).encode())
    reports = write_report(ctx.folder)
    return RunResult(result, (*written.paths, *reports, result_path))


def report_entries(ctx: RunContext, plan: Plan, allocation: Allocation) -> list[FileEntry]:
    """What is scored at the end: stock and ours, each with both imatrices, and the rivals.

    Also with the imatrix that a study chose, where that is a third.
    """
    spec = ctx.spec
    entries = [
        FileEntry(
            stock_label(ftype, imatrix), ftype, imatrix, plan.stock_bytes[ftype], plan.stock[ftype]
        )
        for ftype, imatrix in (
            (spec.baseline, "general"),
            (spec.baseline, "task"),
            *((rival, "task") for rival in spec.rivals),
        )
    ]
    ours = allocation.candidates[allocation.ours]
    for control, found in allocation.controls(spec.target).items():
        entries.append(FileEntry(f"{control}-task", control, "task", found.size_bytes, found.types))
    names = ["general", TASK]
    if ours.imatrix not in names:
        names.append(ours.imatrix)
        ftype = spec.baseline
        label = stock_label(ftype, ours.imatrix)
        size, types = plan.stock_bytes[ftype], plan.stock[ftype]
        entries.append(FileEntry(label, ftype, ours.imatrix, size, types))
    for imatrix in names:
        label = f"{OURS}-{imatrix}"
        entries.append(FileEntry(label, OURS, imatrix, ours.size_bytes, ours.types))
    return entries


def study_mix(
    ctx: RunContext, allocation: Allocation, table: ScoreTable, suite: DivergenceSuite
) -> dict[str, Any]:
    """The imatrix that a study chose in place of the task imatrix, kept as a file, and its part.

    ``over_task``: target KLD with it / with the task imatrix, for ours and for the baseline.
    """
    name, target = allocation.imatrix, ctx.spec.target
    path = ctx.folder.file("imatrix", f"{name}.gguf")
    write_imatrix(allocation.mixes[name], path)
    over = {
        label: kld_ratio(table, f"{label}-{name}", f"{label}-{TASK}", target, suite).as_dict()
        for label in (OURS, f"stock-{ctx.spec.baseline}")
    }
    shown = " and ".join(f"{ratio_text(ratio)} with {label}" for label, ratio in over.items())
    return {
        "imatrix": name,
        "file": f"imatrix/{path.name}",
        "over_task": over,
        "sentence": f"{allocation.candidates[allocation.ours].how}: {shown} of the {target} KLD"
        " with the declared one",
    }


def score_report(
    ctx: RunContext,
    corpora: Mapping[str, Corpus],
    entries: list[FileEntry],
    imatrices: Mapping[str, Imatrix],
) -> Scored:
    """Every entry on the report split, in memory."""
    candidates = [
        Candidate(
            entry.label,
            entry.types,
            make_packer(ctx, entry.imatrix, imatrices[entry.imatrix]),
            imatrices[entry.imatrix].sha256(),
        )
        for entry in entries
    ]
    chunks = split_chunks(ctx, corpora, "report")
    return score_on(ctx, "report", candidates, chunks, report_options(ctx))


def decide(
    plan: Plan, spec: WorkflowSpec, allocation: Allocation, comparison: Comparison
) -> tuple[str, str]:
    """(label to write, verdict): ours, unless select or report speaks against it.

    A baseline that does not fit the budget is compared, never written. The ratio of result.json
    always compares our best candidate with the baseline, whichever of the two is written.
    """
    if not (allocation.keep_stock or comparison.verdict == "worse"):
        return comparison.label, comparison.verdict
    own, stock = allocation.measured[allocation.ours], allocation.measured[comparison.baseline]
    limits = {spec.target: 0.0, **allocation.prices}
    over = any(own[c] > (1 + e) * stock[c] for c, e in limits.items() if c in own and c in stock)
    worse = comparison.verdict == "worse" or over
    if plan.stock_bytes[spec.baseline] > plan.budget_bytes:
        kept = "worse, and the baseline does not fit the budget"
        return comparison.label, kept if worse else "no difference shown"
    return comparison.baseline, "worse, baseline written" if worse else "no difference shown"


def kept_prices(prices: Mapping[str, float], comparison: Comparison) -> dict[str, Any]:
    """Off-target category → declared most, measured ratio, and whether the report split keeps it.

    ``kept`` is None where nothing could be measured.
    """
    found = {}
    for category, epsilon in prices.items():
        ratio = comparison.off_target[category].value if category in comparison.off_target else None
        most = 1.0 + epsilon
        kept = None if ratio is None else ratio <= most
        found[category] = {"most": most, "ratio": ratio, "kept": kept}
    return found


def recipe_sha256(ctx: RunContext, corpora: Mapping[str, Corpus], damage_key: str) -> str:
    """Hash of all that decides the file: what the workflow says, the text, the model.

    Without the paths of the recipes, so that a copy in another folder gives the same file.
    """
    spec = ctx.spec.model_dump(mode="json", exclude={"corpora", "description"})
    text = {name: corpus_sha256(corpus) for name, corpus in corpora.items()}
    return key_of(spec, text, ctx.model.sha256(), damage_key)


def write_chosen(
    ctx: RunContext,
    plan: Plan,
    entry: FileEntry,
    imatrix: Imatrix,
    recipe: str,
    corpora: Mapping[str, Corpus],
) -> tuple[WrittenFile, str]:
    """The GGUF, under a name that its types have earned; and that name with its reason.

    Upstream's own layout keeps its own name; where only the provenance would make it larger than
    the budget, it goes without.
    """
    types, split = entry.types, ctx.keep_split
    layout = layout_sha256(Layout(types))
    origin: Provenance | None = provenance(ctx, plan.budget_bytes, recipe=recipe, layout=layout)
    predicted = predict_size(ctx.model, types, origin, keep_split=split)
    if entry.layout != OURS:
        named = HonestName(entry.layout, "llama.cpp's own layout of that name")
        ftype = entry.layout
        if predicted > plan.budget_bytes:
            origin = None
            predicted = predict_size(ctx.model, types, None, keep_split=split)
    else:
        named = honest_name(types, ctx.model, target=ctx.spec.target, size_bytes=predicted)
        ftype = nominal_ftype(types, ctx.model)
    written = write_model(
        ctx,
        types,
        imatrix,
        origin,
        file_stem(ctx.model.name, ctx.spec.target, named.name),
        first_chunk(corpora[ctx.spec.target]),
        ftype=ftype,
        keep_split=split,
        predicted_bytes=predicted,
        imatrix_name=entry.imatrix,
    )
    return written, f"{named.name}: {named.reason}"


def first_chunk(corpus: Corpus) -> Chunk:
    """The chunk on which the written file's logits are compared with the layout's."""
    return (corpus.split("report") or corpus.split("calibrate"))[0]


def with_written(entry: FileEntry, chosen: str, written: WrittenFile) -> FileEntry:
    """The entry, with the file's path and size if it is the one that was written."""
    if entry.label != chosen:
        return entry
    return FileEntry(
        entry.label,
        entry.layout,
        entry.imatrix,
        written.size_bytes,
        entry.types,
        str(written.paths[0]),
    )
