"""Corpora on disk: chunks as Parquet, statistics and hashes as JSON beside it."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bitwright.corpora.records import Chunk, Corpus
from bitwright.errors import InputError, StorageError

SCHEMA_VERSION = 1
MANIFEST, CHUNKS = "corpus.json", "corpus.parquet"

_SCHEMA = pa.schema(
    [
        ("category", pa.string()),
        ("split", pa.string()),
        ("index", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("starts", pa.list_(pa.int32())),
        ("documents", pa.list_(pa.string())),
        ("kinds", pa.list_(pa.uint8())),
    ]
)


def corpus_sha256(corpus: Corpus) -> str:
    """Hash of the chunks themselves: tokens, sequences, kinds, documents and splits."""
    digest = hashlib.sha256()
    digest.update(f"{corpus.category}\0{corpus.tokenizer_sha256}\0{corpus.n_ctx}".encode())
    for chunk in corpus.chunks:
        head = [chunk.split, chunk.index, chunk.starts, chunk.documents]
        digest.update(json.dumps(head).encode())
        digest.update(chunk.tokens.astype("<i4").tobytes())
        digest.update(chunk.kinds.tobytes())
    return digest.hexdigest()


def save_corpus(corpora: Sequence[Corpus], folder: Path) -> Path:
    """Write both files, the manifest last; returns its path. Files of an earlier run go.

    Raises:
        StorageError: the folder cannot be written.
    """
    manifest = {
        "schema": SCHEMA_VERSION,
        "corpora": {
            corpus.category: {
                "recipe_sha256": corpus.recipe_sha256,
                "tokenizer_sha256": corpus.tokenizer_sha256,
                "corpus_sha256": corpus_sha256(corpus),
                "n_ctx": corpus.n_ctx,
                "statistics": corpus.statistics,
            }
            for corpus in corpora
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sink = pa.BufferOutputStream()
        pq.write_table(_table(corpora), sink, compression="zstd")
        _write(folder / CHUNKS, sink.getvalue().to_pybytes())
        text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n"
        _write(folder / MANIFEST, text.encode())
    except OSError as error:
        raise StorageError(
            f"the corpus cannot be written to {folder} ({error.strerror}): give another folder"
        ) from None
    return folder / MANIFEST


def _table(corpora: Sequence[Corpus]) -> Any:
    rows = [
        {
            "category": chunk.category,
            "split": chunk.split,
            "index": chunk.index,
            "tokens": chunk.tokens,
            "starts": chunk.starts,
            "documents": chunk.documents,
            "kinds": chunk.kinds,
        }
        for corpus in corpora
        for chunk in corpus.chunks
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _write(path: Path, data: bytes) -> None:
    """Temporary file in the same folder → fsync → rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_corpus(folder: Path) -> dict[str, Corpus]:
    """Category → corpus, checked against the hashes of the manifest.

    Raises:
        InputError: no corpus there, another schema, or files that do not belong together.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        rows = pq.read_table(folder / CHUNKS, schema=_SCHEMA).to_pylist()
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} holds no corpus ({error.filename} is missing): run bitwright corpus first"
        ) from None
    except (json.JSONDecodeError, pa.ArrowException, OSError) as error:
        raise InputError(f"the corpus in {folder} is damaged ({error}): build it again") from None
    if manifest.get("schema") != SCHEMA_VERSION:
        raise InputError(
            f"the corpus in {folder} has schema {manifest.get('schema')}, this version reads "
            f"{SCHEMA_VERSION}: build it again"
        )
    out = {}
    for category, entry in manifest["corpora"].items():
        chunks = tuple(_chunk(row) for row in rows if row["category"] == category)
        corpus = Corpus(
            category=category,
            recipe_sha256=entry["recipe_sha256"],
            tokenizer_sha256=entry["tokenizer_sha256"],
            n_ctx=entry["n_ctx"],
            chunks=chunks,
            statistics=entry["statistics"],
        )
        if corpus_sha256(corpus) != entry["corpus_sha256"]:
            raise InputError(
                f"the {category} corpus in {folder} is not the one of its manifest: build it again"
            )
        out[category] = corpus
    return out


def _chunk(row: dict[str, Any]) -> Chunk:
    return Chunk(
        category=row["category"],
        split=row["split"],
        index=row["index"],
        tokens=np.array(row["tokens"], np.int32),
        starts=tuple(row["starts"]),
        documents=tuple(row["documents"]),
        kinds=np.array(row["kinds"], np.uint8),
    )
