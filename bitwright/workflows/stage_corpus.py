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
            "recipes": {
                c: [recipe.sha256(), source_stamps(recipe)] for c, recipe in recipes.items()
            },
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


def source_stamps(recipe: Recipe) -> list[tuple[str, int, int]]:
    """(name, bytes, modification time) of the local files that a recipe reads.

    A changed file makes the corpus anew; where its text is the same after all, the later stages
    see the same chunks and stay as they are.
    """
    stamps = []
    for source in recipe.sources:
        path = getattr(source, "path", None)
        if path is None:
            continue
        root = recipe.folder / path
        files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
        for file in files:
            if file.exists():
                facts = file.stat()
                stamps.append((str(file.name), facts.st_size, facts.st_mtime_ns))
    return stamps
