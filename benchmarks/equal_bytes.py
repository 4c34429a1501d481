"""Our layouts against stock and simpler ideas, all at the stock file's bytes.

Run: ``python benchmarks/equal_bytes.py MODEL [--quick] [--json] [--out FOLDER]``. Corpora, imatrix
and damage map are made (or taken from FOLDER), then every layout is measured with the same task
imatrix on the ``report`` split, in this run. With --json one line goes to stdout:

rows[].stock, size_bytes, ours_size_bytes
rows[].target_kld_ratio, low, high      KLD of ours / stock on the target, paired, 95 %
rows[].off_target_kld_ratio             category → ratio; off_target_intervals has the intervals
rows[].ablations                        ratio to stock of each simpler idea, null where none fits:
    uniform            one type for all tensors
    weight_error_only  relative packing error times weights, no forward pass
    per_layer          one type per layer
    per_role           one type per role: the best of several on the select split
    honest_name        the best that may carry the stock name
    general_map        our solver on the damage of general text instead of the task's
    prior_only         our solver on the shipped prior, nothing measured on this model
    additive_only      our solver on the task's table, without measuring whole layouts
rows[].ours_over                        paired ratio of ours to each of them, with its interval
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.allocator.candidates import (
    HONEST,
    ROLE_RULE,
    is_control,
    make_candidate,
    per_layer,
    propose,
    uniform,
)
from bitwright.allocator.choices import Cost, single_groups, solve_groups, weighted_cost
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import OptionSet, build_options
from bitwright.allocator.priors import find_prior, is_of, prior_table
from bitwright.allocator.terms import Terms, off_target_prices
from bitwright.corpora.records import Corpus
from bitwright.damage.pooling import pool
from bitwright.damage.pricing import DamageTable, price_types, types_to_pack
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.session import SessionOptions
from bitwright.errors import BudgetError
from bitwright.eval.divergence import Candidate, ScoreTable
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.eval.suite import DivergenceSuite, load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import JointMeter
from bitwright.workflows.mixes import make_mixes
from bitwright.workflows.output import Output
from bitwright.workflows.preflight import stock_layout
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.spec import SearchSettings, load_workflow
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import Errors, make_packer, measure_damage, measure_errors
from bitwright.workflows.stage_evaluate import report_options, score_on, split_chunks
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_quantize import provenance
from bitwright.workflows.stage_search import Task, search

QUICK = ("Q3_K_S", "Q2_K", "IQ2_XXS", "IQ3_S")
ALL = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M"),
    *("IQ1_S", "IQ2_XXS", "IQ2_M", "IQ3_S", "IQ4_XS"),
)
ABLATIONS = (
    *("uniform", "weight_error_only", "per_layer", "per_role"),
    *("honest_name", "general_map", "prior_only", "additive_only"),
)
Types = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What all sizes share: text, imatrix, map and packing errors of both ladders."""

    ctx: RunContext
    corpora: Mapping[str, Corpus]
    imatrix: Imatrix
    damage_map: Any
    errors: Errors
    suite: DivergenceSuite


@dataclass(frozen=True, slots=True)
class Size:
    """One stock type and the layouts at its bytes: 'stock', 'ours' and the ablations'."""

    stock: str
    size_bytes: int
    ours_bytes: int
    layouts: Mapping[str, Types]


def prepare(ctx: RunContext, stocks: tuple[str, ...]) -> Measured:
    """Run the stages up to the damage map, and pack for the errors of all types needed."""
    corpora, _ = build_corpora(ctx)
    imatrices, key = collect_imatrices(ctx, corpora)
    budget = predict_size(ctx.model, stock_layout(ctx, stocks[0]), None)
    damage_map, _ = measure_damage(ctx, corpora, imatrices["task"], key, budget)
    types = sorted({t for stock in stocks for t in ladder(ladder_for(stock))})
    options = make_options(ctx, damage_map, imatrices["task"], tuple(types), 1 << 60)
    errors = measure_errors(ctx, imatrices["task"], key, types_to_pack(damage_map, options.offered))
    suite = load_suite("divergence")
    return Measured(ctx, corpora, imatrices["task"], damage_map, errors, suite)


def ladder_for(stock: str) -> str:
    """The family of the stock type; below two bits the long ladder."""
    if stock.startswith("IQ1"):
        return "IQ1"
    return "IQ" if stock.startswith("IQ") else "K"


def make_options(
    ctx: RunContext, damage_map: Any, imatrix: Imatrix, types: tuple[str, ...], budget: int
) -> OptionSet:
    return build_options(
        ctx.model,
        ladder=types,
        imatrix=imatrix,
        measured=frozenset(damage_map.rows["tensor"]),
        provenance=provenance(ctx, budget),
    )


