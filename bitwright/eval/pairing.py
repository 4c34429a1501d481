"""Two files on the same items: paired differences, tests, and what this n could have seen.

Accuracy: McNemar's exact test on the items on which the two disagree (McNemar 1947), an interval
from the paired bootstrap over items. Nats and bits: a sign-flip permutation test on the items'
shares of the difference. p-values are corrected over the tasks by Holm's step-down (1979).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

from bitwright.errors import InputError
from bitwright.eval.outcome import LOWER_IS_BETTER, TaskResult, ratio_and_error

Verdict = Literal["better", "worse", "no difference shown"]
RESAMPLES = 4000
FLIPS = 10_000
ALPHA = 0.05
POWER = 0.8
BLOCK = 500  # resamples at one time
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """b minus a on one task, with its 95 % interval.

    ``p_holm`` is ``p`` corrected over all compared tasks. ``smallest_visible``: the difference
    that a test at 5 % would have found 4 times in 5, given how much the items disagree. Bounds and
    it are None where too few items or documents leave them unknown. ``details``: further numbers.
    """

    category: str
    metric: str
    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    p: float
    p_holm: float
    n: int
    smallest_visible: float | None
    verdict: Verdict
    details: Mapping[str, object] = field(default_factory=dict)

    def with_details(self, more: Mapping[str, object]) -> "Difference":
        """The same with further numbers."""
        return replace(self, details={**self.details, **more})

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "category": self.category,
            "metric": self.metric,
            "a": self.a,
            "b": self.b,
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "p": self.p,
            "p_holm": self.p_holm,
            "n": self.n,
            "smallest_visible": self.smallest_visible,
            "verdict": self.verdict,
            **self.details,
        }


def compare_results(
    a: Sequence[TaskResult], b: Sequence[TaskResult], *, seed: int = 0
) -> dict[str, Difference]:
    """Differences of the tasks that both have, in a's order.

    Raises:
        InputError: no common task with items, or a task whose items or prompts are not the same.
    """
    others = {result.name: result for result in b}
    found = {
        result.name: _difference(result, others[result.name], seed)
        for result in a
        if result.name in others and result.outcomes
    }
    if not found:
        raise InputError(
            "the two results have no task with items in common: evaluate both with the same suite"
        )
    return judged(found)


def judged(found: Mapping[str, Difference]) -> dict[str, Difference]:
    """The differences with Holm's correction over all of them, and the verdict it leaves."""
    corrected = holm([d.p for d in found.values()])
    return {
        name: replace(d, p_holm=p, verdict=_verdict(d, p))
        for (name, d), p in zip(found.items(), corrected, strict=True)
    }


def check_same_items(a: TaskResult, b: TaskResult) -> None:
    """Paired statistics need the same items with the same token ids.

    Raises:
        InputError: names the task and the first item that differs.
    """
    if [o.item for o in a.outcomes] != [o.item for o in b.outcomes]:
        raise InputError(
            f"{a.name}: the two results have other items ({len(a.outcomes)} and "
            f"{len(b.outcomes)}); evaluate both with the same suite, seed and limit"
        )
    if a.metric != b.metric:
        raise InputError(f"{a.name}: one result is {a.metric}, the other {b.metric}")
    for name in a.settings.keys() & b.settings.keys():
        if a.settings[name] != b.settings[name]:
            what = "the same --call-form" if name == "form" else "the same suite"
            raise InputError(
                f"{a.name}: one file was asked with {name} {a.settings[name]!r}, the other with "
                f"{b.settings[name]!r}; evaluate both with {what}"
            )
    for left, right in zip(a.outcomes, b.outcomes, strict=True):
        if left.prompt_sha256 != right.prompt_sha256:
            raise InputError(
                f"{a.name}/{left.item}: the two files were sent other token ids "
                f"({left.prompt_sha256[:8]} and {right.prompt_sha256[:8]}), so their tokenizers, "
                "chat templates or BOS rules differ and the scores cannot be compared"
            )


