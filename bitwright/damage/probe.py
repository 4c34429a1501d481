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
from bitwright.damage.damage_map import DamageMap, map_row, se_method, tidy
from bitwright.damage.kld import Floats, TokenScores, make_reference, score
from bitwright.damage.ledger import SPANS, Ledger, ProbeId, Sums, chunk_id
from bitwright.engine.ggml_types import fallback_type, tensor_type
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Bytes, Packer
from bitwright.engine.session import Session
from bitwright.engine.suffix import SuffixRunner
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import ConfigError, EngineError, InputError

Chunks = Mapping[str, Sequence[Chunk]]
Progress = Callable[[int, int, str], None]

# Packed tensors kept between chunks; what lies above is packed, or read from its cache, again.
KEEP_BYTES = 256 << 20
# The ledger's name for the unchanged reference, decoded a second time: the noise floor.
REFERENCE = ""


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

    Raises:
        ConfigError: a tensor that cannot be probed.
        EngineError: NaN or Inf in the logits of a probe, which is named.
        InputError: a category without tokens to score; a type that needs an imatrix.
    """
    pairs = probe_types(session.model, probed_tensors(session, tensors), probe_type)
    used = {category: [c for c in found if len(c.rows())] for category, found in chunks.items()}
    if empty := [category for category, found in used.items() if not found]:
        raise InputError(f"category {empty[0]} has no tokens to probe: give it more text")
    packed = _Packed(packer)
    done, total = 0, len(pairs) * sum(map(len, used.values()))
    session.restore_all()
    for category, found in used.items():
        for number, chunk in enumerate(found):
            wanted = [*pairs, (REFERENCE, session.working_type)] if number == 0 else pairs
            known = ledger.probes(chunk_id(chunk), category)
            missing = [pair for pair in wanted if pair not in known]
            done += len(pairs) - sum(name != REFERENCE for name, _ in missing)
            for label in _probe_chunk(
                session, chunk, category, missing, packed, ledger, open_chunk
            ):
                done += label != REFERENCE
                if progress is not None:
                    progress(done, total, f"{category}: {label or 'noise floor'}")
    return _build_map(session, pairs, used, ledger, tensor_type(probe_type).name)


def _probe_chunk(
    session: Session,
    chunk: Chunk,
    category: str,
    missing: Sequence[tuple[str, str]],
    packed: "_Packed",
    ledger: Ledger,
    open_chunk: OpenChunk,
) -> Iterator[str]:
    """Measure and record the missing probes of one chunk; yields each tensor when it is done."""
    if not missing:
        return
    targets, scored, identity = chunk.targets(), chunk.scored(), chunk_id(chunk)
    with open_chunk(session, chunk) as forward:
        reference = make_reference(forward.reference(), targets)
        for name, type_name in missing:
            try:
                if name == REFERENCE:
                    logits = forward.reference()
                else:
                    logits = forward.probe(name, type_name, packed.get(name, type_name))
                scores = score(reference, logits, targets)
            except EngineError as error:
                where = f"{name or 'the reference'} at {type_name}, {category} chunk {chunk.index}"
                raise EngineError(f"{where}: {error}") from error
            sums = span_sums(scores, scored, absolute=name == REFERENCE)
            ledger.record(ProbeId(name, type_name, identity, category), sums)
            yield name


def span_sums(
    scores: TokenScores, scored: NDArray[np.bool_], *, absolute: bool = False
) -> dict[str, Sums]:
    """What the ledger keeps of one probe; with `absolute`, of |KLD|."""
    kld = np.abs(scores.kld) if absolute else scores.kld
    masks = {"scored": scored, "overall": np.ones_like(scored)}
    return {
        span: Sums(
            n=int(mask.sum()),
            sum_kld=float(kld[mask].sum()),
            sum_kld2=float(np.square(kld[mask]).sum()),
            flips=int((~scores.same_top1[mask]).sum()),
        )
        for span, mask in masks.items()
    }


def _build_map(
    session: Session,
    pairs: Sequence[tuple[str, str]],
    chunks: Chunks,
    ledger: Ledger,
    probe_type: str,
) -> DamageMap:
    """The map, from the ledger alone, so that a resumed run gives the same one."""
    known = {
        category: [ledger.probes(chunk_id(chunk), category) for chunk in found]
        for category, found in chunks.items()
    }
    rows = [
        map_row(name, type_name, category, span, [k[name, type_name][span] for k in found])
        for name, type_name in pairs
        for category, found in known.items()
        for span in SPANS
    ]
    own = (REFERENCE, session.working_type)
    floors = {category: found[0][own]["overall"] for category, found in known.items()}
    return DamageMap(
        rows=tidy(rows),
        key=ledger.key,
        probe_type=probe_type,
        noise_floor={category: sums.sum_kld / sums.n for category, sums in floors.items()},
        se_method={category: se_method(len(found)) for category, found in known.items()},
        n_chunks={category: len(found) for category, found in known.items()},
        notes=tuple(session.notes),
    )


class _Packed:
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
