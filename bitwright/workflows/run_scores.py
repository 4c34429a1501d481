"""The per-token scores of a finished run or of `evaluate --corpus --out`, ready to be compared."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.records import Chunk
from bitwright.corpora.store import load_corpus
from bitwright.engine.atomic import write_atomic
from bitwright.errors import InputError
from bitwright.eval.divergence import document_ids
from bitwright.eval.tokens import TokenTable, load_tables
from bitwright.workflows.run_folder import RunFolder

# Where a workflow keeps its last scores: of a build (and of `evaluate`), of variants, of a sweep.
STAGES = ("report", "final", "sweep")
TEXTS = "documents.json"  # beside the scores, where the folder has no corpus of its own
Documents = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class RunScores:
    """One file of a run: its token tables by category, and what makes two comparable.

    ``model``: hash of the reference. ``chunks``: hash of each category's text. ``engine``: how
    the reference was computed. ``ids``: the scored tokens themselves, where the corpus is there.
    """

    name: str
    target: str | None
    model: str
    chunks: Mapping[str, str]
    engine: Mapping[str, object]
    tables: Mapping[str, TokenTable]
    ids: Mapping[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a folder says of its scores: labels in order, the chosen and the baseline one."""

    folder: RunFolder
    stage: str
    manifest: Mapping[str, Any]
    labels: tuple[str, ...]
    target: str | None
    chosen: str | None
    baseline: str | None


def scores_stage(folder: Path) -> str | None:
    """The stage whose per-token scores the folder holds; None where it holds none."""
    found = [stage for stage in STAGES if (folder / f"{stage}-scores.json").is_file()]
    return found[0] if found else None


def read_record(folder: Path) -> RunRecord:
    """The record of a folder that has scores.

    Raises:
        InputError: it cannot be read.
    """
    opened, stage = RunFolder(folder, read_only=True), scores_stage(folder)
    manifest = opened.manifest(f"{stage}-scores")
    try:
        assert stage is not None
        assert manifest is not None
        labels = tuple(manifest["inputs"]["layouts"])
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        found = {key: result.get(key) for key in ("target", "chosen", "baseline")}
    except (AssertionError, OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"{folder} is no run that has ended (its {stage}-scores.json or result.json cannot be "
            "used): run the same command again, it goes on where it stopped"
        ) from None
    return RunRecord(opened, stage, manifest, labels, **found)


def load_scores(record: RunRecord, label: str | None = None) -> RunScores:
    """The scores of one label; of the run's own chosen file where none is given.

    Raises:
        InputError: no such label, or scores that cannot be read.
    """
    folder, inputs = record.folder.path, record.manifest["inputs"]
    if label is None:
        label = record.chosen or (record.labels[0] if len(record.labels) == 1 else None)
    if label not in record.labels:
        said = f"no file {label!r}" if label else "several files and none is its own choice"
        raise InputError(
            f"{folder} has {said}: write {folder}:LABEL with one of {', '.join(record.labels)}"
        )
    chunks = {str(c): str(sha) for c, sha in inputs["chunks"].items()}
    documents, ids = _texts(folder, tuple(chunks))
    path = folder / record.stage / "scores" / f"{record.labels.index(label)}.npz"
    tables = load_tables(path, str(record.manifest["key"]), label, documents)
    if tables is None or len(tables) != len(chunks):
        raise InputError(f"the scores in {path} are missing or damaged: run the workflow again")
    by_category = {table.category: table for table in tables}
    return RunScores(
        name=f"{folder}:{label}",
        target=record.target,
        model=_reference(record, inputs),
        chunks=chunks,
        engine={**inputs.get("engine", {}), **record.manifest.get("versions", {})},
        tables=by_category,
        ids={c: ids[c] for c in by_category if c in ids},
    )


def save_texts(folder: RunFolder, documents: Documents) -> Path:
    """Keep the names of the documents beside scores whose corpus lies elsewhere."""
    path = folder.file("report", "scores", TEXTS)
    text = json.dumps({category: list(names) for category, names in documents.items()})
    write_atomic(path, text.encode())
    return path


def _reference(record: RunRecord, inputs: Mapping[str, Any]) -> str:
    """The hash of the reference model; of older runs, from their damage stage."""
    if "model" in inputs:
        return str(inputs["model"])
    damage = record.folder.manifest("damage")
    return str(damage["inputs"].get("model", "")) if damage else ""


def _texts(
    folder: Path, categories: tuple[str, ...]
) -> tuple[Documents, dict[str, NDArray[np.int32]]]:
    """Document names, and the scored tokens, of each category."""
    kept = folder / "report" / "scores" / TEXTS
    try:
        if kept.is_file():
            names = json.loads(kept.read_text(encoding="utf-8"))
            return {c: tuple(names[c]) for c in categories}, {}
        corpora = load_corpus(folder / "corpus")
        chunks = {c: corpora[c].split("report") for c in categories}
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{folder} does not say which documents were scored, its corpus is missing or damaged:"
            " run it again"
        ) from None
    names = {c: document_ids(found) for c, found in chunks.items()}
    return names, {c: _ids(found) for c, found in chunks.items()}


def _ids(chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    found = [chunk.targets() for chunk in chunks if len(chunk.rows())]
    return np.concatenate([np.empty(0, np.int32), *found]).astype(np.int32)
