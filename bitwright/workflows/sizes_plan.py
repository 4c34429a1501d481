"""--dry-run of sweeps and builds: exact sizes, what is asked of every file, and about how long."""

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.corpora.recipe import load_recipe
from bitwright.eval.prompts import Prompts
from bitwright.eval.run_suite import load_items
from bitwright.eval.suite_cost import SuiteCost, suite_cost
from bitwright.eval.task_suite import TaskSpec
from bitwright.report.wording import SYNTHETIC
from bitwright.workflows.context import RunContext
from bitwright.workflows.dry_run import time_chunk
from bitwright.workflows.output import bytes_text
from bitwright.workflows.progress import clock
from bitwright.workflows.sizes import bits_per_weight
from bitwright.workflows.stage_items import suite_options
from bitwright.workflows.sweep import sweep_layouts

# Rows that a token of an answer takes: guesses fill small batches, which take about twice as long
# a row as long prompts (measured on a 1.5B model).
ROWS_OF_ANSWER = 4
FINAL_FILES = 7  # of the builds: the original, three builds and up to three stock files


def describe_sizes(ctx: RunContext, tasks: Sequence[TaskSpec]) -> tuple[dict[str, Any], str]:
    """The plan as JSON and as text. Loads the model once, to time one chunk on this machine."""
    cost = tokens_of(ctx, tasks)
    token_s = time_chunk(ctx) / ctx.options.n_ctx
    layouts = sorted(sweep_layouts(ctx, None), key=lambda one: -one.size_bytes)
    n_files = len(layouts) + 1 + len(ctx.spec.sweep.solved)
    if ctx.spec.kind == "variants":
        n_files += FINAL_FILES
    rows = cost.prompt_tokens + ROWS_OF_ANSWER * cost.answer_tokens
    kld_tokens = ctx.options.n_ctx * _report_chunks(ctx) * n_files
    facts = {
        "workflow": ctx.name,
        "kind": ctx.spec.kind,
        "synthetic_reference": ctx.model.synthetic_reference,
        "reference_bpw": round(bits_per_weight(ctx.model, ctx.model.size_bytes), 4),
        "tasks": len(tasks),
        "items": cost.n_items,
        "files": n_files,
        "tokens_a_file": {
            "prompts": cost.prompt_tokens,
            "right_answers": cost.answer_tokens,
            "longest_answers": cost.most_answer_tokens,
        },
        "estimated_s": {
            "scores": round(n_files * rows * token_s, 1),
            "kld": round(kld_tokens * token_s, 1),
        },
        "sizes": [
            {"label": one.label, "size_bytes": one.size_bytes, "bpw": round(one.bpw, 4)}
            for one in layouts
        ],
    }
    return facts, _text(ctx, facts, cost)


def tokens_of(ctx: RunContext, tasks: Sequence[TaskSpec]) -> SuiteCost:
    """What the tasks with items of their own take of one file."""
    options = suite_options(ctx.spec.scores)
    own = [task for task in tasks if task.method != "lm_eval"]
    prompts = Prompts(ctx.model)
    try:
        return suite_cost(prompts, [(task, load_items(task, options)) for task in own])
    finally:
        prompts.close()


def _report_chunks(ctx: RunContext) -> int:
    """Chunks of the report split, over all categories."""
    recipes = {c: load_recipe(recipe).chunks.as_dict() for c, recipe in ctx.spec.corpora.items()}
    return sum({**chunks, **ctx.spec.chunks}["report"] for chunks in recipes.values())


def _text(ctx: RunContext, facts: Mapping[str, Any], cost: SuiteCost) -> str:
    lines = [SYNTHETIC] if facts["synthetic_reference"] else []
    lines.append(f"{ctx.name} on {ctx.model.path.name}: {facts['tasks']} tasks at these sizes")
    lines += [
        f"  {one['label']:<20} {one['bpw']:6.3f} bpw  {bytes_text(one['size_bytes'])}"
        for one in facts["sizes"]
    ]
    times = facts["estimated_s"]
    lines += [
        f"  a file: {cost.n_items:,} questions, {cost.prompt_tokens:,} tokens of prompts, "
        f"{cost.answer_tokens:,} of answers (at most {cost.most_answer_tokens:,})",
        f"  {facts['files']} files with the original: about {clock(times['scores'])} for the "
        f"scores and {clock(times['kld'])} for the KLD on this machine; packing, the imatrix"
        + (" and the ladders come on top" if ctx.spec.kind == "variants" else " come on top"),
        "nothing was computed or written",
    ]
    return "\n".join(lines)
