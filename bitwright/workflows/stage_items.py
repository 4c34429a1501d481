"""Executed scores of many files of one model: each is written, run on every task, and removed.

What is scored is a file as users run it, not a copy in memory; its weights come from the packed
tensors that the run folder keeps, so writing costs little. Finished files stay in the run folder
as item results, and a killed run goes on with the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from bitwright.allocator.names import nominal_ftype
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
from bitwright.engine.upstream import FTYPES
from bitwright.errors import ConfigError
from bitwright.eval.answer_book import AnswerBook, answers_until_kept
from bitwright.eval.flags import flags_of
from bitwright.eval.harness_tasks import load_harness_task
from bitwright.eval.outcome import METRICS_VERSION, TaskResult, load_results, save_results
from bitwright.eval.prompts import Prompts
from bitwright.eval.run_suite import (
    TOGETHER,
    Progress,
    SuiteOptions,
    load_items,
    read_alike,
    refuse_code,
    run_suite,
)
from bitwright.eval.sandbox import Limits
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSpec, TaskSuite, load_task_suite
from bitwright.eval.together import GENERATED, SCORED
from bitwright.workflows.calibration import calibration_texts
from bitwright.workflows.context import RunContext
from bitwright.workflows.item_leaks import generated_leaks
from bitwright.workflows.progress import Reporter
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.sizes_spec import ItemSettings

REFERENCE = "reference"
LIKELIHOODS = ("bits_per_byte", "tool_nats")
Results = dict[str, list[TaskResult]]


@dataclass(frozen=True, slots=True)
class SizedLayout:
    """A whole-model layout: ``family`` is 'stock' or 'ours', ``types`` of quantizable tensors."""

    label: str
    family: str
    types: Mapping[str, str]
    size_bytes: int
    bpw: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What every file is asked: tasks, 'task/item' that are left out, and the shared prompts."""

    tasks: tuple[TaskSpec, ...]
    left_out: frozenset[str]
    prompts: Callable[[], Prompts]


def suite_tasks(ctx: RunContext, settings: ItemSettings, half: int = 0) -> list[TaskSpec]:
    """The tasks to run, with this workflow's number of items and seed.

    ``half``: see `TaskSpec`; scores that choose something and scores that are reported take
    different halves.

    Raises:
        ConfigError: no such suite, a task that no suite has, or nothing left to run.
    """
    found = [task for name in settings.suites for task in load_task_suite(name).tasks]
    for key, names in (("tasks", settings.tasks), ("leave_out", settings.leave_out)):
        unknown = sorted(set(names) - {task.name for task in found})
        if unknown:
            suites = ", ".join(Path(name).stem for name in settings.suites)
            raise ConfigError(
                f"[scores] {key} names the task {unknown[0]!r}, which {suites} has not: "
                f"give one of {', '.join(sorted(task.name for task in found))}"
            )
    wanted = set(settings.tasks or (task.name for task in found)) - set(settings.leave_out)
    if not wanted:
        raise ConfigError("[scores] leaves out every task: leave at least one to be run")
    return [_limited(ctx, task, settings, half) for task in found if task.name in wanted]


def check_items(tasks: Sequence[TaskSpec], settings: ItemSettings) -> None:
    """Refuse tasks that could not be run, before the first long computation.

    Raises:
        InputError: the items of a task are not where they should be.
        ConfigError: a task runs code, and that is not allowed, or needs a package that is not here.
    """
    options = suite_options(settings)
    refuse_code(tasks, options)
    for task in tasks:
        if task.method == "lm_eval":
            load_harness_task(task, options.data)
        elif task.source_parts[0] != "builtin":
            load_items(task, options)


def suite_options(settings: ItemSettings) -> SuiteOptions:
    """Where items come from, and whether code is run."""
    data = Path(settings.data) if settings.data else None
    return SuiteOptions(data=data, sandbox=Limits() if settings.execute_code else None)


def _limited(ctx: RunContext, task: TaskSpec, settings: ItemSettings, half: int) -> TaskSpec:
    most = settings.likelihood_items if task.method in LIKELIHOODS else settings.items
    if task.category != ctx.spec.target and settings.off_target_items:
        most = min(most, settings.off_target_items)
    limit = min(task.limit or most, most) if task.source_parts[0] != "builtin" else most
    changes: dict[str, object] = {"limit": limit, "seed": task.seed + ctx.spec.seed, "half": half}
    if settings.max_tokens:
        changes["max_tokens"] = min(task.max_tokens, settings.max_tokens)
    return task.model_copy(update=changes)


def score_sizes(
    ctx: RunContext,
    layouts: Sequence[SizedLayout],
    packer: Packer,
    imatrix_sha256: str,
    settings: ItemSettings,
    half: int = 0,
) -> Results:
    """Every task on the reference and on every layout, by label."""
    folder = f"items-{half}" if half else "items"
    tasks = suite_tasks(ctx, settings, half)
    labels = [REFERENCE, *(layout.label for layout in layouts)]
    ctx.reporter.stage(
        "scores", f"{len(tasks)} tasks of {', '.join(settings.suites)} on {len(labels)} files"
    )
    results: Results = {}
    with ExitStack() as stack:

        @cache
        def prompts() -> Prompts:
            """Of all files, opened when the first one has to be scored."""
            return stack.enter_context(closing(Prompts(ctx.model, remember=True)))

        asked = Asked(tuple(tasks), generated_leaks(ctx, folder, tasks, prompts), prompts)
        for done, layout in enumerate([None, *layouts]):
            label = labels[done]
            ctx.reporter.step(done, len(labels), label)
            step = _steps(ctx.reporter, label, done, len(labels), tasks)
            results[label] = _score_one(ctx, folder, layout, packer, imatrix_sha256, asked, step)
            if layout is None:
                asked = replace(asked, tasks=read_alike(tasks, results[label]))
    return results


