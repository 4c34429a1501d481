"""A recipe into the chunks of its category."""

import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bitwright.corpora.collecting import Collected, Progress, SplitText, collect
from bitwright.corpora.encoding import TOO_LONG, Encoder, TokenizerLike, open_encoder
from bitwright.corpora.leaks import GRAM_WORDS
from bitwright.corpora.packing import pack, trim
from bitwright.corpora.recipe import BuiltinSource, Recipe
from bitwright.corpora.records import SPLITS, Chunk, Corpus
from bitwright.errors import ConfigError, InputError

MIN_CHUNKS = 2  # as llama-imatrix: less than two contexts of text is no calibration
MAX_NAMED = 5
TOO_LONG_SHARE = 0.1  # more conversations than that left out for their length get a note


def build_corpus(
    recipe: Recipe,
    tokenizer: TokenizerLike,
    *,
    n_ctx: int,
    seed: int,
    need_tokens: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Read, render, tokenize, split and pack the text of one category.

    Each split gets the recipe's number of chunks × n_ctx tokens, or ``need_tokens[split]``
    (0: that split is not needed), exactly if there is enough text; if not, the statistics say
    what was asked for and what there is. The same arguments and inputs give the same corpus.

    Raises:
        ConfigError: a path or option of the recipe is wrong.
        InputError: text that cannot be used; under 2 × n_ctx calibration tokens; leaks between
            splits while the recipe says refuse; an unsafe chat template.
    """
    if n_ctx < 16:
        raise ConfigError(f"n_ctx is {n_ctx}: chunks need at least 16 tokens")
    asked = {split: count * n_ctx for split, count in recipe.chunks.as_dict().items()}
    unknown = set(need_tokens or ()) - set(SPLITS)
    if unknown:
        raise ConfigError(f"{', '.join(sorted(unknown))}: the splits are {', '.join(SPLITS)}")
    asked.update(need_tokens or {})
    with open_encoder(tokenizer, n_ctx=n_ctx, context=recipe.context, seed=seed) as encoder:
        collected = collect(recipe, encoder, asked, seed=seed, progress=progress)
        _refuse_leaks(recipe, collected)
        _refuse_too_little(recipe, collected, n_ctx)
        chunks, splits = _packed(recipe, collected, n_ctx)
        return Corpus(
            category=recipe.category,
            recipe_sha256=recipe.sha256(),
            tokenizer_sha256=tokenizer.fingerprint(),
            n_ctx=n_ctx,
            chunks=tuple(chunks),
            statistics=_statistics(recipe, collected, encoder, tokenizer, splits, seed),
        )


def require_splits(corpora: Sequence[Corpus], splits: Sequence[str]) -> None:
    """Make sure that each category has text in each of these splits.

    Raises:
        InputError: names the category and the split.
    """
    for corpus in corpora:
        for split in splits:
            if not any(chunk.scored().any() for chunk in corpus.split(split)):
                raise InputError(
                    f"the {corpus.category} corpus has no text to score in its {split} split: give "
                    "more documents (each goes to one split), or larger shares in the recipe"
                )


def _refuse_leaks(recipe: Recipe, collected: Collected) -> None:
    if recipe.on_leak == "drop" or not collected.leaks:
        return
    named = "; ".join(
        f"{leak.text} and {leak.document} ({leak.share:.0%})"
        for leak in collected.leaks[:MAX_NAMED]
    )
    more = len(collected.leaks) - MAX_NAMED
    raise InputError(
        f"{len(collected.leaks)} documents of the {recipe.category} corpus share more than "
        f"{recipe.leak_share:.0%} of their {GRAM_WORDS}-word phrases with a document of another "
        f'split: {named}{f"; and {more} more" if more > 0 else ""}; set on_leak = "drop" to leave '
        "them out"
    )


def _refuse_too_little(recipe: Recipe, collected: Collected, n_ctx: int) -> None:
    split = collected.splits["calibrate"]
    needed = min(MIN_CHUNKS * n_ctx, split.asked_tokens)
    if split.n_tokens >= needed:
        return
    reasons = _skipped(collected)
    reasons["overlap with another split"] += len(collected.leaks)
    read = sum(source.n_read for source in collected.sources)
    raise InputError(
        f"the {recipe.category} corpus has {split.n_tokens} tokens to calibrate on (from "
        f"{split.n_documents} of {read} documents), {needed} are needed ({MIN_CHUNKS} × n_ctx): "
        f"give more text or a smaller n_ctx; left out: {dict(+reasons) or 'nothing'}"
    )


def _packed(
    recipe: Recipe, collected: Collected, n_ctx: int
) -> tuple[list[Chunk], dict[str, dict[str, int]]]:
    chunks: list[Chunk] = []
    statistics = {}
    for name, split in collected.splits.items():
        pieces, n_cut = trim(split.pieces, split.asked_tokens)
        packed = pack(
            pieces,
            category=recipe.category,
            split=name,
            n_ctx=n_ctx,
            max_sequences=recipe.max_sequences,
        )
        chunks += packed
        statistics[name] = _split_statistics(split, packed, n_cut, n_ctx)
    return chunks, statistics


def _split_statistics(
    split: SplitText, chunks: Sequence[Chunk], n_cut: int, n_ctx: int
) -> dict[str, int]:
    return {
        "documents": len({document for chunk in chunks for document in chunk.documents}),
        "sequences": sum(len(chunk.starts) for chunk in chunks),
        "chunks": len(chunks),
        "tokens": sum(len(chunk.tokens) for chunk in chunks),
        "scored_tokens": sum(int(chunk.scored().sum()) for chunk in chunks),
        "asked_tokens": split.asked_tokens,
        "asked_chunks": math.ceil(split.asked_tokens / n_ctx),
        "unused_tokens": n_cut + split.spare_tokens(),
    }


def _skipped(collected: Collected) -> Counter[str]:
    total: Counter[str] = Counter()
    for source in collected.sources:
        total.update(source.skipped)
    return total


def _notes(
    recipe: Recipe, collected: Collected, splits: Mapping[str, Mapping[str, int]], n_ctx: int
) -> list[str]:
    notes = []
    too_long = _skipped(collected)[TOO_LONG]
    read = sum(source.n_read for source in collected.sources)
    if too_long > TOO_LONG_SHARE * read:
        notes.append(
            f"{recipe.category}: {too_long} of {read} conversations were left out because their "
            f"first {n_ctx} tokens hold no answer: a larger n_ctx uses them"
        )
    for name, split in splits.items():
        if split["tokens"] < split["asked_tokens"]:
            notes.append(
                f"{recipe.category}, {name}: asked for {split['asked_chunks']} chunks "
                f"({split['asked_tokens']} tokens), got {split['tokens'] / n_ctx:.1f} "
                f"({split['tokens']} tokens), {split['unused_tokens']} tokens unused"
            )
    return notes


def _bos_rule(tokenizer: TokenizerLike) -> str:
    if tokenizer.bos_id is None:
        return "the model has no BOS"
    return "one at each sequence" if tokenizer.adds_bos else "only where the template writes it"


def _statistics(
    recipe: Recipe,
    collected: Collected,
    encoder: Encoder,
    tokenizer: TokenizerLike,
    splits: Mapping[str, Mapping[str, int]],
    seed: int,
) -> dict[str, object]:
    """Plain JSON: counts per split, per source, and everything that was left out."""
    builtin = any(isinstance(source, BuiltinSource) for source in recipe.sources)
    n_ctx = encoder.n_ctx
    return {
        "title": recipe.title,
        "seed": seed,
        "template": encoder.style,
        "bos": _bos_rule(tokenizer),
        "python": platform.python_version() if builtin else None,
        "numpy": np.__version__,
        "splits": splits,
        "sources": [
            {
                "kind": item.source.kind,
                "documents_read": item.n_read,
                "documents_used": item.n_used,
                "tokens": item.n_tokens,
            }
            for item in collected.sources
        ],
        "all_read": collected.exhausted,
        "duplicates": collected.n_duplicates,
        "skipped": dict(_skipped(collected)),
        "leaks": {
            "gram_words": GRAM_WORDS,
            "max_share": recipe.leak_share,
            "dropped": [[leak.text, leak.document, leak.share] for leak in collected.leaks],
        },
        "notes": _notes(recipe, collected, splits, n_ctx),
    }
