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
from bitwright.eval.breakage import FirstToBreak, first_to_break
from bitwright.eval.divergence import Candidate
from bitwright.eval.scores import mean_kld
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.sizes import (
    Measured,
    harmed_layout,
    measure_sizes,
    stock_sizes,
    uniform_sizes,
)
from bitwright.workflows.solved_sizes import solved_sizes
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_evaluate import report_options, score_on
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_items import SizedLayout, flags_by_file
from bitwright.workflows.sweep_result import failures_at_break, sweep_result

SEEDS = 3  # of the resampling, which has to name the same category each time
SHOWN_GROUPS = 5


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
