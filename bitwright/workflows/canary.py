"""`bitwright canary`: does the map help a model of this shape at all? Six files say so.

Three stock types are built both ways, upstream's and ours, and measured on the target. A curve of
log KLD over bits per weight goes through upstream's three; ours is rejected where it lies above the
curve by more than the noise of the paired ratio. The verdict is kept by the model's shape
(architecture, names and shapes of all tensors), so that it serves its fine-tunes too.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.allocator.candidates import propose
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import build_options
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.pricing import price_types, types_to_pack
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import ModelFile
from bitwright.engine.quantized_file import predict_size
from bitwright.eval.divergence import Candidate
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.eval.statistics import Interval
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.preflight import stock_layout
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_damage import make_packer, measure_damage, measure_errors
from bitwright.workflows.stage_evaluate import report_options, score_on, split_chunks
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_quantize import provenance

# The smallest sensible IQ type: under it most small models break whatever the layout.
BUILDS = {"Q4_K_M": "K", "Q3_K_M": "K", "IQ2_XS": "IQ"}
VERDICTS = ("accepted", "rejected")


@dataclass(frozen=True, slots=True)
class Pair:
    """One stock type built both ways: bits per weight and KLD of each, and their paired ratio."""

    stock: str
    stock_bpw: float
    ours_bpw: float
    stock_nats: float
    ours_nats: float
    ratio: Interval


def shape_sha256(model: ModelFile) -> str:
    """Hash of architecture, tensor names and shapes; the same for all fine-tunes of a base."""
    parts = [model.arch, *sorted(f"{t.name} {t.shape}" for t in model.tensors)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def verdict_path(model: ModelFile) -> Path:
    """Where the verdict of this shape is kept, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "bitwright" / "canary" / f"{shape_sha256(model)[:32]}.json"


def kept_verdict(model: ModelFile) -> dict[str, Any] | None:
    """What an earlier canary said of this shape; None without one."""
    try:
        found = json.loads(verdict_path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(found, dict) and found.get("verdict") in VERDICTS
    return found if known else None


def run_canary(ctx: RunContext) -> dict[str, Any]:
    """Measure the six files in memory, and keep the verdict."""
    corpora, _ = build_corpora(ctx)
    imatrices, imatrix_key = collect_imatrices(ctx, corpora)
    imatrix, target = imatrices["task"], ctx.spec.target
    budget = predict_size(ctx.model, stock_layout(ctx, "Q3_K_M"), None)
    mapped, _ = measure_damage(ctx, corpora, imatrix, imatrix_key, budget)
    stock = {name: stock_layout(ctx, name) for name in BUILDS}
    ours = {name: _ours(ctx, name, stock[name], mapped, imatrix, imatrix_key) for name in BUILDS}
    packer, key = make_packer(ctx, "task", imatrix), imatrix.sha256()
    layouts: dict[str, Mapping[str, str]] = {f"{n}/stock": t for n, t in stock.items()}
    layouts |= {f"{n}/ours": t for n, t in ours.items()}
    chunks = {target: split_chunks(ctx, corpora, "report")[target]}
    candidates = [Candidate(label, types, packer, key) for label, types in layouts.items()]
    table = score_on(ctx, "canary", candidates, chunks, report_options(ctx)).table
    suite = load_suite("divergence")
    n_weights = sum(t.n_elements for t in ctx.model.tensors)

    def bpw(types: Mapping[str, str]) -> float:
        return 8 * predict_size(ctx.model, types, None) / n_weights

    pairs = [
        Pair(
            name,
            bpw(stock[name]),
            bpw(ours[name]),
            mean_kld(table, f"{name}/stock", target, suite) or 0.0,
            mean_kld(table, f"{name}/ours", target, suite) or 0.0,
            kld_ratio(table, f"{name}/ours", f"{name}/stock", target, suite),
        )
        for name in BUILDS
    ]
    result = judge(pairs) | {"target": target, "shape_sha256": shape_sha256(ctx.model)}
    text = json.dumps({**result, "model": ctx.model.name}, indent=1, allow_nan=False)
    path = verdict_path(ctx.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    for one in (path, ctx.folder.path / "canary.json"):
        write_atomic(one, text.encode())
    return result


def _ours(
    ctx: RunContext,
    name: str,
    own: Mapping[str, str],
    mapped: DamageMap,
    imatrix: Imatrix,
    imatrix_key: str,
) -> Mapping[str, str]:
    budget = predict_size(ctx.model, own, None)
    options = build_options(
        ctx.model,
        ladder=ladder(BUILDS[name]),
        pins=ctx.spec.pins,
        imatrix=imatrix,
        measured=frozenset(mapped.rows["tensor"]),
        provenance=provenance(ctx, budget),
    )
    errors = measure_errors(ctx, imatrix, imatrix_key, types_to_pack(mapped, options.offered))
    table = price_types(mapped, errors, options.offered)
    return propose(options, {1.0: table}, budget, ctx.spec.target)[0].types


def judge(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Compare each of ours with the curve through upstream's files at its own bits per weight.

    The curve is linear in log KLD between the points and goes on with the end slopes. Its noise
    is that of the paired ratio: the curve's point moves with the same tokens.
    """
    by_bits = sorted(pairs, key=lambda p: p.stock_bpw)
    x = np.array([p.stock_bpw for p in by_bits])
    y = np.log([max(p.stock_nats, 1e-12) for p in by_bits])
    rows = []
    for pair in pairs:
        shift = float(np.exp(_on_curve(x, y, pair.ours_bpw) - np.log(max(pair.stock_nats, 1e-12))))
        above = pair.ratio.low is not None and pair.ratio.low / shift > 1.0
        over = None if pair.ratio.value is None else pair.ratio.value / shift
        rows.append(
            {
                "stock": pair.stock,
                "stock_bpw": round(pair.stock_bpw, 4),
                "ours_bpw": round(pair.ours_bpw, 4),
                "stock_kld_nats": pair.stock_nats,
                "ours_kld_nats": pair.ours_nats,
                "ours_over_curve": over,
                "low": None if pair.ratio.low is None else pair.ratio.low / shift,
                "high": None if pair.ratio.high is None else pair.ratio.high / shift,
                "rejected": above,
            }
        )
    rejected = [row["stock"] for row in rows if row["rejected"]]
    return {"verdict": VERDICTS[bool(rejected)], "rejected_at": rejected, "builds": rows}


def _on_curve(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], at: float) -> float:
    k = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    run = x[k + 1] - x[k]
    slope = (y[k + 1] - y[k]) / run if run > 0 else 0.0
    return float(y[k] + slope * (at - x[k]))


def canary_text(result: Mapping[str, Any]) -> str:
    """For a terminal: the verdict first."""
    lines = [f"{result['verdict']}: layouts from the damage map, on {result['target']}"]
    if result["rejected_at"]:
        lines[0] += f" (above upstream's curve at {', '.join(result['rejected_at'])}: use its own)"
    for row in result["builds"]:
        bounds = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
        value = "no ratio" if row["ours_over_curve"] is None else f"×{row['ours_over_curve']:.3f}"
        lines.append(
            f"  {row['stock']:<7} upstream {row['stock_bpw']:.3f} bpw {row['stock_kld_nats']:.5f},"
            f" ours {row['ours_bpw']:.3f} bpw {row['ours_kld_nats']:.5f} nats,"
            f" over the curve {value}{bounds}"
        )
    return "\n".join(lines)
