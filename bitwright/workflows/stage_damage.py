"""Stage 3: what each tensor costs at the probe type, per category, and at every other type."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitwright.corpora.records import Corpus
from bitwright.damage.damage_map import DamageMap, load_damage_map, save_damage_map
from bitwright.damage.forward import choose_forward, thinned
from bitwright.damage.ledger import Ledger
from bitwright.damage.pricing import packing_errors
from bitwright.damage.probe import measure_damage as probe_damage
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, resolve_threads
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of

Errors = dict[tuple[str, str], float]


def make_packer(ctx: RunContext, imatrix_name: str, imatrix: Imatrix) -> Packer:
    """Packs with one imatrix; packed tensors are kept in the run folder, per type."""
    cache = ctx.folder.file("cache", imatrix_name, "packed").parent
    return Packer(ctx.model, imatrix, cache_dir=cache, threads=resolve_threads(ctx.options.threads))


def measure_damage(
    ctx: RunContext, corpora: Mapping[str, Corpus], imatrix: Imatrix, imatrix_key: str
) -> tuple[DamageMap, str]:
    """The damage map, from the run folder or measured (going on where a kill left it), and key."""
    stride = ctx.spec.damage.row_stride
    chunks = {c: [thinned(k, stride) for k in corpora[c].split("probe")] for c in ctx.categories}
    inputs = {
        "model": ctx.model.sha256(),
        "imatrix": imatrix_key,
        "chunks": {c: chunks_sha256(found) for c, found in chunks.items()},
        "probe_type": ctx.spec.damage.probe_type,
        "metrics": METRICS_VERSION,
    }
    key = key_of("damage", inputs, ctx.engine_key())
    # The ledger names chunks by content, so that one more category costs only its own probes.
    ledger_key = key_of(
        "probes", inputs["model"], imatrix.sha256(), METRICS_VERSION, ctx.engine_key()
    )
    n_chunks = sum(len(found) for found in chunks.values())
    ctx.reporter.stage(
        "damage", f"one tensor at a time to {ctx.spec.damage.probe_type}, {n_chunks} chunks"
    )
    folder = ctx.folder.file("damage", "map").parent

    def compute() -> tuple[dict[str, Any], list[Path]]:
        packer = make_packer(ctx, "task", imatrix)
        with Session(ctx.model, ctx.options) as session:
            for note in session.notes:
                ctx.reporter.note(note)
            first = chunks[ctx.spec.target][0]
            with (
                choose_forward(session, first) as forwards,
                Ledger(folder / "ledger.sqlite", ledger_key) as ledger,
            ):
                ctx.reporter.note(forwards.reason)
                found = probe_damage(
                    session,
                    packer,
                    chunks,
                    ledger,
                    probe_type=ctx.spec.damage.probe_type,
                    open_chunk=forwards.open_chunk,
                    progress=ctx.reporter.step,
                )
        files = save_damage_map(found, folder)
        return {"tensors": int(found.rows["tensor"].nunique())}, list(files)

    ctx.folder.stage("damage", key, compute, inputs=inputs)
    return load_damage_map(folder), key


def measure_errors(
    ctx: RunContext, imatrix: Imatrix, imatrix_key: str, offered: Mapping[str, Sequence[str]]
) -> Errors:
    """Relative packing error of every offered (tensor, type), from the run folder or computed."""
    pairs = {name: sorted(types) for name, types in offered.items()}
    inputs = {"model": ctx.model.sha256(), "imatrix": imatrix_key, "pairs": key_of(pairs)}
    key = key_of("errors", inputs)
    path = ctx.folder.file("damage", "packing_errors.json")

    def compute() -> tuple[dict[str, Any], list[Path]]:
        packer = make_packer(ctx, "task", imatrix)
        errors = packing_errors(packer, pairs, progress=ctx.reporter.step)
        rows = [[tensor, type_name, error] for (tensor, type_name), error in errors.items()]
        write_atomic(path, json.dumps(rows, allow_nan=False).encode())
        return {"pairs": len(rows)}, [path]

    ctx.reporter.stage("errors", f"packing error of {sum(map(len, pairs.values()))} pairs")
    ctx.folder.stage("errors", key, compute, inputs=inputs)
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return {(tensor, type_name): float(error) for tensor, type_name, error in loaded}
