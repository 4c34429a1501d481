"""What the three builds scored, beside each other and beside stock files of the nearest size."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from bitwright.engine.upstream import FTYPES
from bitwright.eval.breakage import compare_paired
from bitwright.eval.scores import kld_ratio
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.sizes import (
    Measured,
    bits_per_weight,
    reference_json,
    size_json,
    stock_sizes,
)
from bitwright.workflows.stage_items import SizedLayout
from bitwright.workflows.variant_files import VariantFile

VARIANTS_SCHEMA = 1
FLOATS = ("F32", "F16", "BF16")


def nearest_stock(ctx: RunContext, layouts: Sequence[SizedLayout]) -> dict[str, SizedLayout]:
    """For each build the stock type whose file is nearest in bytes."""
    stock = stock_sizes(ctx, [name for name in FTYPES if name not in FLOATS])
    return {
        one.label: min(stock, key=lambda s: (abs(s.size_bytes - one.size_bytes), s.label))
        for one in layouts
    }


def variants_result(
    ctx: RunContext,
    measured: Measured,
    layouts: Sequence[SizedLayout],
    stock: Mapping[str, SizedLayout],
    written: Mapping[str, VariantFile],
    model_name: str,
) -> dict[str, Any]:
    """The dictionary of result.json, without how the builds were found."""
    variants = []
    for layout in layouts:
        file = written[layout.label]
        entry = size_json(measured, layout)
        variants.append(
            {
                "name": layout.label,
                **{k: v for k, v in entry.items() if k not in ("label", "family")},
                "bpw": round(bits_per_weight(ctx.model, file.size_bytes), 4),
                "size_bytes": file.size_bytes,
                "path": str(file.paths[0]),
                "layout": str(file.layout),
                "sha256": file.sha256,
                "honest_name": file.honest_name,
                "reason": file.reason,
            }
        )
    pairs = [*combinations([one.label for one in layouts], 2)]
    pairs += [(one.label, stock[one.label].label) for one in layouts]
    return {
        "schema": VARIANTS_SCHEMA,
        "kind": "variants",
        "model": model_name,
        "workflow": ctx.name,
        "reference_type": ctx.model.reference_type,
        "synthetic_reference": ctx.model.synthetic_reference,
        "seed": ctx.spec.seed,
        "max_loss": ctx.spec.scores.max_loss,
        "reference": reference_json(ctx, measured),
        "variants": variants,
        "nearest_stock": {name: size_json(measured, one) for name, one in stock.items()},
        "comparisons": [c for a, b in pairs for c in compared(measured, a, b)],
    }


def compared(measured: Measured, a: str, b: str) -> list[dict[str, Any]]:
    """One entry per category: KLD ratio a/b, and the executed score of a less that of b."""
    suite = load_suite("divergence")
    places = {layout.label: i for i, layout in enumerate(measured.layouts)}
    found = []
    for category in measured.table.categories:
        entry: dict[str, Any] = {"a": a, "b": b, "category": category}
        entry["kld_ratio"] = kld_ratio(measured.table, a, b, category, suite).as_dict()
        scores = measured.paired.get(category)
        if scores is not None:
            pair = compare_paired(scores.scores[places[a]], scores.scores[places[b]], scores.graded)
            entry["score_difference"] = {
                "value": pair.value,
                "low": pair.low,
                "high": pair.high,
                "p": pair.p,
            }
        found.append(entry)
    return found
