"""What the corpora room hands to the others: documents, chunks and whole corpora."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPLITS = ("calibrate", "probe", "select", "report")
SPAN_KINDS = ("none", "prompt", "text", "assistant", "tool_call")

KIND_NONE, KIND_PROMPT, KIND_TEXT, KIND_ASSISTANT, KIND_TOOL_CALL = range(len(SPAN_KINDS))
SCORED_KINDS = (KIND_TEXT, KIND_ASSISTANT, KIND_TOOL_CALL)


@dataclass(frozen=True, slots=True)
class Document:
    """One document before rendering: either plain ``text`` or OpenAI-style ``messages``.

    ``tools`` are OpenAI tool definitions (``{"type": "function", "function": {...}}``) or the
    compact form of the built-in generator; ``id`` is unique within its corpus.
    """

    id: str
    category: str
    source: str
    text: str | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    tools: tuple[Mapping[str, object], ...] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """At most n_ctx tokens: several whole documents, or windows of long ones, as sequences.

    tokens: int32 (n,); kinds: uint8 (n,), index into SPAN_KINDS of each token;
    starts: first position of each sequence, starts[0] == 0, the last sequence ends at n;
    documents: the document id of each sequence (same length as starts).
    """

    category: str
    split: str
    index: int
    tokens: NDArray[np.int32]
    starts: tuple[int, ...]
    documents: tuple[str, ...]
    kinds: NDArray[np.uint8]

    def rows(self) -> NDArray[np.int64]:
        """Positions i (sorted) whose next token is in the same sequence and has a kind, (k,)."""
        follows = np.ones(len(self.tokens), dtype=bool)
        follows[list(self.starts)] = False  # a first token has no row before it
        return np.flatnonzero(follows & (self.kinds != KIND_NONE)) - 1

    def targets(self) -> NDArray[np.int32]:
        """The token that each row predicts, int32 (k,)."""
        return self.tokens[self.rows() + 1]

    def row_kinds(self) -> NDArray[np.uint8]:
        """The kind of the token that each row predicts, uint8 (k,)."""
        return self.kinds[self.rows() + 1]

    def row_documents(self) -> NDArray[np.int64]:
        """Index into ``documents`` of each row, (k,)."""
        return np.searchsorted(np.asarray(self.starts), self.rows(), side="right") - 1

    def scored(self) -> NDArray[np.bool_]:
        """Rows that predict text, assistant or tool-call tokens: the spans that matter, (k,)."""
        return np.isin(self.row_kinds(), SCORED_KINDS)


@dataclass(frozen=True, slots=True)
class Corpus:
    """All chunks of one category, and per-split statistics (counts; what was dropped and why)."""

    category: str
    recipe_sha256: str
    tokenizer_sha256: str
    n_ctx: int
    chunks: tuple[Chunk, ...]
    statistics: Mapping[str, object]

    def split(self, name: str) -> tuple[Chunk, ...]:
        """The chunks of one split, in order."""
        if name not in SPLITS:
            raise ValueError(f"{name!r} is not a split: one of {', '.join(SPLITS)}")
        return tuple(chunk for chunk in self.chunks if chunk.split == name)