def _score_one(
    ctx: RunContext,
    folder: str,
    layout: SizedLayout | None,
    packer: Packer,
    imatrix_sha256: str,
    asked: Asked,
    step: Progress,
) -> list[TaskResult]:
    label = REFERENCE if layout is None else layout.label
    inputs = {
        "model": ctx.model.sha256(),
        "layout": None if layout is None else [key_of(dict(layout.types)), imatrix_sha256],
        "tasks": [task.model_dump(mode="json") for task in asked.tasks],
        "left_out": sorted(asked.left_out),
        "engine": ctx.engine_key()["llama-cpp-python"],
        "gpu_layers": ctx.options.gpu_layers,
        "metrics": METRICS_VERSION,
        **({"data": stamps(Path(ctx.spec.scores.data))} if ctx.spec.scores.data else {}),
    }
    out = ctx.folder.file(folder, label, "results.json").parent
    key = key_of("items", inputs)

    def compute() -> tuple[dict[str, Any], list[Path]]:
        with answers_until_kept(out, key) as book:
            if layout is None:
                results = run_tasks(ctx, ctx.model, asked, book, step)
            else:
                results = _written_and_scored(ctx, folder, layout, packer, asked, book, step)
            flags = [flag for result in results for flag in flags_of(result)]
            save_results(results, out, {"label": label, "flags": flags})
        for flag in flags:
            ctx.reporter.note(f"{label}: {flag}")
        return {}, sorted(path for path in out.iterdir() if not path.name.startswith("."))

    ctx.folder.stage(f"{folder}/{label}", key, compute, inputs=inputs)
    return load_results(out)[0]


def _steps(
    reporter: Reporter, label: str, before: int, n_files: int, tasks: Sequence[TaskSpec]
) -> Progress:
    """Progress within a file as a part of all files; tasks count by their number of items.

    What several tasks ask together is done first, and those tasks then have little left.
    """
    weights = {task.name: float(task.limit or 1) for task in tasks}
    together = sum(weights[t.name] for t in tasks if t.method in (*GENERATED, *SCORED))
    starts = dict(zip(weights, accumulate(weights.values(), initial=0.0), strict=False))
    part = 0.0

    def step(done: int, total: int, name: str) -> None:
        nonlocal part
        weight = together if name == TOGETHER else weights[name]
        here = starts.get(name, 0.0) + weight * done / max(1, total)
        part = max(part, here / sum(weights.values()))
        reporter.step(before + part, n_files, f"{label}, {name} {done}/{total}")

    return step


def flags_by_file(items: Results) -> list[str]:
    """`LABEL: flag` of every file, so that no task's number stands without its warning."""
    return [
        f"{label}: {flag}"
        for label, results in items.items()
        for result in results
        for flag in flags_of(result)
    ]


def stamps(data: Path) -> list[tuple[str, int, int]]:
    """(name, bytes, modification time) of the local files: other rows are other items."""
    return [
        (str(path.relative_to(data)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(data.rglob("*.json*"))
        if path.is_file()
    ]


def _written_and_scored(
    ctx: RunContext,
    folder: str,
    layout: SizedLayout,
    packer: Packer,
    asked: Asked,
    book: AnswerBook,
    step: Progress,
) -> list[TaskResult]:
    path = ctx.folder.file(folder, "files", f"{layout.label}.gguf")
    ftype = FTYPES[nominal_ftype(layout.types, ctx.model)]
    try:
        write_quantized(
            ctx.model,
            layout.types,
            path,
            packer=packer,
            ftype=ftype,
            provenance=None,
            overwrite=True,
        )
        return run_tasks(ctx, open_model(path, allow_requantize=True), asked, book, step)
    finally:
        path.unlink(missing_ok=True)


def run_tasks(
    ctx: RunContext, model: ModelFile, asked: Asked, book: AnswerBook, step: Progress
) -> list[TaskResult]:
    """The tasks on one file; all have the items of the reference, whose overlap is checked.

    Raises:
        InputError: items stand in the run's own calibration text.
    """
    suite = TaskSuite.model_validate({"schema": 1, "tasks": asked.tasks})
    options = DecoderOptions(threads=ctx.options.threads, gpu_layers=ctx.options.gpu_layers)
    with Scorer(model, options, prompts=asked.prompts(), book=book) as scorer:
        first = model is ctx.model
        texts = calibration_texts((ctx.folder.path,), scorer.tokenizer) if first else None
        return run_suite(
            scorer,
            suite,
            replace(suite_options(ctx.spec.scores), left_out=asked.left_out),
            calibration=texts,
            allow_overlap=ctx.spec.scores.allow_overlap,
            progress=step,
        )
