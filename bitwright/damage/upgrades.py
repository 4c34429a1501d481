"""Upgrade-one probes: everything low, one tensor at a time back at the reference.

Below 3 bits per weight the others' damage is not small, and a tensor's share of it is not what it
loses alone. The value here is what raising one tensor gains among low ones.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.damage.collect import build_map
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.kld import Floats, TokenScores, make_reference, score
from bitwright.damage.ledger import Ledger, ProbeId, chunk_id
from bitwright.damage.probe import (
    PackedTensors,
    Progress,
    probe_types,
    probed_tensors,
    span_sums,
    with_rows,
)
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.session import Session
from bitwright.engine.suffix import Stream, SuffixRunner

NOTE = "upgrade-one: values are what raising one tensor to the reference gains, all others low"


def measure_upgrades(
    session: Session,
    packed: PackedTensors,
    chunks: Mapping[str, Sequence[Chunk]],
    ledger: Ledger,
    *,
    probe_type: str = "Q2_K",
    runner: SuffixRunner | None = None,
    progress: Progress | None = None,
) -> DamageMap:
    """KLD with all tensors at the probe type, minus KLD with one of them at the reference.

    The ledger must be of a key of its own: its rows look like those of single damages. The
    session must be, and ends, at its reference. A value may be negative: then the errors of two
    tensors cancel.
    """
    pairs = probe_types(session.model, probed_tensors(session), probe_type)
    used = with_rows(chunks)
    done, total = 0, len(pairs) * sum(map(len, used.values()))
    for category, found in used.items():
        for chunk in found:
            known = ledger.probes(chunk_id(chunk), category)
            missing = [pair for pair in pairs if pair not in known]
            done += len(pairs) - len(missing)
            for name, gain in _gains(session, packed, chunk, pairs, missing, runner):
                sums = span_sums(gain, chunk.scored())
                probe = ProbeId(*name, chunk_id(chunk), category)
                ledger.record(probe, sums)
                done += 1
                if progress is not None:
                    progress(done, total, f"{category}: {name[0]}")
    kind = tensor_type(probe_type).name
    return build_map(ledger, pairs, used, kind, (*session.notes, NOTE))


def _gains(
    session: Session,
    packed: PackedTensors,
    chunk: Chunk,
    pairs: Sequence[tuple[str, str]],
    missing: Sequence[tuple[str, str]],
    runner: SuffixRunner | None,
) -> list[tuple[tuple[str, str], TokenScores]]:
    """Per-row gain of each missing pair on one chunk."""
    if not missing:
        return []
    batch, targets = (chunk.tokens, chunk.starts, chunk.rows()), chunk.targets()
    session.restore_all()
    reference = make_reference(session.logits(*batch), targets, threads=session.threads)
    found = []
    try:
        for name, kind in pairs:
            session.set_tensor(name, kind, packed.get(name, kind))
        stream = None if runner is None else runner.start(*batch)
        low_logits = session.logits(*batch) if stream is None else stream.reference_logits()
        low = score(reference, low_logits, targets)
        for name, kind in missing:
            logits = _raised(session, stream, name, batch)
            found.append(((name, kind), _gain(low, score(reference, logits, targets))))
            session.set_tensor(name, kind, packed.get(name, kind))
    finally:
        session.restore_all()
    return found


def _raised(
    session: Session,
    stream: Stream | None,
    name: str,
    batch: tuple[np.ndarray, Sequence[int], np.ndarray],
) -> Floats:
    if stream is None:
        session.restore(name)
        return session.logits(*batch)
    stream.advance(name)
    session.restore(name)
    return stream.logits(name)


def _gain(low: TokenScores, one: TokenScores) -> TokenScores:
    """KLD that was won back; a flip that was undone counts as one."""
    undone = ~low.same_top1 & one.same_top1
    return TokenScores(low.kld - one.kld, ~undone, one.nll)
