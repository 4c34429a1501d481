"""Stage 3: what each tensor costs at the probe type, per category, and at every other type."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import build_options
from bitwright.allocator.priors import prior_map, require_prior
from bitwright.allocator.race_map import (
    Decider,
    MapSettings,
    MeasuredMap,
    Probing,
    measure_map,
)
from bitwright.allocator.racing import RaceLimits
from bitwright.corpora.records import Chunk, Corpus
from bitwright.damage.damage_map import DamageMap, load_damage_map, save_damage_map
from bitwright.damage.experts import list_unexecuted
from bitwright.damage.forward import choose_forward
from bitwright.damage.ledger import Ledger
from bitwright.damage.noise import (
    floor_of_repacking,
    floors_in_session,
    floors_of_formats,
    reference_of,
)
from bitwright.damage.pricing import packing_errors
from bitwright.damage.probe import PROBE_VERSION, PackedTensors, probed_tensors
from bitwright.damage.summary import CSV, export_table
from bitwright.engine.atomic import write_atomic
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, resolve_threads
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of
from bitwright.workflows.spec import DamageSettings

Errors = dict[tuple[str, str], float]


def make_packer(ctx: RunContext, imatrix_name: str, imatrix: Imatrix) -> Packer:
    """Packs with one imatrix; packed tensors are kept in the run folder, per type."""
    cache = ctx.folder.file("cache", imatrix_name, "packed").parent
    return Packer(ctx.model, imatrix, cache_dir=cache, threads=resolve_threads(ctx.options.threads))


def measure_damage(
    ctx: RunContext,
    corpora: Mapping[str, Corpus],
    imatrix: Imatrix,
    imatrix_key: str,
    budget_bytes: int,
) -> tuple[DamageMap, str]:
    """The damage map, from the run folder or measured (going on where a kill left it), and key.

    ``budget_bytes`` is what a race decides for; a map of fixed tokens does not depend on it.
    """
    settings = ctx.spec.damage
    if settings.mode == "prior":
        return _from_prior(ctx)
    chunks = {c: corpora[c].split("probe") for c in ctx.categories}
    inputs = {
        "model": ctx.model.sha256(),
        "imatrix": imatrix_key,
        "chunks": {c: chunks_sha256(found) for c, found in chunks.items()},
        "settings": settings.model_dump(),
        "race": [ctx.spec.target, budget_bytes] if settings.mode == "race" else None,
        "offered": [ctx.spec.ladder, ctx.spec.pins] if settings.second_probes else None,
        "metrics": METRICS_VERSION,
    }
    key = key_of("damage", inputs, ctx.engine_key())
    # The ledger names chunks by content, so that one more category costs only its own probes.
    ledger_key = key_of(
        "probes",
        PROBE_VERSION,
        inputs["model"],
        imatrix.sha256(),
        METRICS_VERSION,
        ctx.engine_key(),
    )
    n_chunks = sum(len(found) for found in chunks.values())
    ctx.reporter.stage(
        "damage", f"one tensor at a time to {settings.probe_type}, {n_chunks} chunks"
    )
    folder = ctx.folder.file("damage", "map").parent

    def compute() -> tuple[dict[str, Any], list[Path]]:
        measured = _measure(ctx, chunks, imatrix, imatrix_key, budget_bytes, ledger_key)
        files = save_damage_map(measured.damage_map, folder)
        table = export_table(measured.damage_map, folder / CSV)
        return describe_map(measured), [*files, table]

    ctx.folder.stage("damage", key, compute, inputs=inputs)
    return load_damage_map(folder), key


def _from_prior(ctx: RunContext) -> tuple[DamageMap, str]:
    """The shipped prior as a map, kept where a measured one would be."""
    prior = require_prior(ctx.model, ctx.spec.target)
    with Session(ctx.model, ctx.options) as session:
        found = prior_map(prior, ctx.model, probed_tensors(session), ctx.spec.target)
    ctx.reporter.stage("damage", found.notes[0])
    folder = ctx.folder.file("damage", "map").parent
    inputs = {"prior": asdict(prior), "model": ctx.model.sha256(), "tensors": found.tensors}
    key = key_of("prior", inputs)

    def compute() -> tuple[dict[str, Any], list[Path]]:
        table = export_table(found, folder / CSV)
        return {"prior": found.notes[0]}, [*save_damage_map(found, folder), table]

    ctx.folder.stage("damage", key, compute, inputs=inputs)
    return load_damage_map(folder), key


def _measure(
    ctx: RunContext,
    chunks: Mapping[str, Sequence[Chunk]],
    imatrix: Imatrix,
    imatrix_key: str,
    budget_bytes: int,
    ledger_key: str,
) -> MeasuredMap:
    """Open the model, probe, and note what the reference itself loses under other settings."""
    settings = ctx.spec.damage
    packed = PackedTensors(make_packer(ctx, "task", imatrix))
    first = chunks[ctx.spec.target][0]
    ledger_path = ctx.folder.file("damage", "ledger.sqlite")
    with Session(ctx.model, ctx.options) as session:
        for note in (*session.notes, *list_unexecuted(session, imatrix)):
            ctx.reporter.note(note)
        options = build_options(
            ctx.model,
            ladder=ladder(ctx.spec.ladder),
            pins=ctx.spec.pins,
            imatrix=imatrix,
            measured=frozenset(probed_tensors(session)),
        )
        decider = Decider(
            options=options,
            errors=partial(_known_errors, ctx, imatrix, imatrix_key, {}),
            target=ctx.spec.target,
            room=budget_bytes - options.fixed_bytes,
        )
        floors = floors_in_session(session, first)
        with (
            choose_forward(session, first) as forwards,
            Ledger(ledger_path, ledger_key) as ledger,
        ):
            ctx.reporter.note(forwards.reason)
            probing = Probing(session, packed, ledger, forwards.open_chunk, ctx.reporter.step)
            measured = measure_map(probing, chunks, map_settings(settings), decider, settings.mode)
        own_type, reference = session.working_type, reference_of(session, first)
    floors |= floors_of_formats(ctx.model, ctx.options, own_type, first, reference)
    floors |= floor_of_repacking(
        ctx.model, ctx.options, resolve_threads(ctx.options.threads), first
    )
    return replace(measured, damage_map=replace(measured.damage_map, floors=floors))


def _known_errors(
    ctx: RunContext,
    imatrix: Imatrix,
    imatrix_key: str,
    known: Errors,
    offered: Mapping[str, Sequence[str]],
) -> Errors:
    """`measure_errors`, asked for once."""
    if not all((name, kind) in known for name, types in offered.items() for kind in types):
        known.update(measure_errors(ctx, imatrix, imatrix_key, offered))
        ctx.reporter.stage("damage", "other types have a price now; probes go on where it is open")
    return known


def map_settings(settings: DamageSettings) -> MapSettings:
    """The workflow's table as the measuring functions take it."""
    return MapSettings(
        probe_type=settings.probe_type,
        stride=settings.row_stride,
        second=settings.second_probes,
        limits=RaceLimits(settings.tolerance, settings.tokens, settings.minutes),
    )


def describe_map(measured: MeasuredMap) -> dict[str, Any]:
    """What the stage's manifest says of a map: strict JSON."""
    found, ended = measured.damage_map, measured.race
    return {
        "tensors": int(found.rows["tensor"].nunique()),
        "tokens": measured.tokens,
        "failed": list(found.failed),
        "floors_nats": dict(found.floors),
        "curve": dict(found.curve),
        "race": None
        if ended is None
        else {
            "reason": ended.reason,
            "stable": ended.stable,
            "rounds": ended.rounds,
            "tokens_all": ended.tokens_all,
            "possible_loss_nats": ended.possible_loss,
            "predicted_nats": ended.predicted,
            "undecided": [list(one) for one in ended.undecided],
            "undecided_by_curve": [list(one) for one in ended.by_curve],
        },
    }


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
