"""Two files on the same tokens of the same reference: KLD, log-likelihood and top-1, paired.

Each token is compared with itself. Tokens of one document resemble each other, so documents are
what is resampled (intervals) and what changes sign (p-values): for top-1 that is McNemar's test
with documents as clusters. McNemar's own p, which takes tokens for independent, stands beside it.
"""

from collections.abc import Mapping
from dataclasses import replace
from zlib import crc32

import numpy as np

from bitwright.eval.pairing import (
    Difference,
    FloatArray,
    bootstrap_interval,
    changes,
    judged,
    mcnemar,
    sign_flip,
    smallest_visible,
)
from bitwright.eval.statistics import document_difference, document_sums, paired_ratio
from bitwright.eval.suite import DivergenceSuite, kind_codes
from bitwright.eval.tokens import TokenTable

# Task → metric: nats of KLD from the reference; negative log-likelihood of the text in nats;
# share of tokens whose likeliest one is the reference's.
METRICS: Mapping[str, str] = {"kld": "kld_nats", "nll": "nats_per_token", "top1": "accuracy"}


def compare_tokens(
    a: Mapping[str, TokenTable], b: Mapping[str, TokenTable], suite: DivergenceSuite
) -> dict[str, Difference]:
    """`CATEGORY/kld`, `CATEGORY/nll` and `CATEGORY/top1`: b minus a on the spans that count.

    Both hold the same categories, and the rows of each are the same tokens. A category without
    scored tokens has no difference. p-values are corrected over everything that is compared.
    """
    found: dict[str, Difference] = {}
    for category in a:
        codes = suite.category(category).codes()
        left = a[category].select(codes)
        # Each KLD is against its own run's reference; `reference_gap` says how far two are apart.
        right = replace(b[category].select(codes), nll_ref=left.nll_ref)
        if left.n_tokens:
            found.update(_differences(left, right, suite))
            spans = _spans(a[category], b[category], suite)
            kld = found[f"{category}/kld"]
            found[f"{category}/kld"] = kld.with_details({"spans": spans}) if spans else kld
    return judged(found)


def _spans(
    a: TokenTable, b: TokenTable, suite: DivergenceSuite
) -> dict[str, dict[str, float | int | None]]:
    """The suite's further rows (tool calls by themselves, everything): shown, never judged."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name, kinds in suite.category(a.category).details.items():
        left, right = (table.select(kind_codes(kinds)) for table in (a, b))
        if left.n_tokens:
            rng = np.random.default_rng(
                [suite.statistics.seed, crc32(f"{a.category}/{name}".encode())]
            )
            kld = document_difference(right.kld - left.kld, left.document, rng)
            found[name] = {
                "difference": kld.value,
                "low": kld.low,
                "high": kld.high,
                "n": left.n_tokens,
                "n_documents": kld.n_documents,
                "top1_gained": int((right.same_top1 & ~left.same_top1).sum()),
                "top1_lost": int((left.same_top1 & ~right.same_top1).sum()),
            }
    return found


def reference_gap(a: Mapping[str, TokenTable], b: Mapping[str, TokenTable]) -> float:
    """Largest mean difference, over categories, of the references' own log-likelihoods, in nats.

    0.0 where one build of llama.cpp computed both with the same settings.
    """
    gaps = [float(np.abs(a[c].nll_ref - b[c].nll_ref).mean()) for c in a if a[c].n_tokens]
    return max(gaps, default=0.0)


def _differences(
    left: TokenTable, right: TokenTable, suite: DivergenceSuite
) -> dict[str, Difference]:
    category = left.category
    values = {
        "kld": (left.kld, right.kld),
        "nll": (left.nll, right.nll),
        "top1": (left.same_top1.astype(np.float64), right.same_top1.astype(np.float64)),
    }
    found = {}
    for name, (before, after) in values.items():
        rng = np.random.default_rng([suite.statistics.seed, crc32(f"{category}/{name}".encode())])
        found[f"{category}/{name}"] = _difference(left, name, before, after, rng, suite)
    rng = np.random.default_rng([suite.statistics.seed, crc32(category.encode())])
    settings = suite.statistics
    ratio = paired_ratio(
        right, left, rng, resamples=settings.resamples, confidence=settings.confidence
    )
    kld = found[f"{category}/kld"]
    shown = {key: value for key, value in ratio.as_dict().items() if key != "n_documents"}
    found[f"{category}/kld"] = kld.with_details({"ratio": shown})
    return found


def _difference(
    table: TokenTable,
    name: str,
    before: FloatArray,
    after: FloatArray,
    rng: np.random.Generator,
    suite: DivergenceSuite,
) -> Difference:
    delta = after - before
    settings = suite.statistics
    interval = document_difference(
        delta, table.document, rng, resamples=settings.resamples, confidence=settings.confidence
    )
    sums = document_sums(table.document, np.stack([delta, np.ones(len(delta))], 1))
    n_documents = len(sums)
    details: dict[str, object] = {"n_documents": n_documents}
    low, high = interval.low, interval.high
    if name == "top1":
        details |= changes(before, after) | {"p_mcnemar": mcnemar(before, after)}
        if not delta.any():
            # No token differs: what so many documents allow at 95 % (the rule of three).
            low, high = -min(1.0, 3 / n_documents), min(1.0, 3 / n_documents)
        elif low is None and n_documents > 1:
            # Flips in one or two documents only: most resamples have no spread to divide by.
            low, high = bootstrap_interval(sums[:, 0], sums[:, 1], rng)
    p = sign_flip(sums[:, 0], rng)
    return Difference(
        category=table.category,
        metric=METRICS[name],
        a=float(before.mean()),
        b=float(after.mean()),
        difference=float(delta.mean()),
        low=low,
        high=high,
        p=p,
        p_holm=p,
        n=len(delta),
        smallest_visible=smallest_visible(sums[:, 0], sums[:, 1], share=name == "top1"),
        verdict="no difference shown",
        details=details,
    )
