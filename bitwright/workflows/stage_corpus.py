"""Stage 1: recipes → chunks of tokens, in four disjoint splits per category."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.corpora.build import build_corpus
from bitwright.corpora.recipe import Recipe, load_recipe
from bitwright.corpora.records import Corpus
from bitwright.corpora.store import load_corpus, save_corpus
from bitwright.engine.tokenizer import Tokenizer
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import key_of

Corpora = Mapping[str, Corpus]


def build_corpora(ctx: RunContext) -> tuple[Corpora, str]:
    """The corpora of every category, from the run folder or built, and the stage's key."""
    recipes = {category: load_recipe(ctx.spec.corpora[category]) for category in ctx.categories}
    with Tokenizer(ctx.model) as tokenizer:
        inputs = {
            "recipes": {category: recipe.fingerprint() for category, recipe in recipes.items()},
            "tokenizer": tokenizer.fingerprint(),
            "n_ctx": ctx.options.n_ctx,
            "seed": ctx.spec.seed,
            "chunks": ctx.spec.chunks,
        }
        key = key_of("corpus", inputs)
        ctx.reporter.stage("corpus", ", ".join(recipes))
        ctx.folder.stage("corpus", key, lambda: _build(ctx, recipes, tokenizer), inputs=inputs)
    return load_corpus(ctx.folder.path / "corpus"), key


def _build(
    ctx: RunContext, recipes: Mapping[str, Recipe], tokenizer: Tokenizer
) -> tuple[dict[str, Any], list[Path]]:
    need = {split: count * ctx.options.n_ctx for split, count in ctx.spec.chunks.items()} or None
    built = []
    for done, recipe in enumerate(recipes.values()):
        ctx.reporter.step(done, len(recipes), recipe.category)
        built.append(
            build_corpus(
                recipe, tokenizer, n_ctx=ctx.options.n_ctx, seed=ctx.spec.seed, need_tokens=need
            )
        )
    folder = ctx.folder.file("corpus", "manifest.json").parent
    save_corpus(built, folder)
    statistics = {corpus.category: dict(corpus.statistics) for corpus in built}
    return statistics, [path for path in sorted(folder.iterdir()) if path.is_file()]
