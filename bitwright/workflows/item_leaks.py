"""Generated items that resemble the run's own calibration text are left out, as corpora do.

Short generated questions share phrasings by construction, so one in a thousand or so resembles a
document. Items of data sets are another matter: those refuse the run (see run_suite).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bitwright.corpora.leaks import overlap
from bitwright.eval.prompts import Prompts
from bitwright.eval.run_suite import SuiteOptions, load_items
from bitwright.eval.task_suite import TaskSpec
from bitwright.workflows.calibration import calibration_texts
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import key_of


def generated_leaks(
    ctx: RunContext, folder: str, tasks: Sequence[TaskSpec], prompts: Callable[[], Prompts]
) -> frozenset[str]:
    """'task/item' of each generated item of which a fifth of the 13-grams stands in the text."""
    corpus = ctx.folder.manifest("corpus")
    generated = [task for task in tasks if task.source_parts[0] == "builtin"]
    if corpus is None or not generated or ctx.spec.scores.allow_overlap:
        return frozenset()
    inputs = {
        "corpus": corpus["key"],
        "tasks": [task.model_dump(mode="json") for task in generated],
    }

    def compute() -> tuple[dict[str, Any], list[Path]]:
        documents = calibration_texts((ctx.folder.path,), prompts().tokenizer)
        texts = {
            f"{task.name}/{item.id}": item.own_text()
            for task in generated
            for item in load_items(task, SuiteOptions())
        }
        found = sorted(one.text for one in overlap(documents, texts))
        if found:
            ctx.reporter.note(
                f"{len(found)} of {len(texts)} generated items resemble the calibration text and "
                f"are left out: {', '.join(found[:5])}"
            )
        return {"left_out": found}, []

    stage = ctx.folder.stage(f"{folder}/left-out", key_of("leaks", inputs), compute, inputs=inputs)
    return frozenset(stage["left_out"])
