"""What `damage_map.py` measures with: prepared inputs, timers, whole layouts."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.ladders import ladder
from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.options import build_options
from bitwright.allocator.race_map import Probing, byte_problem
from bitwright.allocator.solver import solve
from bitwright.corpora.build import build_corpus
from bitwright.corpora.recipe import load_recipe
from bitwright.corpora.records import Chunk
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.kld import make_reference, score
from bitwright.damage.ledger import Ledger, chunk_id
from bitwright.damage.pricing import packing_errors, price_types
from bitwright.damage.probe import OpenChunk, PackedTensors, probe_types, probed_tensors
from bitwright.engine.graph import COMPUTE, Plan
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_collect import collect_imatrix
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import predict_size
from bitwright.engine.session import Session, SessionOptions, resolve_threads
from bitwright.engine.suffix import SuffixRunner
from bitwright.engine.tokenizer import Tokenizer
from bitwright.engine.upstream import upstream_layout

PROBE_TYPE = "Q2_K"
CALIBRATION_CHUNKS = 4
ERROR_ROWS = 64
REPEATS = 5


@dataclass
class Bench:
    """One model with everything that all ways share. ``base``: the first of ``chunks``."""

    model: ModelFile
    session: Session
    imatrix: Imatrix
    packed: PackedTensors
    options: OptionSet
    errors: dict[tuple[str, str], float]
    chunks: Sequence[Chunk]
    select: Sequence[Chunk]
    room: int
    folder: Path
    target: str
    tensors: list[str]
    prepared_s: dict[str, float] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)

    @property
    def base(self) -> list[Chunk]:
        return list(self.chunks[:1])

    def probing(self, label: str, forward: OpenChunk) -> Probing:
        self.ledgers[label] = Ledger(self.folder / f"{label}.sqlite", label)
        return Probing(self.session, self.packed, self.ledgers[label], forward)


@contextmanager
def open_bench(arguments: argparse.Namespace, folder: Path) -> Iterator[Bench]:
    model, seconds = open_model(arguments.model), {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        seconds[name] = round(time.perf_counter() - started, 3)
        return result

    chunks = step("corpus", lambda: _corpus(model, arguments))
    options = SessionOptions(
        threads=arguments.threads,
        n_ctx=arguments.tokens,
        working_type=arguments.working_type,
    )
    with Session(model, options) as session:
        batches = [(c.tokens, c.starts) for c in chunks["calibrate"][:CALIBRATION_CHUNKS]]
        imatrix = step("imatrix", lambda: collect_imatrix(session, batches, dataset="bench"))
        threads = resolve_threads(arguments.threads)
        packer = Packer(model, imatrix, cache_dir=folder / "packed", threads=threads)
        packed = PackedTensors(packer)
        names = probed_tensors(session)
        if arguments.sample and arguments.sample < len(names):
            # Middles of equal parts: the first and the last tensor would stand for too many.
            picked = (np.arange(arguments.sample) + 0.5) * len(names) / arguments.sample
            names = [names[int(i)] for i in picked]
        pairs = probe_types(model, names, PROBE_TYPE)
        step("packing", lambda: [packed.get(*pair) for pair in pairs])
        free = build_options(model, ladder=ladder("K"), imatrix=imatrix, measured=frozenset(names))
        wanted = {n: tuple(dict.fromkeys((*t, dict(pairs)[n]))) for n, t in free.offered.items()}
        errors = step("errors", lambda: packing_errors(packer, wanted, max_rows=ERROR_ROWS))
        bench = Bench(
            model=model,
            session=session,
            imatrix=imatrix,
            packed=packed,
            options=free,
            errors=errors,
            chunks=chunks["probe"],
            select=chunks["select"],
            room=_budget(model, arguments.budget) - free.fixed_bytes,
            folder=folder,
            target=arguments.target,
            tensors=names,
            prepared_s=seconds,
        )
        try:
            yield bench
        finally:
            for ledger in bench.ledgers.values():
                ledger.close()


def _corpus(model: ModelFile, arguments: argparse.Namespace) -> dict[str, tuple[Chunk, ...]]:
    need = {
        "calibrate": CALIBRATION_CHUNKS * arguments.tokens,
        "probe": arguments.truth * arguments.tokens,
        "select": arguments.select * arguments.tokens,
        "report": 0,
    }
    with Tokenizer(model) as tokenizer:
        recipe = load_recipe(arguments.target)
        built = build_corpus(recipe, tokenizer, n_ctx=arguments.tokens, seed=0, need_tokens=need)
    return {split: built.split(split) for split in ("calibrate", "probe", "select")}


def _budget(model: ModelFile, text: str) -> int:
    def stock(ftype: str) -> int:
        return predict_size(model, upstream_layout(model, ftype, has_imatrix=True), None)

    return resolve_budget(parse_budget(text), model, stock)


class Timed:
    """CPU seconds of this thread in llama.cpp's passes and in weight writing, until `stop`.

    ``total_s``: of this thread in all; ``wall_s``: on the clock.
    """

    def __init__(self, session: Session, runner: SuffixRunner) -> None:
        self.decode_s = self.swap_s = 0.0
        self.passes = 0
        self.total_s, self.wall_s = -time.thread_time(), -time.perf_counter()
        self._undo: list[Callable[[], None]] = []
        self._wrap(runner._context, "decode", "decode_s")
        self._wrap(session, "set_tensor", "swap_s")
        self._wrap(session, "restore", "swap_s")

    def _wrap(self, owner: Any, name: str, counter: str) -> None:
        original = getattr(owner, name)

        def wrapper(*given: Any, **named: Any) -> Any:
            started = time.thread_time()
            result = original(*given, **named)
            setattr(self, counter, getattr(self, counter) + time.thread_time() - started)
            self.passes += name == "set_tensor"
            return result

        setattr(owner, name, wrapper)
        self._undo.append(lambda: delattr(owner, name))

    def stop(self) -> None:
        self.total_s += time.thread_time()
        self.wall_s += time.perf_counter()
        for undo in self._undo:
            undo()


def time_score(bench: Bench, chunk: Chunk) -> tuple[float, float]:
    """One KLD against the reference over the chunk's rows: (CPU s of this thread, wall s).

    The rest of the CPU time is in the threads that it is spread over.
    """
    logits = bench.session.logits(chunk.tokens, chunk.starts, chunk.rows()).copy()
    reference = make_reference(logits, chunk.targets(), threads=bench.session.threads)
    found = []
    for _ in range(REPEATS):
        started = time.thread_time(), time.perf_counter()
        score(reference, logits, chunk.targets())
        found.append((time.thread_time() - started[0], time.perf_counter() - started[1]))
    cpu, wall = np.median(np.array(found), axis=0)
    return float(cpu), float(wall)


def time_callbacks(bench: Bench, runner: SuffixRunner) -> float:
    """Seconds of one pass's callbacks, called through ctypes as llama.cpp does."""
    chunk = bench.base[0]
    stream = runner.start(chunk.tokens, chunk.starts, chunk.rows())
    stream.reference_logits()
    tape = stream._recorded()
    nodes = tape.graph.nodes
    flags = tuple(node.flags & ~COMPUTE for node in nodes)
    plan = Plan(flags, (False,) * len(nodes), frozenset(), frozenset())
    callback = runner._context._callback
    assert callback is not None
    found = []
    for _ in range(REPEATS):
        started = time.thread_time()
        runner._watcher.follow(tape, plan, {})
        for address in tape.addresses[:-1]:
            callback(address, True, None)
        runner._watcher.finish()
        found.append(time.thread_time() - started)
    return float(np.median(found))


