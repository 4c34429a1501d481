"""Merge importance matrices of several corpora, by shares or by tokens."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np

from bitwright.engine.imatrix import Imatrix, ImatrixEntry
from bitwright.errors import ConfigError, InputError

Parts = Sequence[tuple[Imatrix, float]]


def merge_imatrices(parts: Parts, *, weigh: Literal["mean", "tokens"] = "mean") -> Imatrix:
    """One importance matrix from several.

    'mean':   Σ w·(sums/counts) / Σ w over the parts that saw the matrix: the weights are shares,
              and a larger corpus does not drown a smaller one.
    'tokens': Σ w·sums / Σ w·counts: what one run over all texts would give when every w is 1.

    The result's counts are the rows of all parts together, its sums fit them.

    Raises:
        ConfigError: no parts, or a weight that is not positive.
        InputError: entries of different sizes (another model), or by tokens with a file of the
            old format whose chunk size is unknown.
    """
    if not parts or not all(0 < weight < float("inf") for _, weight in parts):
        raise ConfigError("merging needs at least one imatrix, each with a weight above 0")
    if weigh == "tokens" and any(imatrix.chunk_size == 0 for imatrix, _ in parts):
        raise InputError(
            "an imatrix of the old .dat format does not say how many tokens a chunk had: give its"
            " chunk size, or merge by mean"
        )
    names = sorted({name for imatrix, _ in parts for name in imatrix.entries})
    entries = {name: _merge_entry(name, parts, weigh) for name in names}
    chunk_size = next((imatrix.chunk_size for imatrix, _ in parts if imatrix.chunk_size), 0)
    datasets = dict.fromkeys(text for imatrix, _ in parts for text in imatrix.datasets)
    return Imatrix(
        entries=MappingProxyType(entries),
        chunk_count=_chunk_count(parts, entries, chunk_size),
        chunk_size=chunk_size,
        datasets=tuple(datasets),
        counts_known=all(imatrix.counts_known for imatrix, _ in parts),
    )


def _chunk_count(parts: Parts, entries: dict[str, ImatrixEntry], chunk_size: int) -> int:
    """Chunks of the common size; parts with other sizes count by their rows."""
    if all(imatrix.chunk_size == chunk_size for imatrix, _ in parts):
        return sum(imatrix.chunk_count for imatrix, _ in parts)
    rows = max((float(entry.counts.max()) for entry in entries.values()), default=0.0)
    return int(rows // chunk_size)


def _merge_entry(name: str, parts: Parts, weigh: str) -> ImatrixEntry:
    found = [(imatrix.entries[name], w) for imatrix, w in parts if name in imatrix.entries]
    shape = max((entry.sums.shape for entry, _ in found), key=lambda s: s[0])
    n_values = shape[0] * shape[1]
    total = np.zeros(shape)
    weights = np.zeros(shape[0])
    rows = np.zeros(shape[0])
    for entry, weight in found:
        if entry.sums.size != n_values or entry.sums.shape[0] not in (1, shape[0]):
            raise InputError(
                f"the importance matrices have {n_values} and {entry.sums.size} values for {name}:"
                " they were made for different models and cannot be merged"
            )
        sums = entry.sums.astype(np.float64).reshape(shape)
        counts = np.broadcast_to(entry.counts.astype(np.float64), shape[0])
        seen = counts > 0
        share = np.where(seen, weight if weigh == "mean" else weight * counts, 0.0)
        total += share[:, None] * (sums / np.where(seen, counts, 1.0)[:, None])
        weights += share
        rows += counts
    means = total / np.where(weights > 0, weights, 1.0)[:, None]
    return ImatrixEntry((means * rows[:, None]).astype(np.float32), rows.astype(np.float32))
