"""What a reader must know before believing a task's number; nothing is averaged in silence."""

from collections import Counter
from collections.abc import Sequence

from bitwright.eval.outcome import CORRECT, TaskResult

UNREAD = frozenset({"empty", "unparsable", "no_code", "no_number"})
MOST_UNREAD = 0.2
SAMPLES = 3
SAMPLE_CHARS = 200


def flags_of(result: TaskResult) -> list[str]:
    """Warnings about one task, each a sentence with numbers."""
    n = len(result.outcomes)
    if n == 0:
        return [f"{result.name}: 0 items, so there is no score"]
    out = []
    verdicts = Counter(outcome.verdict for outcome in result.outcomes)
    if verdicts["too_long"]:
        out.append(f"{result.name}: {verdicts['too_long']} of {n} prompts do not fit the context")
    if cut_prompts := result.notes.get("cut_prompts"):
        out.append(
            f"{result.name}: {cut_prompts:.0f} requests did not fit the context and lost their "
            "beginning"
        )
    cut = sum(o.truncated and o.verdict != "too_long" for o in result.outcomes)
    if cut:
        out.append(f"{result.name}: {cut} of {n} answers were cut by the token limit")
    if read_as := result.notes.get("calls_read_as"):
        out.append(
            f"{result.name}: the model does not write calls in its template's form "
            f"({result.notes['template_form']}), so they were read as {read_as}"
        )
    rate = result.notes.get("call_rate_when_relevant")
    if rate == 0:
        out.append(f"{result.name}: the model called no function at all (call rate 0)")
    if rate is None and "irrelevance" in result.notes:
        out.append(
            f"{result.name}: irrelevance without a call rate says nothing: a model that never "
            "calls is right on all of it; score a task whose items need calls in the same suite"
        )
    summary = result.summary()
    value, se = summary["value"], summary["se"]
    if result.chance is not None and isinstance(value, float):
        error = se if isinstance(se, float) else 0.0
        if value - 2 * error <= result.chance:
            out.append(
                f"{result.name}: {value:.3f} ± {error:.3f} is no better than chance "
                f"({result.chance:.3f})"
            )
    return out + _suspect(result, verdicts, n)


def _suspect(result: TaskResult, verdicts: Counter[str], n: int) -> list[str]:
    """Nothing right, or many answers unread: more often the harness than the model."""
    judged = result.chance is None and not set(verdicts) <= {"measured", "too_long"}
    unread = sum(verdicts[kind] for kind in UNREAD)
    if not judged or (verdicts[CORRECT] and unread <= MOST_UNREAD * n):
        return []
    what = "no item is right" if not verdicts[CORRECT] else f"{unread} of {n} answers are unread"
    shown = [o for o in result.outcomes if o.verdict != CORRECT][:SAMPLES]
    samples = " | ".join(f"{o.item}: {o.output[:SAMPLE_CHARS]!r}" for o in shown)
    return [f"{result.name}: suspect harness fault ({what}); samples: {samples}"]


def failures_of(results: Sequence[TaskResult], metric: str = "exact_call") -> dict[str, int]:
    """Kinds of failed calls over all tasks that judge whole calls, most frequent first."""
    counts = Counter(
        outcome.verdict
        for result in results
        if result.metric == metric
        for outcome in result.outcomes
        if outcome.verdict != CORRECT
    )
    return dict(counts.most_common())
