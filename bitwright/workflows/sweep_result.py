"""The result of a sweep: thresholds of each category, what breaks first, and how."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitwright.eval.breakage import FirstToBreak, SizeScores, breakage
from bitwright.eval.cliff import find_cliff
from bitwright.eval.item_scores import first_failure, headlines, new_failures
from bitwright.eval.scores import mean_kld
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import versions
from bitwright.workflows.sizes import (
    Measured,
    bits_per_weight,
    harmed_layout,
    reference_json,
    size_json,
)
from bitwright.workflows.stage_items import REFERENCE, SizedLayout

SWEEP_SCHEMA = 1
SAME_SIZE = 0.001  # sizes nearer than this part are one point of a curve


def sweep_result(
    ctx: RunContext, measured: Measured, first: FirstToBreak | None, model_name: str
) -> dict[str, Any]:
    """The dictionary of result.json, without the explanation."""
    return {
        "schema": SWEEP_SCHEMA,
        "kind": "sweep",
        "model": model_name,
        "workflow": ctx.name,
        "reference_type": ctx.model.reference_type,
        "synthetic_reference": ctx.model.synthetic_reference,
        "reference_bpw": round(bits_per_weight(ctx.model, ctx.model.size_bytes), 4),
        "target": ctx.spec.target,
        "suites": [Path(name).stem for name in ctx.spec.scores.suites],
        "imatrix": dict(ctx.spec.imatrix.task),
        "versions": versions(),
        "max_loss": ctx.spec.scores.max_loss,
        "seed": ctx.spec.seed,
        "reference": reference_json(ctx, measured),
        "sizes": [size_json(measured, layout) for layout in measured.layouts],
        "thresholds": thresholds_json(measured, ctx.spec.scores.max_loss),
        "first_to_break": first_json(first, measured.executed),
    }


def by_family(
    measured: Measured, category: str, max_loss: float
) -> dict[str, dict[str, float | None]]:
    """The breakage interval among stock sizes alone, and among ours alone."""
    scores = measured.paired[category]
    found: dict[str, dict[str, float | None]] = {}
    for family in dict.fromkeys(layout.family for layout in measured.layouts):
        kept = [i for i, layout in enumerate(measured.layouts) if layout.family == family]
        part = SizeScores(category, scores.bpw[kept], scores.reference, scores.scores[kept])
        one = breakage(part, max_loss)
        found[family] = {
            "last_unharmed_bpw": one.last_unharmed_bpw,
            "first_harmed_bpw": one.first_harmed_bpw,
        }
    return found


def thresholds_json(measured: Measured, max_loss: float) -> dict[str, dict[str, Any]]:
    """The breakage interval of each category, in bpw and bytes, and whether its KLD has a cliff."""
    bytes_at = {layout.bpw: layout.size_bytes for layout in measured.layouts}
    suite = load_suite("divergence")
    found: dict[str, dict[str, Any]] = {}
    for category, one in measured.breaks.items():
        last, harmed = one.last_unharmed_bpw, one.first_harmed_bpw
        found[category] = {
            "last_unharmed_bpw": None if last is None else round(last, 4),
            "first_harmed_bpw": None if harmed is None else round(harmed, 4),
            "last_unharmed_bytes": None if last is None else bytes_at[last],
            "first_harmed_bytes": None if harmed is None else bytes_at[harmed],
            "n_items": one.n_items,
            "more_items": one.more_items,
            "executed": category in measured.executed,
            "task": headlines(measured.items[REFERENCE])[category].name,
            "metric": headlines(measured.items[REFERENCE])[category].metric,
            "reference": one.reference,
            "verdict": one.verdict,
            "by_family": by_family(measured, category, max_loss),
        }
        if category in measured.table.categories:
            curve = [
                (layout.bpw, mean_kld(measured.table, layout.label, category, suite) or 0.0)
                for layout in distinct_sizes(measured.layouts)
            ]
            cliff = find_cliff([x for x, _ in curve], [y for _, y in curve])
            found[category]["cliff"] = {
                "found": cliff.found,
                "bpw": cliff.break_bpw,
                "low": cliff.low,
                "high": cliff.high,
                "reason": cliff.reason,
            }
    return found


def distinct_sizes(layouts: Sequence[SizedLayout]) -> list[SizedLayout]:
    """One layout per size: stock and ours of the same bytes would be two values at one place."""
    kept: list[SizedLayout] = []
    for layout in layouts:
        if not kept or kept[-1].size_bytes - layout.size_bytes > SAME_SIZE * layout.size_bytes:
            kept.append(layout)
    return kept


def first_json(first: FirstToBreak | None, executed: Sequence[str]) -> dict[str, Any]:
    """The contract's ``first_to_break``, with what it was decided on."""
    if first is None:
        return {"category": None, "probability": 0.0, "compared": []}
    return {
        "category": first.category,
        "probability": round(first.probability, 4),
        "leader": first.leader,
        "probabilities": {c: round(p, 4) for c, p in first.probabilities.items()},
        "break_bpw": {c: list(bounds) for c, bounds in first.break_bpw.items()},
        "compared": list(executed),
    }


def failures_at_break(ctx: RunContext, measured: Measured) -> dict[str, Any] | None:
    """What goes wrong first in the target category: kinds of new failures at its first harmed size.

    None where no size is shown harmed, or nothing was judged.
    """
    category = ctx.spec.target
    layout = harmed_layout(measured, category)
    if layout is None or category not in measured.executed:
        return None
    task = headlines(measured.items[REFERENCE])[category]
    size = next(r for r in measured.items[layout.label] if r.name == task.name)
    kinds = new_failures(task, size)
    return {
        "category": category,
        "label": layout.label,
        "kind": first_failure(kinds),
        "kinds": kinds,
    }
