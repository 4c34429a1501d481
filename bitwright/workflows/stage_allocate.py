"""Stage 4: candidate layouts from the damage map; the one that measures best is ours.

The additive table only proposes. What decides is the whole layout's KLD on the ``select`` split,
in memory, beside upstream's own layout with the same imatrix.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.candidates import (
    HONEST,
    ROLE_RULE,
    CandidateLayout,
    is_control,
    predict,
    propose,
)
from bitwright.allocator.terms import SideBudget, Terms, off_target_prices
from bitwright.corpora.records import Corpus
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.pooling import pool
from bitwright.damage.pricing import DamageTable, price_types, types_to_pack
from bitwright.engine.imatrix import Imatrix
from bitwright.eval.divergence import Candidate
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.eval.statistics import Interval
from bitwright.eval.suite import DivergenceSuite
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import JointMeter
from bitwright.workflows.mixes import ChosenMix, make_mixes
from bitwright.workflows.preflight import Plan, make_options
from bitwright.workflows.stage_damage import Errors, make_packer, measure_errors
from bitwright.workflows.stage_evaluate import Chunks, record_scores, score_on, split_chunks
from bitwright.workflows.stage_search import Task, search

EXPONENTS = (0.75, 1.0, 1.25)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Candidates with what they were predicted and measured to cost on ``select``.

    measured: label → category → mean KLD in nats. ``ours`` is our best candidate;
    ``keep_stock`` says that it measured no better than upstream's layout, or broke a price, and
    ``reason`` why. prices: off-target category → ε. mixes: the imatrices that candidates may name.
    """

    candidates: Mapping[str, CandidateLayout]
    measured: Mapping[str, Mapping[str, float]]
    ours: str
    keep_stock: bool
    errors: Errors
    reason: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)
    mixes: Mapping[str, Imatrix] = field(default_factory=dict)

    @property
    def imatrix(self) -> str:
        """The name of the imatrix that our best candidate is packed with."""
        return self.candidates[self.ours].imatrix

    def controls(self, target: str) -> dict[str, CandidateLayout]:
        """The simpler layouts that ours is reported against: the role rule that measured best on
        the target, and the best layout with an honest name; each only where there is one."""
        found = {}
        rules = [label for label in self.candidates if label.startswith(ROLE_RULE)]
        if rules:
            best = min(rules, key=lambda label: self.measured[label].get(target, math.inf))
            found[ROLE_RULE] = self.candidates[best]
        if HONEST in self.candidates:
            found[HONEST] = self.candidates[HONEST]
        return found

    def predicted_over_measured(self, label: str, category: str) -> float | None:
        """How far the additive table was off, None where nothing was measured."""
        measured = self.measured[label].get(category)
        return self.candidates[label].predicted[category] / measured if measured else None


def allocate(
    ctx: RunContext,
    plan: Plan,
    corpora: Mapping[str, Corpus],
    damage_map: DamageMap,
    mix: ChosenMix,
    suite: DivergenceSuite,
) -> Allocation:
    """Propose layouts within the budget, search on from what they measure, choose."""
    imatrix = mix.imatrices["task"]
    measured = frozenset(damage_map.rows["tensor"])
    options = make_options(ctx, plan.budget_bytes, imatrix=imatrix, measured=measured)
    options.require_feasible(plan.budget_bytes)
    for note in (*options.notes, *options.freedom_notes(plan.budget_bytes)):
        ctx.reporter.note(note)
    errors = measure_errors(ctx, imatrix, mix.key, types_to_pack(damage_map, options.offered))
    tables = {e: price_types(damage_map, errors, options.offered, exponent=e) for e in EXPONENTS}
    terms = make_terms(ctx, plan, tables[1.0])
    pooled_map, pooling = pool(damage_map)
    pooled = None
    if pooling is not None:
        ctx.reporter.note(pooling.describe())
        pooled = price_types(pooled_map, errors, options.offered)
    proposed = propose(
        options, tables, plan.budget_bytes, ctx.spec.target, terms, ctx.spec.baseline, pooled
    )
    stock = stock_candidate(plan, ctx.spec.baseline, tables[1.0])
    chunks = split_chunks(ctx, corpora, "select")
    mixes = make_mixes(ctx, imatrix, mix.mix)
    with JointMeter(ctx, chunks, mixes.imatrices, suite) as meter:
        task = Task(ctx, options, tables[1.0], terms, plan.budget_bytes, meter, mixes)
        free = [c for c in proposed if not is_control(c.label)]
        found, record = search(task, free, [c for c in (*proposed, stock) if c not in free])
    candidates = (*proposed, *found, stock)
    return _choose(ctx, chunks, candidates, mixes.imatrices, suite, errors, record, terms)


def make_terms(ctx: RunContext, plan: Plan, table: DamageTable) -> Terms:
    """Prices against the baseline's layout, further budgets, coherent roles, as the spec says."""
    spec = ctx.spec
    budgets = tuple(
        SideBudget(
            pattern, resolve_budget(parse_budget(size), ctx.model, plan.stock_bytes.__getitem__)
        )
        for pattern, size in spec.allocate.budgets.items()
    )
    return Terms(
        baseline=plan.stock[spec.baseline],
        prices=off_target_prices(spec.price, table.categories, spec.target),
        side_budgets=budgets,
        coherent=spec.allocate.coherent,
    )


