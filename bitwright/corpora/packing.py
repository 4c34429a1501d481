"""Pieces into chunks of at most n_ctx tokens; each piece stays a sequence of its own."""

from collections.abc import Sequence

import numpy as np

from bitwright.corpora.encoding import Piece
from bitwright.corpora.records import Chunk

OPEN_CHUNKS = 16  # a piece goes into the first of so many unfinished chunks that has room
MIN_ROOM = 8  # tokens; a chunk with less room than that is finished


def trim(pieces: Sequence[Piece], n_tokens: int) -> tuple[list[Piece], int]:
    """The first pieces with exactly ``n_tokens`` in all, and how many tokens were cut off.

    Fewer if there are fewer, or if the last piece would be cut to a single token.
    """
    kept: list[Piece] = []
    left = n_tokens
    cut = 0
    for piece in pieces:
        size = min(len(piece.tokens), left)
        if size >= 2:
            kept.append(Piece(piece.document, piece.tokens[:size], piece.kinds[:size]))
            left -= size
        cut += len(piece.tokens) - (size if size >= 2 else 0)
    return kept, cut


def pack(
    pieces: Sequence[Piece], *, category: str, split: str, n_ctx: int, max_sequences: int
) -> list[Chunk]:
    """First fit, in the order of the pieces: the same pieces give the same chunks.

    Each piece has at most n_ctx tokens.
    """
    bins: list[list[Piece]] = []
    room: list[int] = []
    first_open = 0
    for piece in pieces:
        size = len(piece.tokens)
        first_open = max(first_open, len(bins) - OPEN_CHUNKS)
        for i in range(first_open, len(bins)):
            if room[i] >= max(size, MIN_ROOM) and len(bins[i]) < max_sequences:
                bins[i].append(piece)
                room[i] -= size
                break
        else:
            bins.append([piece])
            room.append(n_ctx - size)
    return [_chunk(content, category, split, i) for i, content in enumerate(bins)]


def _chunk(pieces: Sequence[Piece], category: str, split: str, index: int) -> Chunk:
    sizes = [len(piece.tokens) for piece in pieces]
    return Chunk(
        category=category,
        split=split,
        index=index,
        tokens=np.concatenate([piece.tokens for piece in pieces]).astype(np.int32),
        starts=tuple(int(start) for start in np.cumsum([0, *sizes[:-1]])),
        documents=tuple(piece.document for piece in pieces),
        kinds=np.concatenate([piece.kinds for piece in pieces]).astype(np.uint8),
    )