def _difference(a: TaskResult, b: TaskResult, seed: int) -> Difference:
    check_same_items(a, b)
    (va, weights), (vb, weights_b) = a.arrays(), b.arrays()
    # An item that one of the two could not take says nothing of their difference.
    keep = (weights > 0) & (weights_b > 0)
    va, vb, weights = va[keep], vb[keep], weights[keep]
    n = len(va)
    if n == 0:
        raise InputError(f"{a.name}: no item was scored by both files")
    first, second = ratio_and_error(va, weights)[0], ratio_and_error(vb, weights)[0]
    assert first is not None
    assert second is not None
    rng = np.random.default_rng([seed, crc32(a.name.encode())])
    delta = vb - va
    binary = bool(np.isin(np.concatenate([va, vb]), (0.0, 1.0)).all() and (weights == 1).all())
    low, high = bootstrap_interval(delta, weights, rng)
    if binary and not delta.any():
        # No item differs: what n items allow at 95 % (the rule of three), not a width of 0.
        low, high = -min(1.0, 3 / n), min(1.0, 3 / n)
    p = mcnemar(va, vb) if binary else sign_flip(delta, rng)
    return Difference(
        category=a.category,
        metric=a.metric,
        a=first,
        b=second,
        difference=second - first,
        low=min(low, second - first),
        high=max(high, second - first),
        p=p,
        p_holm=p,
        n=n,
        smallest_visible=smallest_visible(delta, weights, share=binary),
        verdict="no difference shown",
        details=changes(va, vb) if binary else {},
    )


def _verdict(d: Difference, p_holm: float) -> Verdict:
    if p_holm >= ALPHA:
        return "no difference shown"
    higher_is_better = d.metric not in LOWER_IS_BETTER
    return "better" if (d.difference > 0) == higher_is_better else "worse"


def changes(a: FloatArray, b: FloatArray) -> dict[str, object]:
    """How many items only the second has right, and how many only the first."""
    return {"gained": int((b > a).sum()), "lost": int((b < a).sum())}


def mcnemar(a: FloatArray, b: FloatArray) -> float:
    """Exact two-sided p of as many gains as losses among the items that changed; 1 without any."""
    gained, lost = int((b > a).sum()), int((b < a).sum())
    if gained + lost == 0:
        return 1.0
    return float(binomtest(gained, gained + lost, 0.5).pvalue)


def sign_flip(delta: FloatArray, rng: np.random.Generator) -> float:
    """Two-sided p that the items' differences are symmetric about 0.

    The identity counts as one of the flips, so p is never 0 (Phipson & Smyth 2010).
    """
    observed = abs(float(delta.sum()))
    if not delta.any():
        return 1.0
    hits = 0
    for done in range(0, FLIPS, BLOCK):
        signs = rng.integers(0, 2, (min(BLOCK, FLIPS - done), len(delta))) * 2.0 - 1.0
        hits += int((np.abs(signs @ delta) >= observed * (1 - 1e-12)).sum())
    return (hits + 1) / (FLIPS + 1)


def bootstrap_interval(
    delta: FloatArray, weights: FloatArray, rng: np.random.Generator
) -> tuple[float, float]:
    """95 % interval of sum(delta) / sum(weights), resampling items; the same items for both."""
    n, parts = len(delta), []
    for done in range(0, RESAMPLES, BLOCK):
        counts = rng.multinomial(n, np.full(n, 1 / n), size=min(BLOCK, RESAMPLES - done))
        parts.append((counts @ delta) / (counts @ weights))
    low, high = np.quantile(np.concatenate(parts), [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def smallest_visible(
    delta: FloatArray, weights: FloatArray, *, share: bool = False
) -> float | None:
    """The true difference that a two-sided 5 % test finds with 80 % probability.

    Where no item's share of right answers differs, the share of items that do is taken at the upper
    end of what n items allow (the rule of three), so that two equal files still say what n could
    have seen. None for a single item.
    """
    n, total = len(delta), float(weights.sum())
    if n < 2:
        return None
    _, se = ratio_and_error(delta, weights)
    if not se:
        se = math.sqrt(3 / n) / math.sqrt(n) if share else 0.0
    factor = float(norm.ppf(1 - ALPHA / 2) + norm.ppf(POWER))
    return factor * se if total > 0 else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the given order."""
    m = len(p_values)
    out, running = [0.0] * m, 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (m - rank) * p_values[i]))
        out[i] = running
    return out


def by_category(differences: Mapping[str, Difference], target: str | None) -> dict[str, list[str]]:
    """Task names of the target category, and of the others: one page, target first."""
    names: dict[str, list[str]] = {"target": [], "off_target": []}
    for name, difference in differences.items():
        names["target" if difference.category == target else "off_target"].append(name)
    return names
