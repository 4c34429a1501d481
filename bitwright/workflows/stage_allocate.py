"""Stage 4: candidate layouts from the damage map; the one that measures best is ours.

The additive table only proposes. What decides is the whole layout's KLD on the ``select`` split,
in memory, beside upstream's own layout with the same imatrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.allocator.candidates import CandidateLayout, predict, propose
from bitwright.corpora.records import Corpus
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.pricing import DamageTable, price_types, types_to_pack
from bitwright.engine.imatrix import Imatrix
from bitwright.eval.divergence import Candidate
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.eval.suite import DivergenceSuite
from bitwright.workflows.context import RunContext
from bitwright.workflows.preflight import Plan, make_options
from bitwright.workflows.stage_damage import Errors, make_packer, measure_errors
from bitwright.workflows.stage_evaluate import record_scores, score_on, split_chunks

EXPONENTS = (0.75, 1.0, 1.25)
CONTROLS = ("role-rule", "uniform")  # measured beside ours, never chosen: simpler ideas to beat


@dataclass(frozen=True, slots=True)
class Allocation:
    """Candidates with what they were predicted and measured to cost on ``select``.

    measured: label → category → mean KLD in nats. ``ours`` is our best candidate;
    ``keep_stock`` says that it measured no better than upstream's layout.
    """

    candidates: Mapping[str, CandidateLayout]
    measured: Mapping[str, Mapping[str, float]]
    ours: str
    keep_stock: bool
    errors: Errors

    def predicted_over_measured(self, label: str, category: str) -> float | None:
        """How far the additive table was off, None where nothing was measured."""
        measured = self.measured[label].get(category)
        return self.candidates[label].predicted[category] / measured if measured else None


def allocate(
    ctx: RunContext,
    plan: Plan,
    corpora: Mapping[str, Corpus],
    damage_map: DamageMap,
    imatrix: Imatrix,
    imatrix_key: str,
    suite: DivergenceSuite,
) -> Allocation:
    """Propose layouts within the budget, measure them, choose."""
    measured = frozenset(damage_map.rows["tensor"])
    options = make_options(ctx, plan.budget_bytes, imatrix=imatrix, measured=measured)
    options.require_feasible(plan.budget_bytes)
    for note in (*options.notes, *options.freedom_notes(plan.budget_bytes)):
        ctx.reporter.note(note)
    errors = measure_errors(ctx, imatrix, imatrix_key, types_to_pack(damage_map, options.offered))
    tables = {e: price_types(damage_map, errors, options.offered, exponent=e) for e in EXPONENTS}
    proposed = propose(options, tables, plan.budget_bytes, ctx.spec.target)
    stock = stock_candidate(plan, ctx.spec.baseline, tables[1.0])
    return _measure(ctx, corpora, (*proposed, stock), imatrix, suite, errors)


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


def _measure(
    ctx: RunContext,
    corpora: Mapping[str, Corpus],
    candidates: Sequence[CandidateLayout],
    imatrix: Imatrix,
    suite: DivergenceSuite,
    errors: Errors,
) -> Allocation:
    chunks = split_chunks(ctx, corpora, "select")
    packer, key = make_packer(ctx, "task", imatrix), imatrix.sha256()
    wanted = [Candidate(c.label, c.types, packer, key) for c in candidates]
    scored = score_on(ctx, "select", wanted, chunks, ctx.options)
    measured: dict[str, dict[str, float]] = {}
    for candidate in candidates:
        means = {c: mean_kld(scored.table, candidate.label, c, suite) for c in ctx.categories}
        measured[candidate.label] = {c: m for c, m in means.items() if m is not None}
    target, stock = ctx.spec.target, candidates[-1].label
    ours = [c.label for c in candidates[:-1] if c.label not in CONTROLS]
    best = min(ours, key=lambda label: (measured[label][target], label))
    ratio = kld_ratio(scored.table, best, stock, target, suite)
    keep_stock = ratio.value is None or ratio.value >= 1.0
    record_scores(
        ctx,
        "select",
        scored,
        chunks,
        {
            "measured": measured,
            "ours": best,
            "keep_stock": keep_stock,
            "ratio": ratio.as_dict(),
            "predicted": {c.label: dict(c.predicted) for c in candidates},
            "size_bytes": {c.label: c.size_bytes for c in candidates},
            "how": {c.label: c.how for c in candidates},
            "layouts": {c.label: dict(c.types) for c in candidates},
        },
    )
    return Allocation({c.label: c for c in candidates}, measured, best, keep_stock, errors)
