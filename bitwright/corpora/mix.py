"""Mixes of categories by tokens, such as code 0.7 and general 0.3."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bitwright.corpora.records import Chunk, Corpus
from bitwright.errors import ConfigError, InputError


def mix_chunks(
    corpora: Mapping[str, Corpus],
    shares: Mapping[str, float],
    *,
    split: str = "calibrate",
    total_tokens: int | None = None,
) -> tuple[Chunk, ...]:
    """Chunks of several categories whose token counts stand exactly in the given shares.

    ``shares`` are relative (7 and 3 mean the same as 0.7 and 0.3); categories with share 0 or
    without a share are left out. Without ``total_tokens`` the mix is as large as the scarcest
    category allows. The last sequence of a category is cut to meet its count; chunks of
    different categories are never joined, and keep their order.

    Raises:
        ConfigError: an unknown category, a negative share, or no positive one.
        InputError: ``total_tokens`` needs more text of a category than there is.
    """
    wanted = _checked(corpora, shares)
    chunks = {name: corpora[name].split(split) for name in wanted}
    there = {name: sum(len(chunk.tokens) for chunk in chunks[name]) for name in wanted}
    if total_tokens is None:
        total_tokens = _largest(there, wanted)
    counts = token_counts(wanted, total_tokens)
    for name, count in counts.items():
        if count > there[name]:
            raise InputError(
                f"the mix of {total_tokens} tokens needs {count} of {name}, its {split} split has "
                f"{there[name]}: ask for fewer tokens or give more {name} text"
            )
    return tuple(chunk for name in wanted for chunk in first_tokens(chunks[name], counts[name]))


def token_counts(shares: Mapping[str, float], total_tokens: int) -> dict[str, int]:
    """Whole token counts that add up to the total (largest remainders; ties by order)."""
    whole = math.fsum(shares.values())
    exact = {name: total_tokens * share / whole for name, share in shares.items()}
    counts = {name: math.floor(value) for name, value in exact.items()}
    left = total_tokens - sum(counts.values())
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[:left]:
        counts[name] += 1
    return counts


def first_tokens(chunks: Sequence[Chunk], n_tokens: int) -> list[Chunk]:
    """The first ``n_tokens`` tokens; the last chunk is cut."""
    out = []
    left = n_tokens
    for chunk in chunks:
        if left <= 0:
            break
        out.append(chunk if len(chunk.tokens) <= left else _cut(chunk, left))
        left -= len(out[-1].tokens)
    return out


def _cut(chunk: Chunk, n_tokens: int) -> Chunk:
    n_starts = sum(start < n_tokens for start in chunk.starts)
    return replace(
        chunk,
        tokens=chunk.tokens[:n_tokens],
        kinds=chunk.kinds[:n_tokens],
        starts=chunk.starts[:n_starts],
        documents=chunk.documents[:n_starts],
    )


def _checked(corpora: Mapping[str, Corpus], shares: Mapping[str, float]) -> dict[str, float]:
    unknown = sorted(set(shares) - set(corpora))
    if unknown:
        raise ConfigError(
            f"the mix names {', '.join(unknown)}: there are corpora for {', '.join(corpora)}"
        )
    if any(not (0 <= share < math.inf) for share in shares.values()):
        raise ConfigError(f"the shares of the mix {dict(shares)} must be 0 or more")
    wanted = {name: share for name, share in shares.items() if share > 0}
    if not wanted:
        raise ConfigError("the mix has no category with a share above 0")
    return wanted


def _largest(there: Mapping[str, int], shares: Mapping[str, float]) -> int:
    """The largest total that every category can serve."""
    whole = math.fsum(shares.values())
    total = math.floor(min(there[name] * whole / share for name, share in shares.items()))
    # Rounding of the counts may ask for one token more than there is.
    while any(count > there[name] for name, count in token_counts(shares, total).items()):
        total -= 1
    return total
