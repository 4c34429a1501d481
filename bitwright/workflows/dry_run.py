"""--dry-run: stages, what is done already, exact sizes, and an estimate of the time."""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.corpora.recipe import load_recipe
from bitwright.damage.second_probes import SHARE
from bitwright.engine.session import Session
from bitwright.eval.suite import load_suite
from bitwright.report.wording import SYNTHETIC
from bitwright.workflows.context import RunContext
from bitwright.workflows.output import bytes_text
from bitwright.workflows.pipeline import report_entries, score_report
from bitwright.workflows.preflight import Plan
from bitwright.workflows.progress import Silent, clock
from bitwright.workflows.run_folder import NotDone, RunFolder
from bitwright.workflows.spec import DamageSettings
from bitwright.workflows.stage_allocate import allocate
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import measure_damage
from bitwright.workflows.stage_imatrix import collect_imatrices, describe_mix
from bitwright.workflows.stage_mix import choose_mix

CANDIDATES = 9  # about as many layouts as are proposed, with upstream's
PARTIAL = 0.65  # of a whole pass: what exact partial passes take (benchmarks/damage_map.py)
FILES = 7  # on the report split, with the reference and without rivals


def describe_plan(ctx: RunContext, plan: Plan) -> tuple[dict[str, Any], str]:
    """The plan as JSON and as text. Loads the model once, to time one chunk on this machine."""
    forward_s = time_chunk(ctx)
    done = finished_stages(ctx, plan)
    passes = count_passes(ctx, plan)
    estimate_s = {s: 0.0 if s in done else count * forward_s for s, count in passes.items()}
    facts = {
        "workflow": ctx.name,
        "target": ctx.spec.target,
        "budget_bytes": plan.budget_bytes,
        "smallest_bytes": plan.options.smallest_bytes,
        "largest_bytes": plan.options.largest_bytes,
        "stock_bytes": dict(plan.stock_bytes),
        "tensors": len(plan.options.offered),
        "stages_with_results": done,
        "synthetic_reference": ctx.model.synthetic_reference,
        "chunk_s": round(forward_s, 4),
        "estimated_s": {stage: round(value, 1) for stage, value in estimate_s.items()},
    }
    return facts, _text(ctx, plan, facts, estimate_s)


def finished_stages(ctx: RunContext, plan: Plan) -> list[str]:
    """The stages whose results in the run folder hold for this run: their keys are compared."""
    reading = replace(ctx, folder=RunFolder(ctx.folder.path, read_only=True), reporter=Silent())
    done: list[str] = []
    try:
        corpora, _ = build_corpora(reading)
        done.append("corpus")
        imatrices, key = collect_imatrices(reading, corpora)
        done.append("imatrix")
        suite = load_suite("divergence")
        mix = choose_mix(reading, plan, corpora, imatrices, key, suite)
        done += ["mix"] if mix.record is not None else []
        task = mix.imatrices["task"]
        damage_map, _ = measure_damage(reading, corpora, task, mix.key, plan.budget_bytes)
        done.append("damage")
        found = allocate(reading, plan, corpora, damage_map, mix, suite)
        done.append("select")
        every = {**mix.imatrices, **found.mixes}
        score_report(reading, corpora, report_entries(reading, plan, found), every)
        done.append("evaluate")
    except NotDone:
        pass
    return done


def time_chunk(ctx: RunContext) -> float:
    """Seconds of one forward pass over a full chunk, the faster of two."""
    with Session(ctx.model, ctx.options) as session:
        tokens = np.arange(ctx.options.n_ctx, dtype=np.int32) % session.n_vocab
        rows = np.arange(0, ctx.options.n_ctx, 2)
        times = []
        for _ in range(2):
            started = time.perf_counter()
            session.logits(tokens, (0,), rows)
            times.append(time.perf_counter() - started)
    return min(times)


def count_passes(ctx: RunContext, plan: Plan) -> dict[str, int]:
    """Forward passes over a chunk, per stage; packing comes on top and is not in the estimate."""
    chunks = {}
    for category in ctx.categories:
        chunks[category] = {
            **load_recipe(ctx.spec.corpora[category]).chunks.as_dict(),
            **ctx.spec.chunks,
        }
    mixed = {c for _, mix in ctx.spec.imatrix.named() for c in mix}
    total = {
        split: sum(c[split] for c in chunks.values()) for split in ("probe", "select", "report")
    }
    spec, on_target = ctx.spec, chunks[ctx.spec.target]
    searched = spec.search.rounds + spec.search.swaps + spec.study.trials
    mixes = len(spec.imatrix.candidates) + 3 if spec.imatrix.candidates else 0  # and the reference
    return {
        "imatrix": sum(chunks[c]["calibrate"] for c in mixed),
        **({"mix": total["select"] * mixes} if mixes else {}),
        "damage": count_probes(spec.damage, on_target["probe"], total["probe"], plan, len(chunks)),
        # Proposals and controls on all of select; what a search adds, on the target's part.
        "select": total["select"] * (CANDIDATES + 1) + on_target["select"] * searched,
        "evaluate": total["report"] * (FILES + len(spec.rivals)),
    }


def count_probes(
    settings: DamageSettings, on_target: int, in_all: int, plan: Plan, categories: int
) -> int:
    """The damage map in whole passes, at most: second probes by their cap, a race as if nothing
    was decided before the text ends."""
    if settings.mode == "prior":
        return 0
    tensors = len(plan.options.offered)
    chunks = in_all if settings.mode == "fixed" else categories + on_target - 1
    second = int(SHARE * tensors) * categories if settings.second_probes else 0
    return math.ceil(PARTIAL * (chunks * (tensors + 1) + second))


def _text(ctx: RunContext, plan: Plan, facts: dict[str, Any], estimate_s: dict[str, float]) -> str:
    lines = [SYNTHETIC] if ctx.model.synthetic_reference else []
    lines += [
        f"{ctx.name} on {ctx.model.path.name}: target {ctx.spec.target}",
        f"  budget    {bytes_text(plan.budget_bytes)}  ({ctx.spec.budget})",
        f"  possible  {bytes_text(plan.options.smallest_bytes)} to "
        f"{bytes_text(plan.options.largest_bytes)}, {facts['tensors']} tensors to decide",
    ]
    done = facts["stages_with_results"]
    lines += [f"  stock {name:<8} {bytes_text(size)}" for name, size in plan.stock_bytes.items()]
    lines.append(f"  imatrix   task = {describe_mix(ctx.spec.imatrix.task)}")
    lines += [
        f"  {stage:<9} about {clock(seconds)}"
        + ("  (done: its results are in the run folder)" if stage in done else "")
        for stage, seconds in estimate_s.items()
    ]
    lines.append(
        f"  together about {clock(sum(estimate_s.values()))} of forward passes on this machine "
        f"({facts['chunk_s']:.3g} s a chunk), and packing; nothing was computed or written"
    )
    return "\n".join(lines)
