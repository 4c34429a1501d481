"""Bedrock, Tightrope and Gambit: a safe, a balanced and a bold build of one model.

build_corpora → collect_imatrices → sweep (calibration) → group ladders → three layouts, each
measured whole and backed off where groups are not safe together → files → scores → comparison
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import OptionSet, build_options
from bitwright.allocator.variants import Group, make_groups
from bitwright.corpora.records import Corpus
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import check_loadable
from bitwright.errors import ConfigError
from bitwright.eval.scores import category_rng, mean_kld
from bitwright.eval.suite import load_suite
from bitwright.eval.thresholds import Calibration, calibrate, state_of
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_layouts import Builds, build_layouts
from bitwright.workflows.sizes import Measured, measure_sizes, sized
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_items import flags_by_file
from bitwright.workflows.stage_ladders import Ladders, kld_interval, measure_ladders
from bitwright.workflows.sweep import sweep_layouts
from bitwright.workflows.variant_files import write_variants
from bitwright.workflows.variant_result import nearest_stock, variants_result

NAMES = ("Bedrock", "Tightrope", "Gambit")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What counts as harm, by category; ``how`` each was had."""

    nats: Mapping[str, float]
    how: Mapping[str, str]
    calibrations: Mapping[str, Calibration]


def run_variants(ctx: RunContext, model_name: str) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """The result as a dictionary, and the files that the run left.

    Raises:
        BitwrightError: see each stage; what was measured stays in the run folder.
    """
    check_variants(ctx)
    corpora, _ = build_corpora(ctx)
    imatrices, _ = collect_imatrices(ctx, corpora)
    imatrix = imatrices["task"]
    packer = make_packer(ctx, "task", imatrix)
    thresholds = learn_thresholds(ctx, corpora, packer, imatrix)
    options = variant_options(ctx, imatrix)
    settings = ctx.spec.variants
    groups = make_groups(options, settings.groups, settings.bands)
    chunks = {c: corpora[c].split("probe") for c in ctx.categories}
    ladders = measure_ladders(ctx, groups, chunks, thresholds.nats, packer, imatrix, settings)
    builds = build_layouts(
        ctx, groups, ladders, thresholds.nats, options, corpora, packer, imatrix, _size(ctx)
    )
    layouts = [sized(ctx.model, name, "ours", builds.types[name]) for name in NAMES]
    stock = nearest_stock(ctx, layouts)
    rivals = {one.label: one for one in stock.values()}
    # Other text and other items than those that the thresholds were learnt from.
    measured = measure_sizes(
        ctx, "final", [*layouts, *rivals.values()], corpora, packer, imatrix, half=2
    )
    written = write_variants(ctx, layouts, imatrix, corpora)
    result = variants_result(ctx, measured, layouts, stock, written, model_name)
    for one in result["variants"]:
        against_thresholds(measured, one, thresholds.nats)
    result["flags"] = flags_by_file(measured.items)
    result["thresholds_nats"] = _thresholds_json(thresholds)
    result["groups"] = groups_json(groups, ladders, builds)
    result["back_off"] = list(builds.rounds)
    result["tightrope"] = builds.tightrope
    path = ctx.folder.path / "result.json"
    write_atomic(path, json.dumps(result, indent=1, allow_nan=False).encode())
    return result, (*(p for one in written.values() for p in one.paths), path)


def check_variants(ctx: RunContext) -> None:
    """Refuse what cannot be run before anything is computed.

    Raises:
        ConfigError: no ladder of that name, or nothing to learn the threshold from.
        InputError: the model cannot be run by the installed llama.cpp.
    """
    check_loadable(ctx.model)
    ladder(ctx.spec.ladder)
    sweep = ctx.spec.sweep
    if ctx.spec.variants.threshold_nats == "calibrated" and not (sweep.stock or sweep.uniform):
        raise ConfigError(
            f"{ctx.name}: the threshold is to be calibrated, but [sweep] names no sizes to learn "
            "it from: name some, or give threshold_nats as a number"
        )


