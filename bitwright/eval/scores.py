"""From token tables to the numbers of result.json: scores per file, ratios, verdict."""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from bitwright.eval.divergence import ScoreTable
from bitwright.eval.statistics import Interval, Summary, Verdict, paired_ratio, summarize, verdict
from bitwright.eval.suite import DivergenceSuite, kind_codes


@dataclass(frozen=True, slots=True)
class Comparison:
    """One file against another: KLD ratio per category, target first, and what it shows."""

    label: str
    baseline: str
    target: Interval
    off_target: dict[str, Interval]
    verdict: Verdict

    def as_dict(self) -> dict[str, object]:
        """The fields of result.json that compare the chosen file with the baseline."""
        return {
            "target_kld_ratio": self.target.as_dict(),
            "off_target_kld_ratio": {c: r.as_dict() for c, r in self.off_target.items()},
            "verdict": self.verdict,
        }


def scores_of(
    scores: ScoreTable, label: str, suite: DivergenceSuite, baseline: str | None = None
) -> dict[str, dict[str, object]]:
    """The ``scores`` field of one file: {category: numbers}, with detail rows under ``spans``.

    With a ``baseline``, each category also carries ``ratio``: this file's mean KLD over the
    baseline's, with its interval.
    """
    result: dict[str, dict[str, object]] = {}
    for category in scores.categories:
        spans = suite.category(category)
        entry = dict(_summary(scores, label, category, spans.spans, suite).as_dict())
        details = {
            name: _summary(scores, label, category, kinds, suite)
            for name, kinds in spans.details.items()
        }
        fields: dict[str, object] = {**entry, "spans": {n: _short(s) for n, s in details.items()}}
        if baseline is not None and baseline != label:
            fields["ratio"] = kld_ratio(scores, label, baseline, category, suite).as_dict()
        result[category] = fields
    return result


def compare(
    scores: ScoreTable, label: str, baseline: str, target: str, suite: DivergenceSuite
) -> Comparison:
    """``label`` against ``baseline`` on every category; the verdict is the target's."""
    ratios = {
        category: kld_ratio(scores, label, baseline, category, suite)
        for category in scores.categories
    }
    on_target = ratios.pop(target)
    return Comparison(label, baseline, on_target, ratios, verdict(on_target))


def kld_ratio(
    scores: ScoreTable, label: str, baseline: str, category: str, suite: DivergenceSuite
) -> Interval:
    """Paired ratio of mean KLDs on the category's own spans."""
    codes = suite.category(category).codes()
    return paired_ratio(
        scores.table(label, category).select(codes),
        scores.table(baseline, category).select(codes),
        category_rng(suite, category),
        resamples=suite.statistics.resamples,
        confidence=suite.statistics.confidence,
    )


def mean_kld(scores: ScoreTable, label: str, category: str, suite: DivergenceSuite) -> float | None:
    """Mean KLD in nats on the category's own spans, without resampling; None without tokens."""
    table = scores.table(label, category).select(suite.category(category).codes())
    return float(np.mean(table.kld)) if table.n_tokens else None


def category_rng(suite: DivergenceSuite, category: str) -> np.random.Generator:
    """The category's generator: the same resamples for every file, whatever else is scored."""
    return np.random.default_rng([suite.statistics.seed, crc32(category.encode())])


def _summary(
    scores: ScoreTable, label: str, category: str, kinds: tuple[str, ...], suite: DivergenceSuite
) -> Summary:
    table = scores.table(label, category).select(kind_codes(kinds))
    return summarize(table, category_rng(suite, category), suite.statistics.resamples)


def _short(summary: Summary) -> dict[str, object]:
    return {
        "kld_nats": summary.kld_nats,
        "se": summary.se,
        "top1": summary.top1,
        "n_tokens": summary.n_tokens,
    }
