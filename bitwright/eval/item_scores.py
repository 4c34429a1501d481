"""From tasks scored on many files to the numbers that `breakage` compares item by item."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import InputError
from bitwright.eval.breakage import SizeScores
from bitwright.eval.outcome import CORRECT, LOWER_IS_BETTER, Outcome, TaskResult

# Metrics of whole answers that were generated and checked: what a user would notice.
WHOLE_ANSWERS = ("exact_call", "pass_at_1", "exact_number", "exact_match")


def headlines(results: Sequence[TaskResult]) -> dict[str, TaskResult]:
    """The task that speaks for each category.

    Its first one of whole answers, else its first executed one, else its first.
    """
    found: dict[str, TaskResult] = {}
    for result in results:
        held = found.get(result.category)
        if held is None or _rank(result) < _rank(held):
            found[result.category] = result
    return found


def _rank(result: TaskResult) -> int:
    return 0 if result.metric in WHOLE_ANSWERS else 1 if is_executed(result) else 2


def is_executed(result: TaskResult) -> bool:
    """Whether answers were generated or chosen and checked; else the task is a likelihood."""
    return result.metric not in LOWER_IS_BETTER


def served(result: TaskResult) -> tuple[Outcome, ...]:
    """The task's items without tool requests that no offered tool serves.

    A model that calls nothing at all would score on those, so they hide a break.
    """
    if result.metric not in ("exact_call", "right_function"):
        return result.outcomes
    return tuple(o for o in result.outcomes if o.expected)


def size_scores(
    reference: TaskResult, sizes: Sequence[TaskResult], bpw: Sequence[float]
) -> SizeScores:
    """One task at every size beside the reference; more is better in every value.

    Likelihoods change their sign, and are divided by the mean weight, so that the mean over items
    is the task's own value.

    Raises:
        InputError: no items, or a size was scored on other ones.
    """
    asked = _asked(reference)
    if not asked:
        raise InputError(f"{reference.name} has no items, so no size can be compared on it")
    for size in sizes:
        if _asked(size) != asked:
            raise InputError(
                f"{reference.name} was scored on other items at one size than on the reference: "
                "score both in one run"
            )
    return SizeScores(
        reference.category,
        np.asarray(bpw, dtype=np.float64),
        _values(reference),
        np.stack([_values(size) for size in sizes]),
    )


def _asked(result: TaskResult) -> list[tuple[str, str]]:
    return [(o.item, o.prompt_sha256) for o in served(result)]


def _values(result: TaskResult) -> NDArray[np.float64]:
    found = served(result)
    values = np.array([o.value for o in found], dtype=np.float64)
    weights = np.array([o.weight for o in found], dtype=np.float64)
    signed = -values if result.metric in LOWER_IS_BETTER else values
    mean = float(weights.mean())
    scaled: NDArray[np.float64] = signed / mean if mean > 0 else signed
    return scaled


def new_failures(reference: TaskResult, size: TaskResult) -> dict[str, int]:
    """Kinds of failure among items that only the reference has right; the most frequent first."""
    right = {o.item for o in served(reference) if o.verdict == CORRECT}
    kinds = Counter(o.verdict for o in served(size) if o.item in right and o.verdict != CORRECT)
    return dict(sorted(kinds.items(), key=lambda pair: (-pair[1], pair[0])))


def first_failure(kinds: Mapping[str, int]) -> str | None:
    """The most frequent kind; None where nothing failed anew."""
    return next(iter(kinds), None)
