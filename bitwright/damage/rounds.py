"""The order in which text is spent: rounds of one chunk per category."""

from collections.abc import Collection, Mapping, Sequence

from bitwright.corpora.records import Chunk
from bitwright.damage.forward import thinned

# (category, chunk) pairs that are measured together.
Round = tuple[tuple[str, Chunk], ...]


def plan_rounds(
    chunks: Mapping[str, Sequence[Chunk]], raced: Collection[str], stride: int = 1
) -> list[Round]:
    """Round 0 has the first chunk of every category, later ones a chunk of each raced category.

    With a stride, the same chunks come again with other rows once all were used. Rounds that
    have nothing to score are left out.
    """
    rounds: list[Round] = []
    most = max((len(chunks[c]) for c in raced), default=0)
    for offset in range(stride):
        for number in range(max(1, most)):
            first = not offset and not number
            used = [c for c in chunks if (first or c in raced) and number < len(chunks[c])]
            parts = [(c, thinned(chunks[c][number], stride, offset)) for c in used]
            found = tuple((c, chunk) for c, chunk in parts if len(chunk.rows()))
            if found:
                rounds.append(found)
    return rounds


def by_category(rounds: Sequence[Round]) -> dict[str, list[Chunk]]:
    """The chunks of some rounds, category → chunks in order."""
    found: dict[str, list[Chunk]] = {}
    for one in rounds:
        for category, chunk in one:
            found.setdefault(category, []).append(chunk)
    return found


def tokens_of(one: Round) -> int:
    """Tokens that a round costs for each tensor: those decoded, scored or not."""
    return sum(len(chunk.tokens) for _, chunk in one)
