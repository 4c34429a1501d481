"""Documents as tokens with a kind for each token: windows of text, whole conversations."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.chat_template import ChatTemplate, Failure
from bitwright.corpora.conversation import CHATML, PLAIN, Rendering, render_conversation
from bitwright.corpora.records import (
    KIND_NONE,
    KIND_PROMPT,
    KIND_TEXT,
    SCORED_KINDS,
    Document,
)

MAX_TEXT_CHARS = 1_000_000  # a longer document is cut: its windows are a sample anyway
TOO_LONG = "the answer starts beyond n_ctx"
MIN_SCORED_TOKENS = 8  # a conversation cut to n_ctx must still have so many
_UNKNOWN = "\ufffd"


class TokenizerLike(Protocol):
    """What corpora need of engine.tokenizer.Tokenizer."""

    @property
    def chat_template(self) -> str | None: ...  # noqa: D102
    @property
    def bos_text(self) -> str: ...  # noqa: D102
    @property
    def eos_text(self) -> str: ...  # noqa: D102

    bos_id: int | None
    adds_bos: bool

    def encode(  # noqa: D102
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> NDArray[np.int32]: ...
    def decode(self, ids: NDArray[np.int32]) -> str: ...  # noqa: D102
    def piece(self, token_id: int) -> str: ...  # noqa: D102
    def fingerprint(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a chunk: tokens int32 (n,) with BOS if the model wants it, kinds (n,)."""

    document: str
    tokens: NDArray[np.int32]
    kinds: NDArray[np.uint8]


class Encoder:
    """Turns documents into pieces of at most n_ctx tokens.

    ``style`` says which template conversations go through: 'model', 'chatml' or 'plain'.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        template: ChatTemplate,
        style: str,
        *,
        n_ctx: int,
        context: int,
        seed: int,
    ) -> None:
        self.style = style
        self._tokenizer = tokenizer
        self._template = template
        self.n_ctx = n_ctx
        self._context = context
        self._seed = seed
        self._piece_texts: dict[int, str] = {}

    def pieces(self, document: Document, *, parse_special: bool) -> list[Piece] | str:
        """The document's pieces in the order in which to use them, or why it has none."""
        if document.text is not None:
            return self._windows(document.id, document.text, parse_special)
        assert document.messages is not None
        rendering = render_conversation(self._template, document.messages, document.tools)
        if isinstance(rendering, Failure):
            return f"template: {rendering.message}"
        return self._conversation(document.id, rendering)

    def _windows(self, document: str, text: str, parse_special: bool) -> list[Piece] | str:
        """Consecutive windows in a seeded order; the first tokens of each only give context."""
        ids = self._tokenizer.encode(text[:MAX_TEXT_CHARS], parse_special=parse_special)
        head, body = self._without_bos(ids)
        room = self.n_ctx - len(head)
        pieces = []
        for start in range(0, len(body), room):
            tokens = np.concatenate([head, body[start : start + room]])
            # A short text would otherwise have no scored token at all.
            context = min(self._context, len(tokens) // 2)
            kinds = np.full(len(tokens), KIND_TEXT, np.uint8)
            kinds[: len(head) + context] = KIND_PROMPT
            kinds[: len(head)] = KIND_NONE
            if np.isin(kinds[1:], SCORED_KINDS).any():
                pieces.append(Piece(document, tokens, kinds))
        if not pieces:
            return "too short"
        order = np.random.default_rng([self._seed, _number(document)]).permutation(len(pieces))
        return [pieces[i] for i in order]

    def _conversation(self, document: str, rendering: Rendering) -> list[Piece] | str:
        ids = self._tokenizer.encode(rendering.text, parse_special=True)
        bounds = self._bounds(ids, rendering.text)
        if bounds is None:
            return "tokens do not spell the text"
        char_kinds = np.full(len(rendering.text) + 1, KIND_PROMPT, np.uint8)
        for span in rendering.spans:
            char_kinds[span.start : span.end] = span.kind
        # A token across a border counts by its last character: it says something of the answer.
        kinds = char_kinds[np.maximum(bounds[:, 1] - 1, bounds[:, 0])]
        head, body = self._without_bos(ids)
        tokens = np.concatenate([head, body])
        kinds = np.concatenate(
            [np.full(len(head), KIND_NONE, np.uint8), kinds[len(ids) - len(body) :]]
        )
        if len(tokens) > self.n_ctx:
            tokens, kinds = tokens[: self.n_ctx], kinds[: self.n_ctx]
            if np.isin(kinds, SCORED_KINDS).sum() < MIN_SCORED_TOKENS:
                return TOO_LONG
        if not np.isin(kinds[1:], SCORED_KINDS).any():
            return "nothing to score"
        return [Piece(document, tokens.astype(np.int32), kinds)]

    def _without_bos(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(BOS or nothing, the rest): one BOS where the tokenizer or the template adds any."""
        bos = self._tokenizer.bos_id
        n_leading = 0
        while n_leading < len(ids) and ids[n_leading] == bos:
            n_leading += 1
        wanted = bos is not None and (self._tokenizer.adds_bos or n_leading > 0)
        head = np.array([bos] if wanted else [], np.int32)
        return head, ids[n_leading:]

    def _bounds(self, ids: NDArray[np.int32], text: str) -> NDArray[np.int64] | None:
        """Character bounds [start, end) of each token, (n, 2); None if they do not spell it.

        Tokens that hold only a part of a character share the bounds of their group.
        """
        bounds = np.empty((len(ids), 2), np.int64)
        at, i = 0, 0
        while i < len(ids):
            j, piece = i + 1, self._piece(int(ids[i]))
            if _UNKNOWN in piece:
                while j < len(ids) and _UNKNOWN in self._piece(int(ids[j])):
                    j += 1
                piece = self._tokenizer.decode(ids[i:j])
            found = _match(text, at, piece)
            if found is None:
                return None
            bounds[i:j] = found
            at, i = found[1], j
        return bounds if not text[at:].strip() else None

    def _piece(self, token_id: int) -> str:
        if token_id not in self._piece_texts:
            self._piece_texts[token_id] = self._tokenizer.piece(token_id)
        return self._piece_texts[token_id]


def _match(text: str, at: int, piece: str) -> tuple[int, int] | None:
    """Where a token's text lies at or after ``at``.

    SentencePiece adds a space of its own at the start of a text; some special tokens swallow
    the white space around them.
    """
    candidates = (piece, piece.removeprefix(" "))
    for candidate in candidates:
        if text.startswith(candidate, at):
            return at, at + len(candidate)
    while at < len(text) and text[at].isspace():
        at += 1
        for candidate in candidates:
            if text.startswith(candidate, at):
                return at, at + len(candidate)
    return None


def _number(document: str) -> int:
    return int.from_bytes(hashlib.sha256(document.encode("utf-8", "replace")).digest()[:8], "big")


@contextmanager
def open_encoder(
    tokenizer: TokenizerLike, *, n_ctx: int, context: int, seed: int
) -> Iterator[Encoder]:
    """An encoder with the model's own chat template, or the documented fall-back."""
    source, style = choose_template(tokenizer)
    with ChatTemplate(source, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text) as template:
        yield Encoder(tokenizer, template, style, n_ctx=n_ctx, context=context, seed=seed)


def choose_template(tokenizer: TokenizerLike) -> tuple[str, str]:
    """(Jinja source, 'model' | 'chatml' | 'plain')."""
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template, "model"
    marks = ("<|im_start|>", "<|im_end|>")
    if all(len(tokenizer.encode(mark, parse_special=True)) == 1 for mark in marks):
        return CHATML, "chatml"
    return PLAIN, "plain"
