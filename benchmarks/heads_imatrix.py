"""What importance is worth for the token embedding and the output, which llama-imatrix leaves out.

Run: ``python benchmarks/heads_imatrix.py MODEL [--types T …] [--json] [--out FOLDER]``. Each of the
two is packed to each type alone, with and without its importance, and measured on the ``select``
split of the workflow's target. With --json one line goes to stdout:

rows[].tensor, type       what was packed; all else is as in the original
rows[].without, with      KLD of the target, nats
rows[].difference, se     with - without, and its standard error over documents, paired
"""

import json
import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.in_folder import context, options
from bitwright.engine.tensors import HEADS
from bitwright.eval.suite import load_suite
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import JointMeter
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.stage_corpus import build_corpora
from bitwright.workflows.stage_evaluate import split_chunks
from bitwright.workflows.stage_imatrix import collect_imatrices

TYPES = ("IQ2_S", "Q2_K", "IQ3_XXS", "Q3_K", "IQ4_XS", "Q4_K")


def measure(ctx: RunContext, types: tuple[str, ...]) -> list[dict[str, Any]]:
    """All tensors at all types, both ways."""
    corpora, _ = build_corpora(ctx)
    imatrices, _ = collect_imatrices(ctx, corpora)
    own, target = imatrices["task"], ctx.spec.target
    body = {name: entry for name, entry in own.entries.items() if name not in HEADS}
    ways = {"without": replace(own, entries=body), "with": own}
    chunks = {target: split_chunks(ctx, corpora, "select")[target]}
    heads = [name for name in sorted(HEADS) if name in own.entries]
    rows = []
    with JointMeter(ctx, chunks, ways, load_suite("divergence")) as meter:
        for done, (name, kind) in enumerate((n, t) for n in heads for t in types):
            ctx.reporter.step(done, len(heads) * len(types), f"{name} {kind}")
            found = {way: meter.measure({name: kind}, target, imatrix=way) for way in ways}
            without, with_own = found["without"], found["with"]
            if without is not None and with_own is not None:
                difference, se = with_own.less(without)
                rows.append(
                    {
                        "tensor": name,
                        "type": kind,
                        "without": without.mean,
                        "with": with_own.mean,
                        "difference": difference,
                        "se": se if se < float("inf") else None,
                    }
                )
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    args = parser.parse_args()
    started = time.monotonic()
    spec, name = load_workflow(args.workflow)
    with context(args, spec, name) as ctx:
        rows, model = measure(ctx, tuple(args.types)), ctx.model.name
    for row in rows:
        se = "not known" if row["se"] is None else f"{row['se']:.5f}"
        print(
            f"{row['tensor']} {row['type']}: {row['without']:.5f} without, {row['with']:.5f} with,"
            f" difference {row['difference']:.5f} ± {se}",
            file=sys.stderr,
        )
    if args.json:
        facts = {"model": model, "elapsed_s": round(time.monotonic() - started, 1)}
        print(json.dumps({**facts, "rows": rows}, allow_nan=False))


if __name__ == "__main__":
    main()