def _size(ctx: RunContext) -> int | None:
    """Whole-file bytes that the user names for Tightrope, None for the knee."""
    if not ctx.spec.budget:
        return None
    budget = parse_budget(ctx.spec.budget)
    if budget.stock is not None:
        raise ConfigError(
            f"the size {ctx.spec.budget!r} for Tightrope names a stock type: give bytes or bpw"
        )
    return resolve_budget(budget, ctx.model, lambda _: 0)


def variant_options(ctx: RunContext, imatrix: Imatrix) -> OptionSet:
    """What each tensor may become."""
    return build_options(
        ctx.model, ladder=ladder(ctx.spec.ladder), pins=ctx.spec.pins, imatrix=imatrix
    )


def learn_thresholds(
    ctx: RunContext, corpora: Mapping[str, Corpus], packer: Packer, imatrix: Imatrix
) -> Thresholds:
    """The KLD of each category that counts as harm: given, or learnt from a whole-model sweep."""
    given = ctx.spec.variants.threshold_nats
    if given != "calibrated":
        return Thresholds(
            dict.fromkeys(ctx.categories, float(given)),
            dict.fromkeys(ctx.categories, "given"),
            {},
        )
    layouts = sweep_layouts(ctx, imatrix)
    measured = measure_sizes(
        ctx,
        "calibration",
        layouts,
        corpora,
        packer,
        imatrix,
        split="select",
        half=1,
        n_items=ctx.spec.variants.calibration_items,
    )
    found = {c: _calibrated(ctx, measured, c) for c in measured.paired if c in ctx.categories}
    if not found:
        raise ConfigError(
            f"{ctx.name}: no suite of {', '.join(ctx.spec.scores.suites)} scores a category of "
            "[corpora], so no threshold can be learnt: give threshold_nats as a number"
        )
    least = min(one.kld_nats for one in found.values())
    nats = {c: found[c].kld_nats if c in found else least for c in ctx.categories}
    how = {
        c: "the lowest of the others: no suite scores it"
        if c not in found
        else "calibrated"
        if found[c].reached
        else "the largest KLD measured: no size lost that much"
        for c in ctx.categories
    }
    return Thresholds(nats, how, found)


def _calibrated(ctx: RunContext, measured: Measured, category: str) -> Calibration:
    suite = load_suite("divergence")
    kld = [mean_kld(measured.table, one.label, category, suite) or 0.0 for one in measured.layouts]
    scores = measured.paired[category]
    return calibrate(
        kld,
        scores.scores,
        scores.reference,
        ctx.spec.scores.max_loss,
        np.random.default_rng([ctx.spec.seed, len(category)]),
    )


def against_thresholds(
    measured: Measured, variant: dict[str, Any], thresholds_nats: Mapping[str, float]
) -> None:
    """Add to a build's scores whether its KLD on the report text is shown under each threshold."""
    suite = load_suite("divergence")
    for category, nats in thresholds_nats.items():
        table = measured.table.table(variant["name"], category)
        kld = kld_interval(
            table.select(suite.category(category).codes()), category_rng(suite, category)
        )
        variant["scores"][category]["against_threshold"] = state_of(kld, nats)


def _thresholds_json(thresholds: Thresholds) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for category, nats in thresholds.nats.items():
        entry: dict[str, Any] = {"kld_nats": nats, "how": thresholds.how[category]}
        calibration = thresholds.calibrations.get(category)
        if calibration is not None:
            entry |= {"low": calibration.low, "high": calibration.high}
        found[category] = entry
    return found


def groups_json(groups: Sequence[Group], ladders: Ladders, builds: Builds) -> list[dict[str, Any]]:
    """Each group's verdict per category, and its step in each build."""
    return [
        {
            "group": group.name,
            "tensors": len(group.tensors),
            "lowest_safe": ladders.lowest_safe[group.name],
            "categories": {
                c: {
                    "lowest_safe": v.lowest_safe,
                    "first_over": v.first_over,
                    "undecided": list(v.undecided),
                    "cliff_bpw": ladders.cliffs[group.name][c].break_bpw,
                    "cliff": ladders.cliffs[group.name][c].reason,
                }
                for c, v in ladders.verdicts[group.name].items()
            },
            "damage": {
                step: {c: i.value for c, i in found.items()}
                for step, found in ladders.damages[group.name].items()
            },
            "steps": {name: builds.steps[name][group.name] for name in builds.steps},
        }
        for group in groups
    ]
