"""One way to open any source: an iterator of documents, bounded and in a seeded order."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np

from bitwright.corpora.recipe import (
    BuiltinSource,
    FolderSource,
    HubSource,
    JsonlSource,
    Recipe,
    Source,
)
from bitwright.corpora.records import Document
from bitwright.corpora.sources.builtin import builtin_documents
from bitwright.corpora.sources.files import jsonl_documents, text_documents
from bitwright.corpora.sources.folder import folder_documents
from bitwright.corpora.sources.hub import hub_documents


def open_source(
    source: Source, recipe: Recipe, rng: np.random.Generator, skipped: Counter[str]
) -> Iterator[Document]:
    """At most ``max_documents`` documents of a source; ``skipped`` counts what was left out.

    Built-in text and folders come in an order drawn from ``rng`` and are read lazily; files and
    data sets are read from their beginning and then shuffled, so that the order of a sorted file
    does not decide what is used.
    """
    category = recipe.category
    if isinstance(source, BuiltinSource):
        documents = builtin_documents(source, category, rng, skipped)
        return islice(documents, source.max_documents)
    if isinstance(source, FolderSource):
        documents = folder_documents(source, category, recipe.folder, rng, skipped)
        return islice(documents, source.max_documents)
    rows: Iterator[Document | None]
    if isinstance(source, JsonlSource):
        rows = jsonl_documents(source, category, recipe.folder)
    elif isinstance(source, HubSource):
        rows = hub_documents(source, category, recipe.folder)
    else:
        rows = iter(text_documents(source, category, recipe.folder))
    return _shuffled(islice(rows, source.max_documents), rng, skipped)


def _shuffled(
    rows: Iterator[Document | None], rng: np.random.Generator, skipped: Counter[str]
) -> Iterator[Document]:
    documents = []
    for row in rows:
        if row is None:
            skipped["nothing to score"] += 1
        else:
            documents.append(row)
    for i in rng.permutation(len(documents)):
        yield documents[i]
