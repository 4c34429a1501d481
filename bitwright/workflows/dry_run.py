"""--dry-run: stages, what is done already, exact sizes, and an estimate of the time."""

import time
from typing import Any

import numpy as np

from bitwright.corpora.recipe import load_recipe
from bitwright.engine.session import Session
from bitwright.workflows.context import RunContext
from bitwright.workflows.output import bytes_text
from bitwright.workflows.preflight import Plan
from bitwright.workflows.progress import clock
from bitwright.workflows.stage_imatrix import describe_mix

STAGES = ("corpus", "imatrix", "damage", "errors", "select", "evaluate", "quantize")
CANDIDATES = 7  # about as many layouts as are proposed, with upstream's


def describe_plan(ctx: RunContext, plan: Plan) -> tuple[dict[str, Any], str]:
    """The plan as JSON and as text. Loads the model once, to time one chunk on this machine."""
    forward_s = time_chunk(ctx)
    passes = count_passes(ctx, plan)
    estimate_s = {stage: count * forward_s for stage, count in passes.items()}
    done = [stage for stage in STAGES if ctx.folder.manifest(stage) is not None]
    facts = {
        "workflow": ctx.name,
        "target": ctx.spec.target,
        "budget_bytes": plan.budget_bytes,
        "smallest_bytes": plan.options.smallest_bytes,
        "largest_bytes": plan.options.largest_bytes,
        "stock_bytes": dict(plan.stock_bytes),
        "tensors": len(plan.options.offered),
        "stages_with_results": done,
        "chunk_s": round(forward_s, 4),
        "estimated_s": {stage: round(value, 1) for stage, value in estimate_s.items()},
    }
    return facts, _text(ctx, plan, facts, estimate_s)


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
    mixed = {c for mix in (ctx.spec.imatrix.general, ctx.spec.imatrix.task) for c in mix}
    total = {
        split: sum(c[split] for c in chunks.values()) for split in ("probe", "select", "report")
    }
    return {
        "imatrix": sum(chunks[c]["calibrate"] for c in mixed),
        "damage": total["probe"] * (len(plan.options.offered) + 1),
        "select": total["select"] * (CANDIDATES + 1),
        "evaluate": total["report"] * (7 + len(ctx.spec.rivals)),
    }


def _text(ctx: RunContext, plan: Plan, facts: dict[str, Any], estimate_s: dict[str, float]) -> str:
    lines = [
        f"{ctx.name} on {ctx.model.path.name}: target {ctx.spec.target}",
        f"  budget    {bytes_text(plan.budget_bytes)}  ({ctx.spec.budget})",
        f"  possible  {bytes_text(plan.options.smallest_bytes)} to "
        f"{bytes_text(plan.options.largest_bytes)}, {facts['tensors']} tensors to decide",
    ]
    lines += [f"  stock {name:<8} {bytes_text(size)}" for name, size in plan.stock_bytes.items()]
    lines.append(f"  imatrix   task = {describe_mix(ctx.spec.imatrix.task)}")
    lines += [
        f"  {stage:<9} about {clock(seconds)}"
        + ("  (has results in the run folder)" if stage in facts["stages_with_results"] else "")
        for stage, seconds in estimate_s.items()
    ]
    lines.append(
        f"  together about {clock(sum(estimate_s.values()))} of forward passes on this machine "
        f"({facts['chunk_s']:.3g} s a chunk), and packing; nothing was computed or written"
    )
    return "\n".join(lines)