def stock_label(ftype: str, imatrix_name: str) -> str:
    """``stock-Q3_K_S-task``."""
    return f"stock-{ftype}-{imatrix_name}"


def stock_candidate(plan: Plan, ftype: str, table: DamageTable) -> CandidateLayout:
    """Upstream's layout as a candidate among ours."""
    layout = plan.stock[ftype]
    return CandidateLayout(
        label=stock_label(ftype, "task"),
        types=layout,
        size_bytes=plan.stock_bytes[ftype],
        predicted=predict(table, layout),
        how="upstream's own layout",
    )


def _choose(
    ctx: RunContext,
    chunks: Chunks,
    candidates: Sequence[CandidateLayout],
    imatrices: Mapping[str, Imatrix],
    suite: DivergenceSuite,
    errors: Errors,
    record: dict[str, Any],
    terms: Terms,
) -> Allocation:
    """Score all candidates on every category, and take the best that keeps the prices."""
    used = {c.imatrix: imatrices[c.imatrix] for c in candidates}
    packers = {name: (make_packer(ctx, name, one), one.sha256()) for name, one in used.items()}
    wanted = [Candidate(c.label, c.types, *packers[c.imatrix]) for c in candidates]
    scored = score_on(ctx, "select", wanted, chunks, ctx.options)
    measured: dict[str, dict[str, float]] = {}
    for candidate in candidates:
        means = {c: mean_kld(scored.table, candidate.label, c, suite) for c in ctx.categories}
        measured[candidate.label] = {c: m for c, m in means.items() if m is not None}
    stock = candidates[-1].label
    ours = [c.label for c in candidates[:-1] if may_be_chosen(c.label, terms)]
    broken = {
        label: broken_prices(measured[label], measured[stock], terms.prices, scored.noise_nats)
        for label in ours
    }
    best = choose_best(measured, ours, broken, ctx.spec.target)
    ratio = kld_ratio(scored.table, best, stock, ctx.spec.target, suite)
    reason = reason_to_keep_stock(ratio, broken[best])
    layouts = {c.label: dict(c.types) for c in candidates}
    record_scores(
        ctx,
        "select",
        scored,
        chunks,
        {
            "measured": measured,
            "ours": best,
            "keep_stock": bool(reason),
            "reason": reason,
            "ratio": ratio.as_dict(),
            "price": dict(terms.prices),
            "broken_prices": broken,
            "predicted": {c.label: dict(c.predicted) for c in candidates},
            "size_bytes": {c.label: c.size_bytes for c in candidates},
            "how": {c.label: c.how for c in candidates},
            "imatrix": {c.label: c.imatrix for c in candidates},
            "layouts": layouts,
            "search": record,
        },
    )
    found = {c.label: c for c in candidates}
    return Allocation(
        found, measured, best, bool(reason), errors, reason, dict(terms.prices), imatrices
    )


def may_be_chosen(label: str, terms: Terms) -> bool:
    """Ours, and the role rules: a simple layout that measures better is the better layout.

    Rules know nothing of further budgets, so with those they are only compared.
    """
    return not is_control(label) or (label.startswith(ROLE_RULE) and not terms.side_budgets)


def broken_prices(
    own: Mapping[str, float],
    stock: Mapping[str, float],
    prices: Mapping[str, float],
    noise: Mapping[str, float | None],
) -> dict[str, float]:
    """Off-target category → measured ratio to stock, where it is above 1 + ε.

    A category where neither of the two can be told from the noise of decoding twice is kept.
    """
    found = {}
    for category, epsilon in prices.items():
        mine, base = own.get(category), stock.get(category)
        if mine is None or base is None or base <= 0 or mine <= 2 * (noise.get(category) or 0.0):
            continue
        if mine > (1 + epsilon) * base:
            found[category] = mine / base
    return found


def choose_best(
    measured: Mapping[str, Mapping[str, float]],
    labels: Sequence[str],
    broken: Mapping[str, Mapping[str, float]],
    target: str,
) -> str:
    """The label that measured least on the target among those that keep the prices, if any does.

    A handful of layouts, each proposed for a reason, so the best measured one is the best guess; a
    search through many has to beat the noise before it adds one (see stage_search). Of equals the
    first.
    """
    keeping = [label for label in labels if not broken[label]] or list(labels)
    return min(keeping, key=lambda label: measured[label].get(target, math.inf))


def reason_to_keep_stock(ratio: Interval, broken: Mapping[str, float]) -> str:
    """Why upstream's layout is written instead of ours; empty where ours is."""
    if broken:
        parts = ", ".join(f"{c} ×{r:.3f}" for c, r in sorted(broken.items()))
        return f"our best layout breaks the price declared for {parts} of the baseline's KLD"
    if ratio.value is None:
        return "no KLD ratio on the target can be given for our best layout"
    if ratio.value >= 1.0:
        return f"our best layout measured ×{ratio.value:.3f} of the baseline's KLD on the target"
    if ratio.high is None:
        return "there are too few documents to show that our best layout is better"
    if ratio.high >= 1.0:
        return (
            f"our best layout measured ×{ratio.value:.3f} of the baseline's KLD on the target, and"
            f" up to ×{ratio.high:.3f} is possible: not better by more than its interval"
        )
    return ""
