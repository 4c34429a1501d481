"""Runs the tasks of a suite on one model file: items → outcomes → results with their flags."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bitwright.corpora.leaks import Overlap, overlap
from bitwright.errors import ConfigError, InputError
from bitwright.eval.bfcl import bfcl_items
from bitwright.eval.code_tasks import code, code_items
from bitwright.eval.harness_tasks import load_harness_task, run_harness_task
from bitwright.eval.items import Item, builtin_items, halved, spread
from bitwright.eval.methods import METHODS, Bench, read_form
from bitwright.eval.outcome import CORRECT, Outcome, TaskResult
from bitwright.eval.sandbox import Limits
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSpec, TaskSuite
from bitwright.eval.together import GENERATED, ask_together

Progress = Callable[[int, int, str], None]
TOGETHER = "tool prompts"  # what several tasks ask of one prompt, in reports of progress
MOST_NAMED = 5  # overlapping items in a message


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """`data`: folder of local files instead of the hub. `sandbox` None: no code is executed.

    `left_out`: 'task/item' of items that are not asked.
    """

    data: Path | None = None
    sandbox: Limits | None = None
    limit: int = 0
    left_out: frozenset[str] = frozenset()


def load_items(spec: TaskSpec, options: SuiteOptions) -> list[Item]:
    """The items of a task of our own, from where its source says.

    Raises:
        InputError, ConfigError: the source is missing or not of the expected form.
    """
    found = _load_items(spec, options)
    return [item for item in found if f"{spec.name}/{item.id}" not in options.left_out]


def _load_items(spec: TaskSpec, options: SuiteOptions) -> list[Item]:
    kind, where = spec.source_parts
    limit = min(filter(None, (spec.limit, options.limit)), default=0)
    if kind == "builtin":
        wanted = 2 * limit if spec.half else limit
        return halved(builtin_items(where, wanted, spec.seed), spec.half)
    if kind == "bfcl":
        return spread(halved(bfcl_items(where, options.data), spec.half), limit)
    if kind == "hub":
        return spread(halved(code_items(spec, options.data), spec.half), limit)
    raise ConfigError(f"{spec.name}: source {spec.source!r} goes with method 'lm_eval' only")


def item_texts(items: Sequence[Item]) -> dict[str, str]:
    """Item → its own text."""
    return {item.id: item.own_text() for item in items}


def check_overlap(
    items: Mapping[str, Mapping[str, str]], documents: Mapping[str, str], *, allow: bool
) -> tuple[Overlap, ...]:
    """Items (task → item → text) of which a fifth of the 13-grams stands in the calibration text.

    Raises:
        InputError: there are some, and they are not allowed; the message names them.
    """
    texts = {f"{task}/{item}": text for task, many in items.items() for item, text in many.items()}
    found = overlap(documents, texts)
    if found and not allow:
        named = "; ".join(f"{o.text} in {o.document} ({o.share:.0%})" for o in found[:MOST_NAMED])
        raise InputError(
            f"{len(found)} of {len(texts)} evaluation items stand in the calibration text "
            f"({named}), so their scores would be of memory; calibrate on other text, or go on "
            "with --allow-overlap ([scores] allow_overlap = true in a workflow)"
        )
    return found


def run_suite(
    scorer: Scorer,
    suite: TaskSuite,
    options: SuiteOptions,
    *,
    calibration: Mapping[str, str] | None = None,
    allow_overlap: bool = False,
    progress: Progress | None = None,
) -> list[TaskResult]:
    """One result per task, in the suite's order; items are checked before the first is asked."""
    items = {
        spec.name: load_items(spec, options) for spec in suite.tasks if spec.method != "lm_eval"
    }
    harness = {
        spec.name: load_harness_task(spec, options.data, options.limit)
        for spec in suite.tasks
        if spec.method == "lm_eval"
    }
    if calibration:
        texts = {name: item_texts(many) for name, many in items.items()}
        texts |= {name: loaded.texts() for name, loaded in harness.items()}
        check_overlap(texts, calibration, allow=allow_overlap)
    refuse_code(suite.tasks, options)
    bench = Bench.over(scorer)
    if progress is not None:
        bench.progress = _named(progress, TOGETHER)
    ask_together(bench, [(spec, items[spec.name]) for spec in suite.tasks if spec.name in items])
    results = []
    for spec in suite.tasks:
        if progress is not None:
            progress(0, 1, spec.name)
            bench.progress = _named(progress, spec.name)
        if spec.method == "lm_eval":
            results.append(run_harness_task(scorer, harness[spec.name]))
        else:
            results.append(run_task(bench, spec, items[spec.name], options))
    return with_call_rate(results)


