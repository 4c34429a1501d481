"""Documents from all sources of a recipe into the four splits, until each has enough tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from bitwright.corpora.encoding import Encoder, Piece
from bitwright.corpora.leaks import LeakCheck, Overlap, content_sha256, grams, own_words, split_of
from bitwright.corpora.recipe import (
    HubSource,
    JsonlSource,
    Recipe,
    Source,
    TextSource,
)
from bitwright.corpora.records import SPLITS, Document
from bitwright.corpora.sources.opening import open_source

Progress = Callable[[int, int], None]  # tokens there, tokens asked for


@dataclass(slots=True)
class SplitText:
    """What a split has so far; ``spare`` are further windows of long documents already used."""

    asked_tokens: int
    pieces: list[Piece] = field(default_factory=list)
    spare: list[list[Piece]] = field(default_factory=list)
    n_documents: int = 0
    n_tokens: int = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more is needed."""
        return self.n_tokens >= self.asked_tokens

    def add(self, piece: Piece) -> None:
        """Take one more piece."""
        self.pieces.append(piece)
        self.n_tokens += len(piece.tokens)

    def spare_tokens(self) -> int:
        """Tokens of the windows that were not taken."""
        return sum(len(piece.tokens) for pieces in self.spare for piece in pieces)


@dataclass(slots=True)
class SourceText:
    """A source being read, and what came of it."""

    source: Source
    documents: Iterator[Document]
    skipped: Counter[str]
    n_read: int = 0
    n_used: int = 0
    n_tokens: int = 0

    def next_document(self) -> Document | None:
        """The next one, None at the end."""
        document = next(self.documents, None)
        self.n_read += document is not None
        return document


@dataclass(slots=True)
class Collected:
    """The text of a category before it is packed."""

    splits: dict[str, SplitText]
    sources: list[SourceText]
    leaks: list[Overlap] = field(default_factory=list)
    n_duplicates: int = 0
    exhausted: bool = False


def parses_special(source: Source) -> bool:
    """Whether '<|im_end|>' in a plain text of this source stands for the special token."""
    return isinstance(source, TextSource | JsonlSource | HubSource) and source.parse_special


def collect(
    recipe: Recipe,
    encoder: Encoder,
    asked: Mapping[str, int],
    *,
    seed: int,
    progress: Progress | None,
) -> Collected:
    """Read documents, always from the source that is furthest behind its weight.

    A document goes where the hash of its words puts it; identical ones are used once; leaks are
    left out and listed. What the recipe says about leaks is the caller's business.
    """
    sources = [_opened(recipe, i, seed) for i in range(len(recipe.sources))]
    result = Collected({name: SplitText(asked[name]) for name in SPLITS}, sources)
    seen: set[str] = set()
    names: Counter[str] = Counter()
    check = LeakCheck(recipe.leak_share)
    shares = recipe.splits.as_dict()
    open_sources = list(sources)
    while open_sources and not _all_full(result, shares):
        source = min(open_sources, key=lambda item: item.n_tokens / item.source.weight)
        document = source.next_document()
        if document is None:
            open_sources.remove(source)
            continue
        key = content_sha256(document)
        if key in seen:
            result.n_duplicates += 1
            continue
        seen.add(key)
        names[document.id] += 1
        if names[document.id] > 1:
            document = replace(document, id=f"{document.id}#{names[document.id]}")
        _take(document, source, result, recipe, encoder, check, shares)
        if progress is not None:
            progress(_done(result), sum(asked.values()))
    result.exhausted = not open_sources
    for split in result.splits.values():
        _use_spare_windows(split)
    return result


def _opened(recipe: Recipe, index: int, seed: int) -> SourceText:
    skipped: Counter[str] = Counter()
    source = recipe.sources[index]
    rng = np.random.default_rng([seed, index])
    return SourceText(source, open_source(source, recipe, rng, skipped), skipped)


def _all_full(result: Collected, shares: Mapping[str, float]) -> bool:
    return all(split.is_full for name, split in result.splits.items() if shares[name] > 0)


def _done(result: Collected) -> int:
    return sum(min(split.n_tokens, split.asked_tokens) for split in result.splits.values())


def _take(
    document: Document,
    source: SourceText,
    result: Collected,
    recipe: Recipe,
    encoder: Encoder,
    check: LeakCheck,
    shares: Mapping[str, float],
) -> None:
    """Use a document if its split still needs text, it can be encoded and it leaks nothing."""
    document_words = own_words(document)
    if not document_words:
        source.skipped["no words"] += 1
        return
    name = split_of(document_words, shares)
    split = result.splits[name]
    if split.is_full:
        return
    pieces = encoder.pieces(document, parse_special=parses_special(source.source))
    if isinstance(pieces, str):
        source.skipped[pieces] += 1
        return
    leak = check.check(document.id, name, grams(document_words))
    if leak is not None:
        result.leaks.append(leak)
        return
    split.n_documents += 1
    source.n_used += 1
    for piece in pieces[: recipe.max_windows]:
        split.add(piece)
        source.n_tokens += len(piece.tokens)
    if pieces[recipe.max_windows :]:
        split.spare.append(pieces[recipe.max_windows :])


def _use_spare_windows(split: SplitText) -> None:
    """Too few documents: take more windows of each in turn."""
    while split.spare and not split.is_full:
        for pieces in split.spare:
            if not split.is_full:
                split.add(pieces.pop(0))
        split.spare = [pieces for pieces in split.spare if pieces]
