"""Endless rows of training text: packed conversations, and windows of code and prose."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitwright.corpora.generators.stdlib_code import code_files, prose_topics
from tools.demo_model.generators import GENERATORS
from tools.demo_model.vocabulary import Encoded, encode_conversation

LM_WEIGHT = 0.5  # loss weight of code and prose tokens
RESULT_WEIGHT = 4.0  # loss weight of the result digits of worked solutions
PROSE_SHARE = 0.12  # of the rows that are no conversation
SMALLEST = 24  # tokens: no conversation is shorter, so less room than that stays empty
MOST_SPARE = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch. ids (rows, length + 1); weights and documents (rows, length), of each target.

    documents: number of the conversation in its row, -1 where there is none; None = one document.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    documents: NDArray[np.int64] | None


@dataclass(slots=True)
class Batches:
    """Draws rows of one side of the hold-out."""

    tokenizer: Tokenizer
    rng: np.random.Generator
    heldout: bool = False
    code: NDArray[np.int64] = field(init=False)
    prose: NDArray[np.int64] = field(init=False)
    spare: list[Encoded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.code = _stream(self.tokenizer, code_files(self.heldout))
        self.prose = _stream(self.tokenizer, prose_topics(self.heldout))

    def text_rows(self, n_rows: int, length: int, prose_share: float = PROSE_SHARE) -> Rows:
        """Random windows of code (or prose), each with BOS in front."""
        ids = np.zeros((n_rows, length + 1), dtype=np.int64)
        for row in ids:
            stream = self.prose if self.rng.random() < prose_share else self.code
            first = int(self.rng.integers(len(stream) - length))
            row[1:] = stream[first : first + length]
        return Rows(ids, np.full((n_rows, length), LM_WEIGHT, dtype=np.float32), None)

    def conversation(self, kind: str) -> Encoded:
        """One conversation; result digits weigh more in training only."""
        sample = GENERATORS[kind](self.rng, self.heldout)
        return encode_conversation(self.tokenizer, sample, 1.0 if self.heldout else RESULT_WEIGHT)

    def conversation_rows(self, n_rows: int, length: int, shares: Mapping[str, float]) -> Rows:
        """Whole conversations packed into rows, kinds drawn by ``shares`` (by number)."""
        rows = Rows(
            np.zeros((n_rows, length + 1), dtype=np.int64),
            np.zeros((n_rows, length), dtype=np.float32),
            np.full((n_rows, length), -1, dtype=np.int64),
        )
        for row in range(n_rows):
            used = number = misses = 0
            while misses < 6 and used < length - SMALLEST:
                encoded = self._next(length + 1 - used, length, shares)
                if encoded is None:
                    misses += 1
                    continue
                _place(rows, row, used, number, encoded)
                used, number = used + len(encoded[0]), number + 1
        return rows

    def _next(self, room: int, length: int, shares: Mapping[str, float]) -> Encoded | None:
        """A conversation of at most ``room`` tokens; one that is too long is kept for later."""
        if self.spare and len(self.spare[-1][0]) <= room:
            return self.spare.pop()
        kinds, weights = list(shares), np.array(list(shares.values()))
        kind = kinds[int(self.rng.choice(len(kinds), p=weights / weights.sum()))]
        encoded = self.conversation(kind)
        if len(encoded[0]) <= room:
            return encoded
        if len(self.spare) < MOST_SPARE and len(encoded[0]) <= length:
            self.spare.insert(0, encoded)
        return None


def _place(rows: Rows, row: int, used: int, number: int, encoded: Encoded) -> None:
    ids, weights = encoded
    n, length = len(ids), rows.weights.shape[1]
    rows.ids[row, used : used + n] = ids
    # Position i predicts token i + 1, so weights move by one, and the next BOS is never a target.
    rows.weights[row, used : used + n - 1] = weights[1:]
    assert rows.documents is not None
    rows.documents[row, used : min(used + n, length)] = number


def _stream(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> NDArray[np.int64]:
    """All documents after each other, each with BOS (token 0) in front."""
    parts = [[0, *encoding.ids] for encoding in tokenizer.encode_batch([t for _, t in documents])]
    return np.array([token for part in parts for token in part], dtype=np.int64)
