"""Everything that can be refused is refused here, before the first long computation."""

from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import OptionSet, build_options
from bitwright.allocator.priors import require_prior
from bitwright.engine.atomic import check_space
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.session import check_loadable
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.tokenizer import Tokenizer
from bitwright.engine.upstream import upstream_layout
from bitwright.eval.memory import available_memory, require_rows
from bitwright.workflows.context import RunContext
from bitwright.workflows.stage_quantize import provenance

Layouts = Mapping[str, Mapping[str, str]]

CACHED_FILES = 6  # times the budget; measured: 4.7 on a tiny model, 5.0 on the demo model


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known before anything is measured.

    stock: upstream's layout (quantizable tensors only) by stock type; stock_bytes: whole-file
    bytes of upstream's own file of that type.
    """

    budget_bytes: int
    stock: Layouts
    stock_bytes: Mapping[str, int]
    options: OptionSet


def make_plan(ctx: RunContext) -> Plan:
    """Resolve the budget against upstream's own sizes, and check that a layout fits it.

    Raises:
        InputError: the model cannot be run by the installed llama.cpp.
        BudgetError: the budget lies under the smallest layout; the message gives that size.
        ConfigError: a pin, ladder or stock type that does not exist.
    """
    check_loadable(ctx.model)
    if ctx.spec.damage.mode == "prior":
        require_prior(ctx.model, ctx.spec.target)
    budget = parse_budget(ctx.spec.budget)
    stock: dict[str, dict[str, str]] = {}
    stock_bytes: dict[str, int] = {}
    for name in dict.fromkeys((ctx.spec.baseline, *ctx.spec.rivals, budget.stock)):
        if name is not None:
            stock[name] = stock_layout(ctx, name)
            stock_bytes[name] = predict_size(ctx.model, stock[name], None)
    budget_bytes = resolve_budget(budget, ctx.model, stock_bytes.__getitem__)
    options = make_options(ctx, budget_bytes)
    options.require_feasible(budget_bytes)
    return Plan(budget_bytes, stock, stock_bytes, options)


def check_room(ctx: RunContext, plan: Plan) -> None:
    """Refuse a run whose files do not fit on the disk, or its logits in memory, at the start.

    Counted are the GGUF, and the packed tensors that the run folder keeps (about what
    `CACHED_FILES` files of the budget take, and one per candidate mix), less what is there already.

    Raises:
        StorageError: with what is needed and what is there.
        ConfigError: a chunk of this context takes more memory than is free.
    """
    with Tokenizer(ctx.model) as tokenizer:
        require_rows(ctx.options.n_ctx, tokenizer.n_vocab, available_memory())
    folder = ctx.folder.path
    kept = [*(folder / "cache").rglob("*.packed"), *folder.glob("*.gguf")]
    there = sum(path.stat().st_size for path in kept)
    files = 1 + CACHED_FILES + len(ctx.spec.imatrix.candidates)
    one = min(plan.budget_bytes, plan.options.largest_bytes)  # a budget may be beyond any layout
    check_space(folder / "cache", max(0, files * one - there))


def stock_layout(ctx: RunContext, ftype: str) -> dict[str, str]:
    """Upstream's type of each tensor that it may quantize, with an imatrix at hand."""
    layout = upstream_layout(ctx.model, ftype, has_imatrix=True)
    arch = ctx.model.arch
    return {n: t for n, t in layout.items() if is_quantizable(ctx.model.tensor(n), arch)}


def make_options(
    ctx: RunContext,
    budget_bytes: int,
    *,
    imatrix: Imatrix | None = None,
    measured: frozenset[str] | None = None,
) -> OptionSet:
    """What the solver may choose from; without an imatrix yet, one is assumed to come."""
    return build_options(
        ctx.model,
        ladder=ladder(ctx.spec.ladder),
        pins=ctx.spec.pins,
        imatrix=imatrix,
        assume_imatrix=imatrix is None,
        measured=measured,
        provenance=provenance(ctx, budget_bytes),
        keep_split=ctx.keep_split,
    )