def layouts_at(found: Measured, stock: str) -> Size:
    """All layouts of one size."""
    ctx, target = found.ctx, found.ctx.spec.target
    own = stock_layout(ctx, stock)
    budget = predict_size(ctx.model, own, None)
    types = ladder(ladder_for(stock))
    options = make_options(ctx, found.damage_map, found.imatrix, types, budget)
    table = price_types(found.damage_map, found.errors, options.offered)
    terms = Terms(baseline=own, prices=off_target_prices({}, table.categories, target))
    pooled_map, pooling = pool(found.damage_map)
    pooled = price_types(pooled_map, found.errors, options.offered) if pooling else None
    proposed = propose(options, {1.0: table}, budget, target, terms, stock, pooled)
    chunks = split_chunks(ctx, found.corpora, "select")
    mixes = make_mixes(ctx, found.imatrix, ctx.spec.imatrix.task)
    with JointMeter(ctx, chunks, mixes.imatrices, found.suite) as meter:
        stocked = make_candidate(options, table, "stock", own, "stock")
        free = [c for c in proposed if not is_control(c.label)]
        task = Task(ctx, options, table, terms, budget, meter, mixes)
        better, _ = search(task, free, [stocked])
        rules = [c for c in proposed if c.label.startswith(ROLE_RULE)]
        rule = min(rules, key=lambda c: task.measure(c.types).mean, default=None)
    ours = (*better, proposed[0])[0]
    honest = next((c.types for c in proposed if c.label == HONEST), None)
    layouts: dict[str, Types | None] = {"stock": own, "ours": ours.types}
    layouts |= simpler(found, options, table, budget)
    layouts |= {"honest_name": honest, "additive_only": proposed[0].types}
    layouts["per_role"] = None if rule is None else rule.types
    known = {name: one for name, one in layouts.items() if one is not None}
    return Size(stock, budget, ours.size_bytes, known)


def simpler(
    found: Measured, options: OptionSet, table: DamageTable, budget: int
) -> dict[str, Types | None]:
    """The ablations that the solver makes from other costs or coarser groups."""
    model, target = found.ctx.model, found.ctx.spec.target
    room = budget - options.fixed_bytes
    cost = weighted_cost(options, table, {target: 1.0})

    def error(name: str, kind: str) -> float:
        own = kind == model.tensor(name).type
        return 0.0 if own else found.errors[name, kind] * model.tensor(name).n_elements

    def solved(one: Cost) -> Types | None:
        try:
            return solve_groups(options, single_groups(options), one, room).types
        except BudgetError:
            return None

    layer = per_layer(options, cost, room)
    alike = uniform(options, cost, room)
    prior = find_prior(model)
    by_prior = None
    if prior is not None and target in prior.sensitivity:
        by_prior = solved(weighted_cost(options, prior_table(prior, options), {target: 1.0}))
    free: dict[str, Types | None] = {
        "uniform": None if alike is None else alike[1],
        "weight_error_only": solved(error),
        "per_layer": None if layer is None else layer.types,
        "general_map": solved(weighted_cost(options, table, {"general": 1.0})),
        "prior_only": by_prior,
    }
    return {n: None if types is None else options.complete(types) for n, types in free.items()}


def score(found: Measured, sizes: list[Size]) -> tuple[ScoreTable, ScoreTable, dict[str, str]]:
    """(target of all layouts, other categories of stock and ours, label → label scored for it)."""
    ctx = found.ctx
    packer, key = make_packer(ctx, "task", found.imatrix), found.imatrix.sha256()
    scored: dict[tuple[tuple[str, str], ...], Candidate] = {}
    alias: dict[str, str] = {}
    for size in sizes:
        for name, types in size.layouts.items():
            label = f"{size.stock}/{name}"
            same = tuple(sorted(types.items()))
            alias[label] = scored.setdefault(same, Candidate(label, types, packer, key)).label
    chunks = split_chunks(ctx, found.corpora, "report")
    target = {ctx.spec.target: chunks[ctx.spec.target]}
    others = {c: k for c, k in chunks.items() if c != ctx.spec.target}
    options = report_options(ctx)
    main = {alias[f"{size.stock}/{name}"] for size in sizes for name in ("stock", "ours")}
    every = list(scored.values())
    on_target = score_on(ctx, "equal-target", every, target, options).table
    few = [one for one in every if one.label in main]
    return on_target, score_on(ctx, "equal-others", few, others, options).table, alias