def max_difference(bench: Bench, one: str, other: str) -> float:
    """Largest |difference| of a mean KLD over any group of rows of the base chunks."""
    worst = 0.0
    for chunk in bench.base:
        sides = [bench.ledgers[k].probes(chunk_id(chunk), bench.target) for k in (one, other)]
        for pair, spans in sides[0].items():
            for span, sums in spans.items():
                if sums.n:
                    difference = sums.sum_kld - sides[1][pair][span].sum_kld
                    worst = max(worst, abs(difference) / sums.n)
    return worst


def common_values(one: DamageMap, other: DamageMap) -> tuple[np.ndarray, np.ndarray]:
    """Damages of the same tensors in two maps, at the probe's type."""
    found = []
    for damage_map in (one, other):
        rows = damage_map.rows[damage_map.rows["span"] == "scored"]
        found.append(dict(zip(rows["tensor"], rows["kld_nats"], strict=True)))
    names = [n for n in found[0] if n in found[1]]
    return np.array([found[0][n] for n in names]), np.array([found[1][n] for n in names])


def layout_of(bench: Bench, damage_map: DamageMap) -> dict[str, str]:
    """What the solver makes of a map, at the budget."""
    table = price_types(damage_map, bench.errors, bench.options.offered)
    problem = byte_problem(bench.options, table, bench.target, bench.room)
    chosen = solve(problem).chosen
    types = {problem.tensors[problem.owner[j]]: problem.types[j] for j in chosen}
    return bench.options.complete(types)


def joint_kld(bench: Bench, layout: Mapping[str, str]) -> float:
    """Mean KLD over scored rows of the select chunks with the whole layout in place, nats."""
    session = bench.session
    batches = [(c.tokens, c.starts, c.rows()) for c in bench.select]
    total = rows = 0.0
    for batch, chunk in zip(batches, bench.select, strict=True):
        session.restore_all()
        reference = make_reference(session.logits(*batch), chunk.targets())
        session.apply(layout, bench.packed.packer)
        kld = score(reference, session.logits(*batch), chunk.targets()).kld[chunk.scored()]
        total, rows = total + float(kld.sum()), rows + len(kld)
    session.restore_all()
    return total / rows
