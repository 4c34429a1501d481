"""The importance matrix: per tensor and expert, sums of squared inputs and rows seen."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """One tensor's statistics.

    Attributes:
        sums: float32 (n_matrices, n_per_row), sum of squared inputs per column.
        counts: float32 (n_matrices,), rows that were summed.
    """

    sums: Floats
    counts: Floats


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Importance of a model's tensors.

    Attributes:
        chunk_size: tokens per chunk; 0 when the file does not say (old format): the counts are
            then in chunks, not rows.
        counts_known: False when per-expert counts were lost (old format); an expert that was
            never seen then looks like one of importance 1.
    """

    entries: Mapping[str, ImatrixEntry]
    chunk_count: int
    chunk_size: int
    datasets: tuple[str, ...]
    counts_known: bool = True

    def importance(self, name: str, n_per_row: int | None = None) -> Floats | None:
        """Mean squared input per column: float32 (n_matrices, n_per_row).

        Experts without data get ones; a tensor without any data gives None.

        Args:
            n_per_row: row length of the tensor, which splits entries of the old format, where all
                experts stand in one row. Values of another model are returned as they stand.
        """
        entry = self.entries.get(name)
        if entry is None or not entry.counts.any():
            return None
        means = mean_squares(entry)
        if n_per_row is None or means.size % n_per_row:
            return means
        return means.reshape(-1, n_per_row)

    def coverage(self, name: str) -> float:
        """Share of the tensor's matrices that have data, 0 to 1; 0 when it has no entry."""
        entry = self.entries.get(name)
        return 0.0 if entry is None else float(np.mean(entry.counts > 0))

    def unseen(self, name: str) -> tuple[int, ...]:
        """The matrices (experts) without data."""
        entry = self.entries.get(name)
        return () if entry is None else tuple(int(i) for i in np.flatnonzero(entry.counts <= 0))

    def sha256(self) -> str:
        """Hash of names, shapes and values; data set names do not count."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            entry = self.entries[name]
            digest.update(f"{name}\0{entry.sums.shape}\0".encode())
            digest.update(np.ascontiguousarray(entry.sums, "<f4").tobytes())
            digest.update(np.ascontiguousarray(entry.counts, "<f4").tobytes())
        return digest.hexdigest()


def mean_squares(entry: ImatrixEntry) -> Floats:
    """Sums / counts in float32, ones where nothing was seen: as llama-quantize reads them."""
    seen = entry.counts > 0
    counts = np.where(seen, entry.counts, np.float32(1))
    means: Floats = np.where(seen[:, None], entry.sums / counts[:, None], np.float32(1))
    return means.astype(np.float32, copy=False)