def row(found: Measured, size: Size, scores: tuple[ScoreTable, ScoreTable, dict[str, str]]) -> Any:
    """One row of the contract."""
    on_target, others, alias = scores
    target, suite = found.ctx.spec.target, found.suite
    label = {name: alias[f"{size.stock}/{name}"] for name in size.layouts}

    def ratio(a: str, b: str) -> Any:
        return kld_ratio(on_target, label[a], label[b], target, suite)

    ours = ratio("ours", "stock")
    elsewhere = {
        c: kld_ratio(others, label["ours"], label["stock"], c, suite) for c in others.categories
    }
    there = [name for name in ABLATIONS if name in label]
    return {
        "stock": size.stock,
        "size_bytes": size.size_bytes,
        "ours_size_bytes": size.ours_bytes,
        "target_kld_ratio": ours.value,
        "low": ours.low,
        "high": ours.high,
        "off_target_kld_ratio": {c: r.value for c, r in elsewhere.items()},
        "off_target_intervals": {c: [r.low, r.high] for c, r in elsewhere.items()},
        "ablations": {n: ratio(n, "stock").value if n in there else None for n in ABLATIONS},
        "ours_over": {n: ratio("ours", n).as_dict() for n in there},
        "kld_nats": {name: mean_kld(on_target, one, target, suite) for name, one in label.items()},
    }


def table_text(rows: list[Any]) -> str:
    """For people, on stderr."""
    lines = []
    for one in rows:
        bounds = f"[{one['low']:.3f}, {one['high']:.3f}]" if one["low"] is not None else ""
        lines.append(f"{one['stock']:<8} ours ×{one['target_kld_ratio']:.3f} {bounds}")
        for name, value in one["ablations"].items():
            over = one["ours_over"].get(name)
            shown = "none fits" if value is None else f"×{value:.3f}"
            if over and over["low"] is not None:
                shown += f"   ours/it ×{over['value']:.3f} [{over['low']:.3f}, {over['high']:.3f}]"
            lines.append(f"    {name:<18} {shown}")
        off = ", ".join(f"{c} ×{v:.3f}" for c, v in one["off_target_kld_ratio"].items() if v)
        lines.append(f"    elsewhere          {off}")
    return "\n".join(lines)


def plot_svg(rows: list[Any], target: str) -> str:
    """KLD against bytes, both on logarithmic scales: stock and ours."""
    import math

    points = {
        name: sorted((math.log(r["size_bytes"]), math.log(r["kld_nats"][name])) for r in rows)
        for name in ("stock", "ours")
    }
    xs, ys = ([p[k] for found in points.values() for p in found] for k in (0, 1))
    span_x, span_y = (max(max(v) - min(v), 1e-9) for v in (xs, ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + 520 * (x - min(xs)) / span_x, 340 - 300 * (y - min(ys)) / span_y

    parts = []
    for (name, found), colour in zip(points.items(), ("#888", "#06c"), strict=True):
        dots = [place(*p) for p in found]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in dots]
        x, y = dots[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y:.1f}" fill="{colour}">{name}</text>')
    title = f'<text x="60" y="20">KLD on {target} (log) against bytes (log)</text>'
    style = 'xmlns="http://www.w3.org/2000/svg" width="660" height="370" font-family="sans-serif"'
    return f"<svg {style}>{title}{''.join(parts)}</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--workflow", default="coding-q3_k_s")
    parser.add_argument("--stock", nargs="*", help="stock types, instead of the usual ones")
    parser.add_argument("--rounds", type=int, default=2, help="corrections of the table, measured")
    parser.add_argument("--quick", action="store_true", help=", ".join(QUICK))
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout")
    parser.add_argument("--out", type=Path, help="run folder to keep and to go on in")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--allow-requantize", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    stocks = tuple(args.stock or (QUICK if args.quick else ALL))
    spec, name = load_workflow(args.workflow)
    # One imatrix for all that is compared.
    study = spec.study.model_copy(update={"imatrix_shares": ()})
    search = SearchSettings(rounds=args.rounds)
    spec = spec.model_copy(update={"search": search, "study": study})
    model = open_model(args.model, allow_requantize=args.allow_requantize)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.open(args.out or Path(scratch) / "run")
        options = SessionOptions(
            threads=args.threads, n_ctx=spec.engine.n_ctx, working_type=spec.engine.working_type
        )
        reporter = Output(json=True, quiet=False).reporter()
        ctx = RunContext(spec, name, model, folder, options, reporter)
        found = prepare(ctx, stocks)
        sizes = [layouts_at(replace(found, ctx=ctx), stock) for stock in stocks]
        scores = score(found, sizes)
        rows = [row(found, size, scores) for size in sizes]
        reporter.close()
        if args.out:
            (args.out / "equal_bytes.svg").write_text(plot_svg(rows, spec.target))
    print(table_text(rows), file=sys.stderr)
    prior = find_prior(model)
    sources = () if prior is None else prior.sources
    result = {
        "model": model.name,
        "prior_sources": list(sources),
        # Then prior_only is no test of a prior: it was made from this model's own map.
        "prior_is_of_this_model": prior is not None and is_of(prior, model),
        "synthetic_reference": model.synthetic_reference,
        "target": spec.target,
        "elapsed_s": round(time.monotonic() - started, 1),
        "rows": rows,
    }
    if args.json:
        print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
