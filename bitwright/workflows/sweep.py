"""A sweep over whole-model sizes: where each category breaks, and which one breaks first.

build_corpora → collect_imatrices → layouts of many sizes → KLD and executed scores → breakage
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.allocator.layout import Layout, write_layout
from bitwright.corpora.records import Corpus
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import check_loadable
from bitwright.engine.tensors import role
from bitwright.errors import ConfigError
from bitwright.eval.breakage import FirstToBreak, SizeScores, breakage, first_to_break
from bitwright.eval.cliff import find_cliff
from bitwright.eval.divergence import Candidate
from bitwright.eval.item_scores import first_failure, headlines, new_failures
from bitwright.eval.scores import mean_kld
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import versions
from bitwright.workflows.sizes import (
    Measured,
    bits_per_weight,
    harmed_layout,
    measure_sizes,
    reference_json,
    size_json,
    stock_sizes,
    uniform_sizes,
)
from bitwright.workflows.solved_sizes import solved_sizes
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_evaluate import report_options, score_on
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_items import REFERENCE, SizedLayout, flags_by_file

SWEEP_SCHEMA = 1
SEEDS = 3  # of the resampling, which has to name the same category each time
SHOWN_GROUPS = 5
SAME_SIZE = 0.001  # sizes nearer than this part are one point of a curve


def run_sweep(ctx: RunContext, model_name: str) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The result as a dictionary, and the files that the run left.

    Raises:
        BitwrightError: see each stage; what was measured stays in the run folder.
    """
    check_sweep(ctx)
    corpora, _ = build_corpora(ctx)
    imatrices, imatrix_key = collect_imatrices(ctx, corpora)
    imatrix = imatrices["task"]
    packer = make_packer(ctx, "task", imatrix)
    solved = solved_sizes(ctx, corpora, imatrix, imatrix_key, ctx.spec.sweep.solved)
    layouts = distinct([*sweep_layouts(ctx, imatrix), *solved])
    measured = measure_sizes(ctx, "sweep", layouts, corpora, packer, imatrix)
    first = race(ctx, measured)
    result = sweep_result(ctx, measured, first, model_name)
    result["flags"] = flags_by_file(measured.items)
    result["first_failure"] = failures_at_break(ctx, measured)
    result["explained_by"] = explain(ctx, measured, first, corpora, packer, imatrix)
    path = ctx.folder.path / "result.json"
    write_atomic(path, json.dumps(result, indent=1, allow_nan=False).encode())
    return result, (path, *_write_layouts(ctx, measured.layouts))


def check_sweep(ctx: RunContext) -> None:
    """Refuse what cannot be run before anything is computed.

    Raises:
        ConfigError: no sizes.
        InputError: the model cannot be run by the installed llama.cpp.
    """
    check_loadable(ctx.model)
    sweep = ctx.spec.sweep
    if not (sweep.stock or sweep.uniform or sweep.solved):
        raise ConfigError(
            f"{ctx.name}: [sweep] names no sizes: give stock types or uniform types, from many "
            "bits to few"
        )


def sweep_layouts(ctx: RunContext, imatrix: Imatrix | None) -> list[SizedLayout]:
    """The stock and uniform sizes; of layouts that are the same, the first label."""
    sweep = ctx.spec.sweep
    return distinct(
        [
            *stock_sizes(ctx, sweep.stock),
            *uniform_sizes(ctx.model, sweep.uniform, sweep.embedding, imatrix),
        ]
    )


def distinct(layouts: Sequence[SizedLayout]) -> list[SizedLayout]:
    """Each layout once, under its first label."""
    found: dict[tuple[tuple[str, str], ...], SizedLayout] = {}
    for layout in layouts:
        found.setdefault(tuple(sorted(layout.types.items())), layout)
    return list(found.values())


def race(ctx: RunContext, measured: Measured) -> FirstToBreak | None:
    """Which executed category breaks first; None where none has executed scores.

    Categories that are only scored by likelihood lose theirs on another scale: they are reported,
    and do not take part.
    """
    racing = [measured.paired[c] for c in measured.executed]
    if not racing:
        return None
    found = [
        first_to_break(
            racing,
            ctx.spec.scores.max_loss,
            np.random.default_rng([ctx.spec.seed, seed]),
            sure=ctx.spec.sweep.sure,
        )
        for seed in range(SEEDS)
    ]
    sure = min(found, key=lambda one: one.probability)
    return sure if len({one.leader for one in found}) == 1 else _undecided(sure)


def _undecided(found: FirstToBreak) -> FirstToBreak:
    return FirstToBreak(None, None, found.probability, found.probabilities, found.break_bpw)


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


def explain(
    ctx: RunContext,
    measured: Measured,
    first: FirstToBreak | None,
    corpora: Mapping[str, Corpus],
    packer: Packer,
    imatrix: Imatrix,
) -> dict[str, Any] | None:
    """The roles whose types alone do most of the damage at the first harmed size.

    Each role is set to its types of that layout, alone, and measured on the category's probe
    text. Of the category that breaks first, else of the target; None where no size is harmed.
    """
    category = (first.leader if first else None) or ctx.spec.target
    layout = harmed_layout(measured, category)
    if layout is None or category not in corpora:
        return None
    groups: dict[str, dict[str, str]] = {}
    for name, kind in layout.types.items():
        groups.setdefault(role(name), {})[name] = kind
    key = imatrix.sha256()
    candidates = [Candidate(name, types, packer, key) for name, types in groups.items()]
    candidates.append(Candidate("together", layout.types, packer, key))
    chunks = {category: corpora[category].split("probe")}
    table = score_on(ctx, "explain", candidates, chunks, report_options(ctx)).table
    suite = load_suite("divergence")
    nats = {name: mean_kld(table, name, category, suite) or 0.0 for name in groups}
    together = mean_kld(table, "together", category, suite)
    ranked = sorted(nats, key=lambda name: -nats[name])[:SHOWN_GROUPS]
    total = sum(nats.values())
    return {
        "category": category,
        "label": layout.label,
        "kld_nats": together,
        "groups": [
            {"group": name, "kld_nats": nats[name], "share": nats[name] / total if total else 0.0}
            for name in ranked
        ],
    }


def _write_layouts(ctx: RunContext, layouts: Sequence[SizedLayout]) -> list[Path]:
    """The layout file of each of our own sizes, so that it can be made by any tool."""
    paths = []
    for layout in layouts:
        if layout.family == "ours":
            path = ctx.folder.file("layouts", f"{layout.label}.txt")
            write_layout(Layout(layout.types), path)
            paths.append(path)
    return paths
