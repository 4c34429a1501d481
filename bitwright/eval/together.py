"""Everything that a suite's tasks ask about one item, asked where its prompt stands decoded.

Choosing a function, scoring the right call and generating one start from the same prompt, and long
prompts are most of the work. The tasks then find their answers and scores in the bench; the numbers
are those of each task run alone.
"""

from collections.abc import Sequence

from bitwright.eval.generation import Prompt
from bitwright.eval.items import Item
from bitwright.eval.methods import (
    Bench,
    answer_key,
    call_pair,
    choice_pairs,
    has_choice,
    score_key,
    task_prompt,
)
from bitwright.eval.score import Pair
from bitwright.eval.task_suite import TaskSpec

GENERATED = ("tool_exact", "tool_name")
SCORED = ("tool_choice", "tool_nats")


def ask_together(bench: Bench, tasks: Sequence[tuple[TaskSpec, Sequence[Item]]]) -> None:
    """Answer and score the tool tasks' items that both kinds of tasks ask about."""
    prompts: dict[bytes, Prompt] = {}
    for spec, items in tasks:
        for item in items if spec.method in GENERATED else ():
            prompt = task_prompt(spec, bench.prompt(item)[1])
            prompts.setdefault(prompt.tokens.tobytes(), prompt)
    requests: dict[bytes, list[Pair]] = {}
    for spec, items in tasks:
        for item in items if prompts and spec.method in SCORED else ():
            text, ids = bench.prompt(item)
            if ids.tobytes() in prompts:
                requests.setdefault(ids.tobytes(), []).extend(_pairs(bench, spec, item, text))
    shared = [key for key, pairs in requests.items() if pairs]
    if not shared:
        return
    asked = [prompts[key] for key in shared]
    answers, scores = bench.scorer.generate_and_score(
        asked, [requests[key] for key in shared], bench.progress
    )
    bench.answers.update(zip(map(answer_key, asked), answers, strict=True))
    for key, found in zip(shared, scores, strict=True):
        bench.scores.update(zip(map(score_key, requests[key]), found, strict=True))


def _pairs(bench: Bench, spec: TaskSpec, item: Item, prompt: str) -> list[Pair]:
    if spec.method == "tool_nats":
        return [call_pair(bench, item, prompt)] if item.calls else []
    return choice_pairs(bench, item, prompt) if has_choice(item) else []
