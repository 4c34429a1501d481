"""Does the best task:general mix of the imatrix depend on the layout?

Run: ``python benchmarks/imatrix_mix.py MODEL [--json] [--out FOLDER]``. If it does not, the mix can
be chosen once, before the layouts (`[imatrix] candidates`); if it does, a study has to vary both,
and every trial packs the model anew. Each share of the task's text in the imatrix is tried on
upstream's layout and on ours for the same bytes, the damage map being that of the declared mix.
With --json one line goes to stdout:

shares[]                      of the target in the imatrix, the rest general text
layouts.LAYOUT.select, report KLD of the target at each share, nats
layouts.LAYOUT.best_share     that measured least on the select split
layouts.LAYOUT.over_declared  KLD on report at best_share / at the declared mix, paired, 95 %
cost_of_choosing_before       KLD on report of ours at upstream's best share / at its own best share
"""

import json
import math
import sys
import time
from typing import Any

from benchmarks.equal_bytes import layouts_at, prepare
from benchmarks.in_folder import context, options
from bitwright.engine.imatrix import Imatrix
from bitwright.eval.divergence import Candidate
from bitwright.eval.scores import kld_ratio, mean_kld
from bitwright.workflows.context import RunContext
from bitwright.workflows.spec import SearchSettings, load_workflow
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_evaluate import score_on, split_chunks
from bitwright.workflows.stage_imatrix import mixed_imatrix

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
DECLARED = "declared"


def mixed(ctx: RunContext, share: float) -> Imatrix:
    """The imatrix with this share of the target, from the run folder's imatrix per category."""
    parts = {ctx.spec.target: share, "general": 1 - share}
    return mixed_imatrix(ctx, {c: part for c, part in parts.items() if part})


def measure(ctx: RunContext, stock: str) -> dict[str, Any]:
    """All shares on both layouts and both splits."""
    found = prepare(ctx, (stock,))
    target, suite = ctx.spec.target, found.suite
    imatrices = {DECLARED: found.imatrix} | {f"{s:g}": mixed(ctx, s) for s in SHARES}
    layouts = {n: layouts_at(found, stock).layouts[n] for n in ("stock", "ours")}
    candidates = [
        Candidate(f"{layout}/{name}", types, make_packer(ctx, f"mix-{name}", one), one.sha256())
        for layout, types in layouts.items()
        for name, one in imatrices.items()
    ]
    tables = {}
    for split in ("select", "report"):
        chunks = {target: split_chunks(ctx, found.corpora, split)[target]}
        tables[split] = score_on(ctx, f"mix-{split}", candidates, chunks, ctx.options).table
    report = tables["report"]
    result: dict[str, Any] = {}
    for layout in layouts:
        nats = {
            split: {n: mean_kld(table, f"{layout}/{n}", target, suite) for n in imatrices}
            for split, table in tables.items()
        }
        best = min(
            (n for n in imatrices if n != DECLARED), key=lambda n: nats["select"][n] or math.inf
        )
        over = kld_ratio(report, f"{layout}/{best}", f"{layout}/{DECLARED}", target, suite)
        result[layout] = {**nats, "best_share": float(best), "over_declared": over.as_dict()}
    before, own = (f"ours/{result[n]['best_share']:g}" for n in ("stock", "ours"))
    return {
        "shares": list(SHARES),
        "declared": dict(ctx.spec.imatrix.task),
        "layouts": result,
        "cost_of_choosing_before": kld_ratio(report, before, own, target, suite).as_dict(),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--stock", default="Q3_K_S")
    args = parser.parse_args()
    started = time.monotonic()
    spec, name = load_workflow(args.workflow)
    spec = spec.model_copy(update={"search": SearchSettings(rounds=0)})
    with context(args, spec, name) as ctx:
        found, model = measure(ctx, args.stock), ctx.model.name
    for layout, one in found["layouts"].items():
        shown = ", ".join(f"{n}: {v:.5f}" for n, v in one["report"].items())
        print(f"{layout}: report {shown}; best on select {one['best_share']:g}", file=sys.stderr)
    if args.json:
        facts = {"model": model, "elapsed_s": round(time.monotonic() - started, 1)}
        print(json.dumps({**facts, **found}, allow_nan=False))


if __name__ == "__main__":
    main()