def with_call_rate(results: Sequence[TaskResult]) -> list[TaskResult]:
    """Irrelevance never stands without the call rate, taken from all whole-call items."""
    called = [
        outcome.verdict != "no_call"
        for result in results
        if result.metric == "exact_call"
        for outcome in result.outcomes
        if outcome.expected
    ]
    if not called:
        return list(results)
    rate = float(np.mean(called))
    return [
        replace(result, notes={**result.notes, "call_rate_when_relevant": rate})
        if "irrelevance" in result.notes and "call_rate_when_relevant" not in result.notes
        else result
        for result in results
    ]


def run_task(
    bench: Bench, spec: TaskSpec, items: Sequence[Item], options: SuiteOptions
) -> TaskResult:
    """One task of our own methods."""
    if spec.method == "code":
        if options.sandbox is None:
            raise ConfigError(f"{spec.name} executes code: allow it with --execute-code")
        outcomes, metric = code(bench, spec, items, options.sandbox), "pass_at_1"
    else:
        method, metric = METHODS[spec.method]
        outcomes = method(bench, spec, items)
    used = {item.id: item for item in items}
    chance = spec.chance
    if spec.method == "tool_choice" and outcomes:
        chance = float(np.mean([1 / len(used[o.item].tools) for o in outcomes]))
    ids = _first_ids(bench, items)
    notes = _call_notes(outcomes, used) if spec.method == "tool_exact" else {}
    settings = spec.settings()
    if items and items[0].tools:
        settings["form"] = bench.form
    if spec.method in GENERATED:
        settings["form"] = read_form(bench, spec, [])
        if settings["form"] != bench.form:
            notes |= {"calls_read_as": str(settings["form"]), "template_form": bench.form}
    return TaskResult(
        *(spec.name, spec.category, metric, tuple(outcomes), chance, notes, ids),
        settings=settings,
    )


def read_alike(tasks: Sequence[TaskSpec], results: Sequence[TaskResult]) -> tuple[TaskSpec, ...]:
    """The tasks for further files of the model, whose answers are read as those of the first."""
    forms = {r.name: r.settings["form"] for r in results if "form" in r.settings}
    return tuple(
        task.model_copy(update={"form": forms[task.name]})
        if task.method in GENERATED and task.name in forms
        else task
        for task in tasks
    )


def _named(progress: Progress, name: str) -> Callable[[int, int], None]:
    def step(done: int, total: int) -> None:
        progress(done, total, name)

    return step


def refuse_code(tasks: Sequence[TaskSpec], options: SuiteOptions) -> None:
    """Raise ConfigError for tasks that run code where that is not allowed."""
    names = [spec.name for spec in tasks if spec.method == "code"]
    if names and options.sandbox is None:
        raise ConfigError(
            f"{', '.join(names)}: these tasks run code that the model writes; allow it with "
            "--execute-code (in a sandbox; `bitwright eval doctor` says what it needs)"
        )


def _first_ids(bench: Bench, items: Sequence[Item]) -> tuple[int, ...]:
    """The first prompt's ids, so that BOS and template can be looked at."""
    if not items or not items[0].messages:
        return ()
    return tuple(bench.prompt(items[0])[1].tolist())


def _call_notes(outcomes: Sequence[Outcome], items: Mapping[str, Item]) -> dict[str, float | str]:
    """Irrelevance together with the call rate: a model that never calls is right on all of it."""
    silent = [
        o.verdict == "no_call" or (o.verdict == CORRECT and not items[o.item].gold)
        for o in outcomes
    ]
    notes: dict[str, float | str] = {}
    if outcomes:
        notes["call_rate"] = 1 - float(np.mean(silent))
    relevant = [not s for s, o in zip(silent, outcomes, strict=True) if items[o.item].gold]
    irrelevant = [o.value for o in outcomes if not items[o.item].gold]
    if relevant:
        notes["call_rate_when_relevant"] = float(np.mean(relevant))
    if irrelevant:
        notes["irrelevance"] = float(np.mean(irrelevant))
        notes["n_irrelevant"] = float(len(irrelevant))
    return notes
