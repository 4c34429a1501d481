"""What was measured on each token: one record per (file, category), and its file on disk."""

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import InputError, StorageError

# One entry per array of a token table: its name and the type it is stored in.
COLUMNS: Mapping[str, type[np.generic]] = {
    "kld": np.float64,
    "same_top1": np.bool_,
    "nll": np.float64,
    "nll_ref": np.float64,
    "kind": np.uint8,
    "document": np.int32,
}


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Per-token results of one file on one category; all arrays have shape (n_tokens,).

    ``kld``, ``nll`` and ``nll_ref`` are nats. ``kind`` is the span code of the predicted token,
    ``document`` indexes into ``documents``, the category's whole list in order of appearance.
    """

    label: str
    category: str
    kld: NDArray[np.float64]
    same_top1: NDArray[np.bool_]
    nll: NDArray[np.float64]
    nll_ref: NDArray[np.float64]
    kind: NDArray[np.uint8]
    document: NDArray[np.int32]
    documents: tuple[str, ...]

    @property
    def n_tokens(self) -> int:
        """How many tokens were predicted."""
        return int(self.kld.size)

    def select(self, kinds: Sequence[int]) -> "TokenTable":
        """Only the tokens whose span code is one of ``kinds``."""
        keep = np.isin(self.kind, np.asarray(kinds, dtype=np.uint8))
        arrays: dict[str, Any] = {name: getattr(self, name)[keep] for name in COLUMNS}
        return replace(self, **arrays)


def empty_table(label: str, category: str, documents: tuple[str, ...]) -> TokenTable:
    """A table of zero tokens: what a category without text has."""
    arrays: dict[str, Any] = {name: np.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}
    return TokenTable(label=label, category=category, documents=documents, **arrays)


def concatenate(parts: Sequence[TokenTable]) -> TokenTable:
    """The parts of one (label, category) after each other; they share one document list."""
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS
    }
    return replace(parts[0], **arrays)


def check_same_tokens(a: TokenTable, b: TokenTable) -> None:
    """Two tables can be paired only if they were measured on the same tokens.

    Raises:
        InputError: other category, documents, spans or reference.
    """
    same = (
        a.category == b.category
        and a.documents == b.documents
        and np.array_equal(a.document, b.document)
        and np.array_equal(a.kind, b.kind)
        and np.allclose(a.nll_ref, b.nll_ref, rtol=0.0, atol=1e-6)
    )
    if not same:
        raise InputError(
            f"{a.label} ({a.category}, {a.n_tokens} tokens) and {b.label} ({b.category}, "
            f"{b.n_tokens} tokens) were not scored on the same tokens against the same reference: "
            "score both in one evaluation"
        )


def save_tables(tables: Sequence[TokenTable], path: Path, key: str) -> None:
    """Write the tables of one file on one block of chunks; temp file, fsync, rename.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    arrays: dict[str, Any] = {"key": np.array(key)}
    for table in tables:
        for name in COLUMNS:
            arrays[f"{table.category}/{name}"] = getattr(table, name)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(
            f"the scores cannot be written to {path.parent}: {error.strerror}; "
            "free space there or choose another run folder"
        ) from None


def load_tables(
    path: Path, key: str, label: str, documents: Mapping[str, tuple[str, ...]]
) -> list[TokenTable] | None:
    """Read the tables back; None if the file is missing, unreadable or has another ``key``.

    ``documents`` lists the categories wanted and the document ids of each.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            if str(arrays["key"]) != key:
                return None
            return [
                _table_from(arrays, label, category, names)
                for category, names in documents.items()
                if f"{category}/kld" in arrays
            ]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        # A result that cannot be read is measured again: nothing is lost but time.
        return None


def _table_from(
    arrays: Mapping[str, NDArray[Any]], label: str, category: str, documents: tuple[str, ...]
) -> TokenTable:
    columns: dict[str, Any] = {
        name: arrays[f"{category}/{name}"].astype(dtype, copy=False)
        for name, dtype in COLUMNS.items()
    }
    return TokenTable(label=label, category=category, documents=documents, **columns)
