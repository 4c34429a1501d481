"""Which documents belong together, which split a document is in, and what leaks between texts.

Word 13-grams as in Brown et al. 2020 (arXiv:2005.14165, appendix C), but a share of the document's
own 13-grams decides, not a single one: one shared licence line or phrase is no leak.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.encoding import TokenizerLike
from bitwright.corpora.records import SPLITS, Corpus, Document

GRAM_WORDS = 13
_WORD = re.compile(r"\w+")
Grams = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """``share`` of the 13-grams of one that occur in the other; 0 < share ≤ 1."""

    text: str
    document: str
    share: float


def own_words(document: Document) -> list[str]:
    """Lower-case words of what is the document's own.

    Of a conversation: what is said and called. System messages and tool definitions are the same
    in many documents, so they neither separate documents nor make a leak.
    """
    if document.text is not None:
        return words(document.text)
    parts = []
    for message in document.messages or ():
        if message["role"] != "system":
            parts.append(str(message.get("content") or ""))
            calls = message.get("tool_calls")
            parts.append(json.dumps(calls, sort_keys=True, ensure_ascii=False) if calls else "")
    return words("\n".join(parts))


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation."""
    return _WORD.findall(text.lower())


def content_sha256(document: Document) -> str:
    """Hash of all of a document's content: equal for identical documents only."""
    content = [document.text, document.messages, document.tools]
    data = json.dumps(content, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
    return hashlib.sha256(data).hexdigest()


def split_of(document_words: list[str], shares: Mapping[str, float]) -> str:
    """The split of a document: depends on its own words and the shares, on nothing else."""
    digest = hashlib.sha256(" ".join(document_words).encode("utf-8", "replace")).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    bound = 0.0
    for split in SPLITS:
        bound += shares[split]
        if position < bound:
            return split
    return max(shares, key=lambda split: shares[split])  # rounding of the last bound


def grams(document_words: list[str]) -> Grams:
    """Sorted distinct hashes of the 13-grams; a shorter text is one gram."""
    if not document_words:
        return np.empty(0, np.uint64)
    size = min(GRAM_WORDS, len(document_words))
    known: dict[str, int] = {}
    for word in document_words:
        if word not in known:
            digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest()
            known[word] = int.from_bytes(digest, "little")
    hashes = np.array([known[word] for word in document_words], np.uint64)
    out = np.zeros(len(hashes) - size + 1, np.uint64)
    factor = np.uint64(0x9E3779B97F4A7C15)  # odd: the polynomial keeps the order of the words
    with np.errstate(over="ignore"):
        for j in range(size):
            out = out * factor + hashes[j : j + len(out)]
    return np.unique(out)


def shared(own: Grams, other: Grams) -> float:
    """The share of ``own`` that is also in ``other``; 0.0 for an empty text."""
    return float(np.isin(own, other, assume_unique=True).mean()) if len(own) else 0.0


def overlap(
    documents: Mapping[str, str], texts: Mapping[str, str], *, min_share: float = 0.2
) -> tuple[Overlap, ...]:
    """The texts (evaluation items) of which at least ``min_share`` stands in a document.

    Both map a name to plain text. For each text the document that covers most of it is named.
    """
    known = {name: grams(words(text)) for name, text in documents.items()}
    everything = np.unique(np.concatenate([np.empty(0, np.uint64), *known.values()]))
    out = []
    for name, text in texts.items():
        own = grams(words(text))
        if shared(own, everything) <= 0:
            continue
        best = max(known, key=lambda document: shared(own, known[document]))
        share = shared(own, known[best])
        if share >= min_share:
            out.append(Overlap(name, best, share))
    return tuple(out)


def corpus_texts(corpus: Corpus, tokenizer: TokenizerLike) -> dict[str, str]:
    """Document → the text of its used windows, special tokens included, for ``overlap``."""
    texts: dict[str, str] = {}
    for chunk in corpus.chunks:
        bounds = [*chunk.starts, len(chunk.tokens)]
        for i, name in enumerate(chunk.documents):
            text = tokenizer.decode(chunk.tokens[bounds[i] : bounds[i + 1]])
            texts[name] = f"{texts[name]}\n{text}" if name in texts else text
    return texts


class LeakCheck:
    """Remembers the used documents of each split and says what a new one shares with the others."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._documents: list[tuple[str, str, int]] = []  # name, split, number of grams
        self._owners: dict[int, list[int]] = {}  # gram → documents that have it

    def check(self, document: str, split: str, own: Grams) -> Overlap | None:
        """The overlap if too much of one is in the other; None, and it counts as used, if not.

        Both directions count: a short text inside a long one leaks whichever was read first.
        """
        numbers = own.tolist()
        hits: Counter[int] = Counter()
        n_shared = 0
        for number in numbers:
            others = [i for i in self._owners.get(number, ()) if self._documents[i][1] != split]
            hits.update(others)
            n_shared += bool(others)
        covered = {i: hit / self._documents[i][2] for i, hit in hits.items()}
        worst = max(covered, key=lambda i: covered[i], default=None)
        if worst is not None:
            share = max(n_shared / len(numbers), covered[worst])
            if share > self._max_share:
                named = hits.most_common(1)[0][0] if share > covered[worst] else worst
                return Overlap(document, self._documents[named][0], share)
        for number in numbers:
            self._owners.setdefault(number, []).append(len(self._documents))
        self._documents.append((document, split, len(numbers)))
        return None
