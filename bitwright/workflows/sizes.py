"""Whole-model layouts of many sizes, and what they score: shared by sweeps and variants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.corpora.records import Corpus
from bitwright.engine.ggml_types import TYPES, fallback_type, tensor_type
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_coverage import uncovered
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.eval.breakage import Breakage, SizeScores, breakage
from bitwright.eval.divergence import Candidate, ScoreTable
from bitwright.eval.item_scores import headlines, is_executed, new_failures, size_scores
from bitwright.eval.outcome import TaskResult
from bitwright.eval.scores import scores_of
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.preflight import stock_layout
from bitwright.workflows.stage_evaluate import report_options, score_on, split_chunks
from bitwright.workflows.stage_items import REFERENCE, Results, SizedLayout, score_sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes with their token tables and item results; ``breaks``: by category, on the headline."""

    layouts: tuple[SizedLayout, ...]
    table: ScoreTable
    items: Results
    paired: Mapping[str, SizeScores]
    breaks: Mapping[str, Breakage]
    executed: tuple[str, ...]


def sized(model: ModelFile, label: str, family: str, types: Mapping[str, str]) -> SizedLayout:
    """A layout with the exact bytes of its file (without provenance) and its bits per weight."""
    size = predict_size(model, types, None)
    return SizedLayout(label, family, types, size, bits_per_weight(model, size))


def bits_per_weight(model: ModelFile, size_bytes: int) -> float:
    """Of the whole file, over all weights."""
    return 8 * size_bytes / sum(info.n_elements for info in model.tensors)


def stock_sizes(ctx: RunContext, names: Sequence[str]) -> list[SizedLayout]:
    """Upstream's own layouts, with an imatrix at hand."""
    return [sized(ctx.model, f"stock-{n}", "stock", stock_layout(ctx, n)) for n in names]


def uniform_sizes(
    model: ModelFile, names: Sequence[str], embedding: str, imatrix: Imatrix | None
) -> list[SizedLayout]:
    """One type for the whole body."""
    return [
        sized(model, f"uniform-{kind}", "ours", uniform_layout(model, kind, embedding, imatrix))
        for kind in (tensor_type(name).name for name in names)
    ]


def uniform_layout(
    model: ModelFile, kind: str, embedding: str, imatrix: Imatrix | None
) -> dict[str, str]:
    """``kind`` for the body, the larger of it and ``embedding`` for embeddings and output.

    A tensor whose rows cannot take the type gets llama.cpp's replacement; one that has no
    importance for it gets ``embedding``'s type. ``imatrix`` None: one that covers all is to come.
    """
    heads = max((kind, tensor_type(embedding).name), key=lambda name: TYPES[name].bpw)
    types = {}
    for info in model.tensors:
        if is_quantizable(info, model.arch):
            wanted = kind if is_body(info.name) else heads
            if imatrix is not None and uncovered({info.name: wanted}, imatrix):
                wanted = heads
            types[info.name] = fallback_type(wanted, info.n_per_row)
    return types


def measure_sizes(
    ctx: RunContext,
    folder: str,
    layouts: Sequence[SizedLayout],
    corpora: Mapping[str, Corpus],
    packer: Packer,
    imatrix: Imatrix,
    *,
    split: str = "report",
    half: int = 0,
    n_items: int | None = None,
) -> Measured:
    """KLD of every size on a split, and every executed task; resumes in the run folder.

    ``n_items``: of each task, where fewer than the workflow's are enough.
    """
    settings = ctx.spec.scores
    if n_items is not None:
        settings = settings.model_copy(update={"items": min(settings.items, n_items)})
    ordered = tuple(sorted(layouts, key=lambda one: (-one.size_bytes, one.label)))
    key = imatrix.sha256()
    candidates = [Candidate(one.label, one.types, packer, key) for one in ordered]
    scored = score_on(
        ctx, folder, candidates, split_chunks(ctx, corpora, split), report_options(ctx)
    )
    items = score_sizes(ctx, ordered, packer, key, settings, half)
    reference = headlines(items[REFERENCE])
    tasks = {c: r for c, r in reference.items() if r.outcomes}
    bpw = [one.bpw for one in ordered]
    paired = {
        c: size_scores(task, [_same(items[one.label], task) for one in ordered], bpw)
        for c, task in tasks.items()
    }
    breaks = {c: breakage(scores, ctx.spec.scores.max_loss) for c, scores in paired.items()}
    executed = tuple(c for c, task in tasks.items() if is_executed(task))
    return Measured(ordered, scored.table, items, paired, breaks, executed)


def harmed_layout(measured: Measured, category: str) -> SizedLayout | None:
    """The largest size at which the category is shown harmed; None where none is."""
    found = measured.breaks.get(category)
    states = [] if found is None else [drop.state for drop in found.drops]
    return measured.layouts[states.index("harmed")] if "harmed" in states else None


def _same(results: Sequence[TaskResult], task: TaskResult) -> TaskResult:
    return next(result for result in results if result.name == task.name)


def scores_json(measured: Measured, layout: SizedLayout) -> dict[str, dict[str, Any]]:
    """{category: KLD and executed scores} of one size; what was not measured is left out."""
    suite = load_suite("divergence")
    divergence = scores_of(measured.table, layout.label, suite)
    results: dict[str, dict[str, Any]] = {c: dict(entry) for c, entry in divergence.items()}
    for task in measured.items[layout.label]:
        entry = results.setdefault(task.category, {})
        entry.setdefault("tasks", {})[task.name] = _summary(task)
    for category, found in measured.breaks.items():
        drop = found.drops[measured.layouts.index(layout)]
        headline = headlines(measured.items[REFERENCE])[category]
        entry = results.setdefault(category, {})
        entry |= {"task": headline.name, "metric": headline.metric, "reference": found.reference}
        entry |= {"n": found.n_items, "against_reference": drop.as_dict(), "state": drop.state}
        entry["value"] = found.reference - drop.value
        if category in measured.executed:
            entry["new_failures"] = new_failures(
                headline, _same(measured.items[layout.label], headline)
            )
    return results


def reference_json(ctx: RunContext, measured: Measured) -> dict[str, Any]:
    """The original on the same items, as a row beside the sizes."""
    results: dict[str, dict[str, Any]] = {}
    tasks = measured.items[REFERENCE]
    for category, headline in headlines(tasks).items():
        entry: dict[str, Any] = {"task": headline.name, "metric": headline.metric}
        if category in measured.breaks:
            found = measured.breaks[category]
            entry |= {"n": found.n_items, "value": found.reference, "reference": found.reference}
        entry["tasks"] = {t.name: _summary(t) for t in tasks if t.category == category}
        results[category] = entry
    size = ctx.model.size_bytes
    return {
        "label": f"original {ctx.model.reference_type}",
        "bpw": round(bits_per_weight(ctx.model, size), 4),
        "size_bytes": size,
        "scores": results,
    }


def _summary(task: TaskResult) -> dict[str, object]:
    return {k: v for k, v in task.summary().items() if k != "category"}


def size_json(measured: Measured, layout: SizedLayout) -> dict[str, Any]:
    """One entry of ``sizes``."""
    return {
        "label": layout.label,
        "family": layout.family,
        "bpw": round(layout.bpw, 4),
        "size_bytes": layout.size_bytes,
        "scores": scores_json(measured, layout),
    }
