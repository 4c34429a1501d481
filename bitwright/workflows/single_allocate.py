"""`bitwright allocate`: a damage map, or a prior where nothing is to be measured, → a layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.candidates import HONEST, CandidateLayout, propose
from bitwright.allocator.ladders import ladder
from bitwright.allocator.layout import Layout, write_layout
from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.options import build_options
from bitwright.allocator.predictions import predict
from bitwright.allocator.priors import find_prior, prior_table, read_prior
from bitwright.allocator.terms import SideBudget, Terms, off_target_prices
from bitwright.damage.damage_map import load_damage_map
from bitwright.damage.pricing import DamageTable, packing_errors, price_types, types_to_pack
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.upstream import ftype_name, upstream_layout
from bitwright.errors import ConfigError
from bitwright.workflows.canary import kept_verdict
from bitwright.workflows.output import Output, bytes_text
from bitwright.workflows.single import (
    ModelChoice,
    check_output,
    load_checked_imatrix,
    make_packer,
    stock_size,
    tell,
)

NOT_MEASURED = "not measured on this model: damages come from a prior"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for.

    damage: folder of a map; None means a prior: ``prior``, or the shipped one of the model's class.
    baseline: stock type that prices are relative to; empty for no prices. prices: category → ε.
    budgets: glob → size text. honest: a stock name that the file is to earn.
    """

    damage: Path | None
    budget: str
    target: str
    ladder: str = "K"
    pins: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)
    budgets: Mapping[str, str] = field(default_factory=dict)
    coherent: tuple[tuple[str, ...], ...] = ()
    honest: str = ""
    prior: Path | None = None


def allocate(
    choice: ModelChoice, request: Request, imatrix_path: Path | None, out: Path, output: Output
) -> None:
    """Write the layout that the additive table, or the prior, predicts to be best."""
    model = choice.open()
    given = [*(shard.path for shard in model.shards), *([imatrix_path] if imatrix_path else [])]
    check_output(out, given, overwrite=True)
    found = load_checked_imatrix(imatrix_path, model)
    options, table = _table(choice, model, request, found)
    if request.target not in table.categories:
        raise ConfigError(
            f"the {'damage map' if request.damage else 'prior'} has {', '.join(table.categories)},"
            f" not {request.target!r}: choose one of them with --target"
        )
    sizes = stock_size(model)
    budget_bytes = resolve_budget(parse_budget(request.budget), model, sizes)
    options.require_feasible(budget_bytes)
    terms = _terms(model, request, table)
    best = _best(options, table, budget_bytes, request, terms)
    types, canary = best.types, None if request.damage else kept_verdict(model)
    rejected = canary is not None and canary["verdict"] == "rejected"
    notes = [*options.notes, *options.freedom_notes(budget_bytes)]
    if rejected:
        types = terms.baseline or types
        notes.append(
            "a canary rejected layouts like ours for models of this shape: "
            + ("upstream's own is written" if terms.baseline else "give --baseline to take its own")
        )
    write_layout(Layout(types), out)
    measured = request.damage is not None
    facts: dict[str, Any] = {
        "path": str(out),
        "budget_bytes": budget_bytes,
        "size_bytes": options.layout_bytes(types),
        "predicted_nats": dict(best.predicted),
        "measured": measured,
        "how": best.how if measured else f"{best.how}; {NOT_MEASURED}",
        "notes": notes,
    }
    if terms.baseline is not None:
        base = predict(table, options.complete(terms.baseline))
        facts["predicted_over_baseline"] = {
            c: best.predicted[c] / base[c] if base[c] > 0 else None for c in table.categories
        }
        facts["price"] = dict(terms.prices)
    kind = "a sum; measure it with evaluate" if measured else NOT_MEASURED
    text = (
        f"{out}: {bytes_text(best.size_bytes)} of {bytes_text(budget_bytes)}, predicted "
        f"{best.predicted[request.target]:.5f} nats on {request.target} ({kind})"
    )
    tell(output, model, facts, "\n".join([text, *notes]))


def _best(
    options: OptionSet, table: DamageTable, budget_bytes: int, request: Request, terms: Terms
) -> CandidateLayout:
    """Least predicted damage, among those that may carry the name where one is asked for."""
    name = ftype_name(request.honest) if request.honest else None
    proposed = propose(options, {1.0: table}, budget_bytes, request.target, terms, name)
    if name is None:
        return proposed[0]
    honest = [c for c in proposed if c.label == HONEST]
    if not honest:
        raise ConfigError(
            f"no layout of {budget_bytes:,} bytes may be called {name} with the ladder"
            f" {request.ladder}: take another name, size or ladder"
        )
    return honest[0]


def _table(
    choice: ModelChoice, model: ModelFile, request: Request, imatrix: Imatrix | None
) -> tuple[OptionSet, DamageTable]:
    mapped = None if request.damage is None else load_damage_map(request.damage)
    options = build_options(
        model,
        ladder=ladder(request.ladder),
        pins=request.pins,
        imatrix=imatrix,
        assume_imatrix=False,
        measured=None if mapped is None else frozenset(mapped.rows["tensor"]),
    )
    if mapped is None:
        prior = read_prior(request.prior) if request.prior else find_prior(model)
        if prior is None:
            raise ConfigError(
                f"no prior is shipped for models like {model.name}: measure its damage and give the"
                " folder with --damage, or a prior's file with --prior"
            )
        return options, prior_table(prior, options)
    packer = make_packer(model, imatrix, choice, None)
    errors = packing_errors(packer, types_to_pack(mapped, options.offered))
    return options, price_types(mapped, errors, options.offered)


def _terms(model: ModelFile, request: Request, table: DamageTable) -> Terms:
    if request.prices and not request.baseline:
        raise ConfigError("a price is relative to a stock type: name it with --baseline")
    baseline = None
    if request.baseline:
        layout = upstream_layout(model, ftype_name(request.baseline), has_imatrix=True)
        baseline = {n: t for n, t in layout.items() if is_quantizable(model.tensor(n), model.arch)}
    sizes = stock_size(model)
    budgets = tuple(
        SideBudget(pattern, resolve_budget(parse_budget(size), model, sizes))
        for pattern, size in request.budgets.items()
    )
    prices = off_target_prices(request.prices, table.categories, request.target)
    return Terms(baseline, prices if baseline else {}, budgets, request.coherent)
