"""From the ledger to a map: whatever was measured, in whichever order and on whichever chunks."""

from collections.abc import Mapping, Sequence

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.damage.damage_map import DamageMap, map_row, se_method, tidy
from bitwright.damage.intervals import Blocks, Estimate, estimate
from bitwright.damage.ledger import SPANS, Ledger, Sums, chunk_id
from bitwright.errors import EngineError

# The ledger's name for the unchanged reference, decoded a second time: the noise floor.
REFERENCE = ""
# A probe whose logits were not finite, twice: nothing is known of it, and that is recorded.
FAILED = "failed"
FAILED_SUMS = {span: Sums(0, 0.0, 0.0, 0) for span in (*SPANS, FAILED)}
# Groups of neighbouring scored rows per chunk: rows close to each other resemble each other.
BLOCKS = 8

Pair = tuple[str, str]
Probes = dict[Pair, dict[str, Sums]]


def block_span(number: int) -> str:
    """The ledger's span of one group of scored rows."""
    return f"block{number}"


def known_probes(ledger: Ledger, chunks: Sequence[Chunk], category: str) -> list[Probes]:
    """What the ledger has of each chunk."""
    return [ledger.probes(chunk_id(chunk), category) for chunk in chunks]


def failed_pairs(pairs: Sequence[Pair], known: Mapping[str, Sequence[Probes]]) -> set[Pair]:
    """Pairs with a probe that failed on any chunk of any category."""
    return {
        pair
        for pair in pairs
        for found in known.values()
        for probes in found
        if FAILED in probes.get(pair, ())
    }


def blocks_of(pairs: Sequence[Pair], known: Sequence[Probes]) -> Blocks:
    """Σ KLD of each pair over each group of scored rows of each chunk, NaN where not measured."""
    columns: list[np.ndarray] = []
    rows: list[float] = []
    for probes in known:
        for number in range(BLOCKS):
            found = [probes.get(pair, {}).get(block_span(number)) for pair in pairs]
            counts = {one.n for one in found if one is not None}
            if counts:
                columns.append(np.array([np.nan if s is None else s.sum_kld for s in found]))
                rows.append(float(max(counts)))
    if not columns:
        return Blocks(np.empty((len(pairs), 0)), np.empty(0))
    return Blocks(np.stack(columns, axis=1), np.array(rows))


def build_map(
    ledger: Ledger,
    pairs: Sequence[Pair],
    chunks: Mapping[str, Sequence[Chunk]],
    probe_type: str,
    notes: tuple[str, ...] = (),
) -> DamageMap:
    """The map, from the ledger alone, so that a resumed run gives the same one.

    Pairs that were not measured on all chunks of a category are scaled to them by what the
    others did there (see `intervals`).

    Raises:
        EngineError: a pair was measured on no chunk at all.
    """
    known = {category: known_probes(ledger, found, category) for category, found in chunks.items()}
    failed = failed_pairs(pairs, known)
    good = [pair for pair in pairs if pair not in failed]
    if failed and not good:
        raise EngineError(
            f"all {len(failed)} probes gave NaN or infinite logits, first {min(failed)[0]}: try "
            "--working-type F32, and remove the ledger"
        )
    rows: dict[tuple[Pair, str], list[dict[str, object]]] = {}
    for category, found in known.items():
        for pair, made in _category_rows(good, category, found).items():
            rows[pair, category] = made
    names = [name for name in dict.fromkeys(n for n, _ in failed) if name not in dict(good)]
    return DamageMap(
        rows=tidy([row for pair in good for category in known for row in rows[pair, category]]),
        key=ledger.key,
        probe_type=probe_type,
        noise_floor={category: _floor(found) for category, found in known.items()},
        se_method={category: se_method(len(found)) for category, found in known.items()},
        n_chunks={category: len(found) for category, found in known.items()},
        notes=(*notes, *(_failed_note(name) for name in names)),
        failed=tuple(names),
    )


def _failed_note(name: str) -> str:
    return (
        f"{name}: a probe gave NaN or infinite logits twice; it is left out of the map and gets "
        "the safe type of unmeasured tensors"
    )


def _category_rows(
    pairs: Sequence[Pair], category: str, known: Sequence[Probes]
) -> dict[Pair, list[dict[str, object]]]:
    partial = [p for p in pairs if not all(p in probes for probes in known)]
    found = estimate(blocks_of(pairs, known)) if partial else None
    made: dict[Pair, list[dict[str, object]]] = {}
    for i, pair in enumerate(pairs):
        parts = [probes[pair] for probes in known if pair in probes]
        if not parts:
            raise EngineError(f"{pair[0]} at {pair[1]} was not measured on {category}")
        made[pair] = [map_row(*pair, category, span, [p[span] for p in parts]) for span in SPANS]
        if found is not None and len(parts) < len(known):
            _rescale(made[pair], found, i)
    return made


def _rescale(rows: Sequence[dict[str, object]], found: Estimate, i: int) -> None:
    """Bring the rows of a pair measured on a part of the text to all of it, in place."""
    plain = float(str(rows[SPANS.index("scored")]["kld_nats"]))
    value, error = float(found.nats[i]), float(found.se[i])
    if not plain > 0 or not value > 0:
        return
    for row in rows:
        row["kld_nats"] = float(str(row["kld_nats"])) * value / plain
        row["se"] = float(str(row["kld_nats"])) * error / value


def _floor(known: Sequence[Probes]) -> float:
    """Mean |KLD| of the reference decoded again, nats."""
    for probes in known:
        for (name, _), spans in probes.items():
            if name == REFERENCE:
                return spans["overall"].sum_kld / spans["overall"].n
    return 0.0
