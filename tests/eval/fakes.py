"""A session and a packer that compute logits from a rule instead of a model."""

from collections.abc import Mapping, Sequence

import numpy as np

from bitwright.corpora.records import Chunk

VOCAB = 32


def make_chunk(
    category: str,
    index: int,
    documents: Sequence[str],
    *,
    length: int = 12,
    kind: int = 2,
    split: str = "report",
) -> Chunk:
    """One chunk of equally long documents with reproducible tokens."""
    rng = np.random.default_rng([index, len(category)])
    n = length * len(documents)
    return Chunk(
        category=category,
        split=split,
        index=index,
        tokens=rng.integers(0, VOCAB, n).astype(np.int32),
        starts=tuple(range(0, n, length)),
        documents=tuple(documents),
        kinds=np.full(n, kind, dtype=np.uint8),
    )


class Stopped(RuntimeError):
    """Stands for a kill."""


class FakeSession:
    """Logits depend on the tokens and on the "noise" of each type in the applied layout."""

    def __init__(self, *, die_after: int | None = None) -> None:
        self.n_vocab = VOCAB
        self.threads = 1
        self.noise = 0.0
        self.forwards = 0
        self.applied: list[str] = []
        self.die_after = die_after
        self.table = np.random.default_rng(0).normal(0, 2, (VOCAB, VOCAB)).astype(np.float32)
        self.shift = np.random.default_rng(1).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
        self.view = np.zeros((4096, VOCAB), dtype=np.float32)

    def logits(self, tokens: np.ndarray, starts: Sequence[int], rows: np.ndarray) -> np.ndarray:
        assert list(starts) == sorted(starts)
        if self.forwards == self.die_after:
            raise Stopped
        self.forwards += 1
        out = self.view[: len(rows)]  # overwritten by the next call, as the real one is
        out[:] = self.table[tokens[rows]] + self.noise * self.shift[tokens[rows]]
        return out

    def apply(self, layout: Mapping[str, str], packer: object) -> None:
        self.applied.append(next(iter(layout.values())))
        self.noise = float(layout["w"].removeprefix("noise"))

    def restore_all(self) -> None:
        self.noise = 0.0
