"""How many tokens a suite takes of one file, before any file is scored."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.eval.items import Item
from bitwright.eval.prompts import Prompts
from bitwright.eval.task_suite import TaskSpec
from bitwright.eval.tool_formats import format_of, write_calls

GENERATING = ("tool_exact", "tool_name", "number", "exact", "code")

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SuiteCost:
    """Tokens of one file.

    ``prompt_tokens``: decoded once each, common starts not counted again. ``answer_tokens``: of the
    right answers, where they are known; ``most_answer_tokens``: where every answer goes on to its
    limit.
    """

    n_items: int
    prompt_tokens: int
    answer_tokens: int
    most_answer_tokens: int


def suite_cost(prompts: Prompts, tasks: Sequence[tuple[TaskSpec, Sequence[Item]]]) -> SuiteCost:
    """The tokens of tasks with items of their own; lm-eval's own tasks are not counted."""
    form = format_of(prompts.template_source) if prompts.template_style == "model" else "hermes"
    asked: dict[bytes, Tokens] = {}
    answers: dict[tuple[bytes, int], tuple[int, int]] = {}
    for spec, items in tasks:
        for item in items:
            text = item.text or prompts.prompt_text(item.messages, item.tools or None)
            ids = prompts.encode(text)
            asked.setdefault(ids.tobytes(), ids)
            if spec.method in GENERATING:
                right = item.answer or write_calls(list(item.calls), form)
                length = min(len(prompts.encode(right)) + 1, spec.max_tokens)
                answers[ids.tobytes(), spec.max_tokens] = (length, spec.max_tokens)
    return SuiteCost(
        len(asked),
        new_tokens(list(asked.values())),
        sum(right for right, _ in answers.values()),
        sum(most for _, most in answers.values()),
    )


def new_tokens(sequences: Sequence[Tokens]) -> int:
    """Tokens that differ from the start of the sequence before, in sorted order."""
    ordered = sorted(sequences, key=lambda ids: ids.tolist())
    total, last = 0, np.empty(0, np.int32)
    for ids in ordered:
        n = min(len(ids), len(last))
        different = np.flatnonzero(ids[:n] != last[:n])
        total += len(ids) - (int(different[0]) if len(different) else n)
        last = ids
    return total
