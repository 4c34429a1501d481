"""The tokens that are counted beforehand are those that are decoded."""

import numpy as np

from bitwright.engine.decoder import MIN_ROWS, DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.eval.run_suite import SuiteOptions, load_items, run_suite
from bitwright.eval.scorer import Scorer
from bitwright.eval.suite_cost import new_tokens, suite_cost
from bitwright.eval.task_suite import load_task_suite


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_common_starts_are_counted_once() -> None:
    assert new_tokens([ids(1, 2, 3), ids(1, 2, 4, 5), ids(9)]) == 3 + 2 + 1
    assert new_tokens([ids(1, 2), ids(1, 2)]) == 2
    assert new_tokens([]) == 0


def test_what_is_counted_is_what_is_decoded() -> None:
    (task,) = [t for t in load_task_suite("builtin").tasks if t.name == "tool_exact"]
    task = task.model_copy(update={"limit": 20, "max_tokens": 1})
    items = load_items(task, SuiteOptions())
    suite = load_task_suite("builtin").model_copy(update={"tasks": (task,)})
    with Scorer(open_model("demo"), DecoderOptions(threads=1, n_ctx=256, slots=1)) as scorer:
        cost = suite_cost(scorer.prompts, [(task, items)])
        run_suite(scorer, suite, SuiteOptions())
        decoded = scorer.decoder.counters.decoded
    assert cost.n_items == cost.answer_tokens == cost.most_answer_tokens == 20
    # A few tokens before each new start are decoded again, to fill a batch.
    assert cost.prompt_tokens <= decoded <= cost.prompt_tokens + 20 * MIN_ROWS
