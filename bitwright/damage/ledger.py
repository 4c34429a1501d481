"""Every finished probe, in one SQLite file: what a killed run has measured is never repeated.

A row holds sums over the rows of one chunk that belong to a span, so that means and standard errors
over any choice of chunks and categories come from the ledger alone. A chunk is named by the hash of
its content; what else decides a value (model, imatrix, engine settings, metrics version) is the
`key`. Rows of other keys stay in the file and are never read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.engine.database import FileKind, database_errors, open_database

LEDGER_VERSION = 1  # 2026-11-29: sums per (tensor, type, chunk, category, span)
SPANS = ("scored", "overall")

SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS probes (
    key_id INTEGER NOT NULL REFERENCES keys (id),
    tensor TEXT NOT NULL, type TEXT NOT NULL,
    chunk TEXT NOT NULL, category TEXT NOT NULL, span TEXT NOT NULL,
    n INTEGER NOT NULL, sum_kld REAL NOT NULL, sum_kld2 REAL NOT NULL, flips INTEGER NOT NULL,
    PRIMARY KEY (key_id, chunk, category, tensor, type, span)
) WITHOUT ROWID;
"""
KIND = FileKind("ledger", "measure", LEDGER_VERSION, SCHEMA)


@dataclass(frozen=True, slots=True)
class Sums:
    """Over the n rows of one span of one chunk: Σ KLD (nats), Σ KLD², changed most likely tokens.

    No rows is n = 0, and means that nothing is known, not that nothing was lost.
    """

    n: int
    sum_kld: float
    sum_kld2: float
    flips: int


@dataclass(frozen=True, slots=True)
class ProbeId:
    """One tensor at one type on one chunk (its `chunk_id`)."""

    tensor: str
    type: str
    chunk: str
    category: str


def chunk_id(chunk: Chunk) -> str:
    """Hash of what a chunk is computed on: tokens, sequence borders, spans. 32 hex digits."""
    digest = hashlib.sha256()
    digest.update(np.asarray([len(chunk.tokens), *chunk.starts], "<i8").tobytes())
    digest.update(np.ascontiguousarray(chunk.tokens, "<i4").tobytes())
    digest.update(np.ascontiguousarray(chunk.kinds, np.uint8).tobytes())
    return digest.hexdigest()[:32]


class Ledger:
    """An open ledger, seen through one key. A context manager; used by the thread that opened it.

    Raises:
        StorageError: the file is no ledger, is of another version, or cannot be written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key
        self._db = open_database(path, KIND)
        try:
            with database_errors(path, KIND):
                self._key_id = self._number_of(key)
        except BaseException:
            self._db.close()
            raise

    def record(self, probe: ProbeId, spans: Mapping[str, Sums]) -> None:
        """Add a finished probe with all its spans, in one transaction."""
        name = (self._key_id, probe.chunk, probe.category, probe.tensor, probe.type)
        rows = [(*name, span, s.n, s.sum_kld, s.sum_kld2, s.flips) for span, s in spans.items()]
        with database_errors(self.path, KIND), self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO probes (key_id, chunk, category, tensor, type, span,"
                " n, sum_kld, sum_kld2, flips) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def probes(self, chunk: str, category: str) -> dict[tuple[str, str], dict[str, Sums]]:
        """The finished probes of a chunk: (tensor, type) → span → sums."""
        found: dict[tuple[str, str], dict[str, Sums]] = {}
        with database_errors(self.path, KIND):
            rows = self._db.execute(
                "SELECT tensor, type, span, n, sum_kld, sum_kld2, flips FROM probes"
                " WHERE key_id = ? AND chunk = ? AND category = ?",
                (self._key_id, chunk, category),
            ).fetchall()
        for tensor, type_name, span, n, sum_kld, sum_kld2, flips in rows:
            found.setdefault((tensor, type_name), {})[span] = Sums(n, sum_kld, sum_kld2, flips)
        return found

    def _number_of(self, key: str) -> int:
        with self._db:
            self._db.execute("INSERT OR IGNORE INTO keys (key) VALUES (?)", (key,))
        return int(self._db.execute("SELECT id FROM keys WHERE key = ?", (key,)).fetchone()[0])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
