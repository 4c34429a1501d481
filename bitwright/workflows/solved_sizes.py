"""Our layouts in a sweep: the solver's best for the target at named sizes, from one damage map."""

from collections.abc import Mapping, Sequence

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.candidates import propose
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import build_options
from bitwright.corpora.records import Corpus
from bitwright.damage.pricing import price_types, types_to_pack
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.quantized_file import predict_size
from bitwright.workflows.context import RunContext
from bitwright.workflows.preflight import stock_layout
from bitwright.workflows.sizes import sized
from bitwright.workflows.stage_damage import measure_damage, measure_errors
from bitwright.workflows.stage_items import SizedLayout


def solved_sizes(
    ctx: RunContext,
    corpora: Mapping[str, Corpus],
    imatrix: Imatrix,
    imatrix_key: str,
    budgets: Sequence[str | int],
) -> list[SizedLayout]:
    """One layout per size, of the workflow's ladder; the map is measured once for all of them.

    Raises:
        BudgetError: a size is under the smallest layout.
    """
    if not budgets:
        return []
    sizes = [_bytes(ctx, budget) for budget in budgets]
    damage_map, _ = measure_damage(ctx, corpora, imatrix, imatrix_key, min(sizes))
    options = build_options(
        ctx.model,
        ladder=ladder(ctx.spec.ladder),
        pins=ctx.spec.pins,
        imatrix=imatrix,
        measured=frozenset(damage_map.rows["tensor"]),
    )
    errors = measure_errors(ctx, imatrix, imatrix_key, types_to_pack(damage_map, options.offered))
    table = price_types(damage_map, errors, options.offered)
    found = []
    for budget, size in zip(budgets, sizes, strict=True):
        best = propose(options, {1.0: table}, size, ctx.spec.target)[0]
        label = f"ours-{str(budget).replace(' ', '')}"
        found.append(sized(ctx.model, label, "ours", best.types))
    return found


def _bytes(ctx: RunContext, budget: str | int) -> int:
    return resolve_budget(
        parse_budget(budget),
        ctx.model,
        lambda ftype: predict_size(ctx.model, stock_layout(ctx, ftype), None),
    )
