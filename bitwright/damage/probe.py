"""Degrade-one probes: one tensor at a time at a low type, everything else at the reference.

Chunks are the outer loop, so one reference is in memory at a time; tensors the inner one, in graph
order, so that a forward pass that starts at the swapped tensor can move along with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.records import Chunk
from bitwright.damage.collect import BLOCKS, FAILED_SUMS, REFERENCE, block_span, build_map
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.kld import Floats, TokenScores, make_reference, score
from bitwright.damage.ledger import Ledger, ProbeId, Sums, chunk_id
from bitwright.engine.ggml_types import fallback_type, tensor_type
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Bytes, Packer
from bitwright.engine.session import Session
from bitwright.engine.suffix import SuffixRunner
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import ConfigError, EngineError, InputError, NotFiniteError

Chunks = Mapping[str, Sequence[Chunk]]
Progress = Callable[[int, int, str], None]

# Part of every ledger's key. 2 (2026-11-29): sums of groups of rows beside those of spans.
PROBE_VERSION = 2
# Packed tensors kept between chunks; what lies above is packed, or read from its cache, again.
KEEP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ChunkForward:
    """How one chunk is computed: both give logits (rows, n_vocab), a view until the next call.

    `probe(name, type, packed)` has that one weight swapped. Calls come in graph order, and
    `reference` may come first and last.
    """

    reference: Callable[[], Floats]
    probe: Callable[[str, str, Bytes], Floats]


OpenChunk = Callable[[Session, Chunk], AbstractContextManager[ChunkForward]]


@contextmanager
def full_forward(session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
    """Each probe as a whole forward pass."""
    rows = chunk.rows()

    def reference() -> Floats:
        return session.logits(chunk.tokens, chunk.starts, rows)

    def probe(name: str, type_name: str, packed: Bytes) -> Floats:
        with session.swapped(name, type_name, packed):
            return reference()

    yield ChunkForward(reference, probe)


def suffix_forward(runner: SuffixRunner) -> OpenChunk:
    """Each probe from where its weight is first used, equal to `full_forward` bit for bit.

    The runner must be of the session that is probed, and stay open.
    """

    @contextmanager
    def open_chunk(session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
        stream = runner.start(chunk.tokens, chunk.starts, chunk.rows())
        yield ChunkForward(stream.reference_logits, stream.logits_with_swap)

    return open_chunk


def probe_types(
    model: ModelFile, names: Sequence[str], probe_type: str = "Q2_K"
) -> list[tuple[str, str]]:
    """(tensor, type) to probe: the given type, or what takes its place where no row fits."""
    wanted = tensor_type(probe_type).name
    return [(name, fallback_type(wanted, model.tensor(name).n_per_row)) for name in names]


def probed_tensors(session: Session, tensors: Sequence[str] | None = None) -> list[str]:
    """The executed, quantizable weights in graph order: all, or those given.

    Raises:
        ConfigError: a given tensor is none of them.
    """
    model = session.model
    usable = [n for n in session.weights if is_quantizable(model.tensor(n), model.arch)]
    if tensors is None:
        return usable
    if unknown := sorted(set(tensors) - set(usable)):
        raise ConfigError(
            f"{unknown[0]} cannot be probed: no forward pass reads it, or it is never quantized; "
            f"choose among the {len(usable)} weights of {model.name}"
        )
    return [name for name in usable if name in set(tensors)]


def measure_damage(
    session: Session,
    packer: Packer,
    chunks: Chunks,
    ledger: Ledger,
    *,
    probe_type: str = "Q2_K",
    tensors: Sequence[str] | None = None,
    open_chunk: OpenChunk = full_forward,
    progress: Progress | None = None,
) -> DamageMap:
    """Probe every tensor on every chunk of every category; what the ledger has is not repeated.

    `progress(done, total, label)` counts probes. The session must be, and ends, at its reference.
    A probe with NaN or Inf in its logits is measured once more; if it stays so, the tensor is
    excluded from the map's values, named in `failed` and in the notes.

    Raises:
        ConfigError: a tensor that cannot be probed.
        EngineError: every probe gave NaN or Inf, or the reference did.
        InputError: a category without tokens to score; a type that needs an imatrix.
    """
    pairs = probe_types(session.model, probed_tensors(session, tensors), probe_type)
    used = with_rows(chunks)
    work = [Work(category, chunk, pairs) for category, found in used.items() for chunk in found]
    run_probes(session, packer, work, ledger, open_chunk=open_chunk, progress=progress)
    return build_map(ledger, pairs, used, tensor_type(probe_type).name, tuple(session.notes))


@dataclass(frozen=True, slots=True)
class Work:
    """Pairs (tensor, type) to probe on one chunk of a category, in graph order."""

    category: str
    chunk: Chunk
    pairs: Sequence[tuple[str, str]]


def with_rows(chunks: Chunks) -> dict[str, list[Chunk]]:
    """The chunks that have rows to score; InputError for a category without any."""
    used = {category: [c for c in found if len(c.rows())] for category, found in chunks.items()}
    if empty := [category for category, found in used.items() if not found]:
        raise InputError(f"category {empty[0]} has no tokens to probe: give it more text")
    return used


def run_probes(
    session: Session,
    packer: "Packer | PackedTensors",
    work: Sequence[Work],
    ledger: Ledger,
    *,
    open_chunk: OpenChunk = full_forward,
    progress: Progress | None = None,
    floor: bool = True,
) -> None:
    """Measure and record what the ledger does not have; with `floor` each category's noise floor.

    Raises:
        EngineError: every probe of a chunk gave NaN or Inf, or the reference did.
    """
    packed = packer if isinstance(packer, PackedTensors) else PackedTensors(packer)
    done, total = 0, sum(len(one.pairs) for one in work)
    session.restore_all()
    floors: set[str] = set()
    for one in work:
        known = ledger.probes(chunk_id(one.chunk), one.category)
        wanted = list(one.pairs)
        if floor and one.category not in floors:
            floors.add(one.category)
            wanted.append((REFERENCE, session.working_type))
        missing = [pair for pair in wanted if pair not in known]
        done += len(one.pairs) - sum(name != REFERENCE for name, _ in missing)
        failures: list[str] = []
        for label, failure in _probe_chunk(session, one, missing, packed, ledger, open_chunk):
            done += label != REFERENCE
            failures += [failure] * bool(failure)
            if progress is not None:
                progress(done, total, f"{one.category}: {label or 'noise floor'}")
        if failures and len(failures) >= sum(name != REFERENCE for name, _ in missing):
            raise EngineError(
                f"{failures[0]} (so did all {len(failures)} probes of this chunk): the model, its "
                "working type or the backend is at fault; try --working-type F32"
            )


def _probe_chunk(
    session: Session,
    work: Work,
    missing: Sequence[tuple[str, str]],
    packed: "PackedTensors",
    ledger: Ledger,
    open_chunk: OpenChunk,
) -> Iterator[tuple[str, str]]:
    """Measure and record the missing probes of one chunk; yields (tensor, what failed or '')."""
    if not missing:
        return
    chunk, category = work.chunk, work.category
    targets, scored, identity = chunk.targets(), chunk.scored(), chunk_id(chunk)
    with open_chunk(session, chunk) as forward:
        reference = make_reference(forward.reference(), targets, threads=session.threads)

        def attempt(name: str, type_name: str) -> TokenScores:
            if name == REFERENCE:
                return score(reference, forward.reference(), targets)
            data = packed.get(name, type_name)
            return score(reference, forward.probe(name, type_name, data), targets)

        for name, type_name in missing:
            where = f"{name or 'the reference'} at {type_name}, {category} chunk {chunk.index}"
            failure = ""
            try:
                scores = _twice(lambda: attempt(name, type_name))  # noqa: B023
                sums = span_sums(scores, scored, absolute=name == REFERENCE)
            except NotFiniteError as error:
                if name == REFERENCE:
                    raise EngineError(f"{where}: {error}") from error
                sums, failure = FAILED_SUMS, f"{where}: {error}"
            except EngineError as error:
                raise EngineError(f"{where}: {error}") from error
            ledger.record(ProbeId(name, type_name, identity, category), sums)
            yield name, failure


def _twice(attempt: Callable[[], TokenScores]) -> TokenScores:
    """The result, measured again once where it is not finite."""
    try:
        return attempt()
    except NotFiniteError:
        return attempt()


def span_sums(
    scores: TokenScores, scored: NDArray[np.bool_], *, absolute: bool = False
) -> dict[str, Sums]:
    """What the ledger keeps of one probe; with `absolute`, of |KLD|.

    Besides the two spans, the scored rows in `BLOCKS` groups of neighbours, whose spread says how
    well the mean is known.
    """
    kld = np.abs(scores.kld) if absolute else scores.kld
    flips = ~scores.same_top1
    rows = {"scored": np.flatnonzero(scored), "overall": np.arange(len(scored))}
    if not absolute:
        parts = np.array_split(rows["scored"], BLOCKS)
        rows |= {block_span(i): part for i, part in enumerate(parts) if len(part)}
    return {
        span: Sums(
            n=len(index),
            sum_kld=float(kld[index].sum()),
            sum_kld2=float(np.square(kld[index]).sum()),
            flips=int(flips[index].sum()),
        )
        for span, index in rows.items()
    }


class PackedTensors:
    """Packed tensors by (name, type); the first `KEEP_BYTES` of them stay in memory."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self.kept: dict[tuple[str, str], Bytes] = {}
        self.kept_bytes = 0

    def get(self, name: str, type_name: str) -> Bytes:
        """The tensor's bytes at that type."""
        found = self.kept.get((name, type_name))
        if found is None:
            found = self.packer.pack(name, type_name)
            if self.kept_bytes + found.nbytes <= KEEP_BYTES:
                self.kept[name, type_name] = found
                self.kept_bytes += found.nbytes
        return found
