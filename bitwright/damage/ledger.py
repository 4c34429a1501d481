"""Every finished probe, in one SQLite file: what a killed run has measured is never repeated.

A row holds sums over the rows of one chunk that belong to a span, so that means and standard errors
over any choice of chunks and categories come from the ledger alone. A chunk is named by the hash of
its content; what else decides a value (model, imatrix, engine settings, metrics version) is the
`key`. Rows of other keys stay in the file and are never read.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.engine.atomic import check_folder
from bitwright.errors import StorageError

LEDGER_VERSION = 1  # 2026-11-29: sums per (tensor, type, chunk, category, span)
SPANS = ("scored", "overall")
WAIT_S = 30.0  # for another process that is writing

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
        check_folder(path)
        with _storage_errors(path):
            self._db = sqlite3.connect(path, timeout=WAIT_S)
        try:
            with _storage_errors(path):
                self._key_id = _prepare(self._db, key, path)
        except BaseException:
            self._db.close()
            raise

    def record(self, probe: ProbeId, spans: Mapping[str, Sums]) -> None:
        """Add a finished probe with all its spans, in one transaction."""
        name = (self._key_id, probe.chunk, probe.category, probe.tensor, probe.type)
        rows = [(*name, span, s.n, s.sum_kld, s.sum_kld2, s.flips) for span, s in spans.items()]
        with _storage_errors(self.path), self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO probes (key_id, chunk, category, tensor, type, span,"
                " n, sum_kld, sum_kld2, flips) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

    def probes(self, chunk: str, category: str) -> dict[tuple[str, str], dict[str, Sums]]:
        """The finished probes of a chunk: (tensor, type) → span → sums."""
        found: dict[tuple[str, str], dict[str, Sums]] = {}
        with _storage_errors(self.path):
            rows = self._db.execute(
                "SELECT tensor, type, span, n, sum_kld, sum_kld2, flips FROM probes"
                " WHERE key_id = ? AND chunk = ? AND category = ?",
                (self._key_id, chunk, category),
            ).fetchall()
        for tensor, type_name, span, n, sum_kld, sum_kld2, flips in rows:
            found.setdefault((tensor, type_name), {})[span] = Sums(n, sum_kld, sum_kld2, flips)
        return found

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _prepare(db: sqlite3.Connection, key: str, path: Path) -> int:
    """Make or check the tables; returns the number of the key."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, LEDGER_VERSION):
        raise StorageError(
            f"{path} is a ledger of version {version}, this is version {LEDGER_VERSION}: "
            "remove it to measure again"
        )
    # A write-ahead log survives a kill at any moment and spares a sync per probe.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.executescript(SCHEMA)
    with db:
        db.execute(f"PRAGMA user_version = {LEDGER_VERSION}")
        db.execute("INSERT OR IGNORE INTO keys (key) VALUES (?)", (key,))
    return int(db.execute("SELECT id FROM keys WHERE key = ?", (key,)).fetchone()[0])


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(
            f"the ledger {path} cannot be used ({error}): make room or check its permissions, or "
            "remove it to measure again"
        ) from error
