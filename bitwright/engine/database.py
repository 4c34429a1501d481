"""SQLite files that a kill leaves whole: opened, checked, their refusals in one sentence."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitwright.engine.atomic import check_folder
from bitwright.errors import StorageError

WAIT_S = 30.0  # for another process that is writing


@dataclass(frozen=True, slots=True)
class FileKind:
    """``what`` a file is and what is done ``again`` once it is removed, for messages.

    ``synchronous``: NORMAL survives a power cut, OFF only a kill of the process.
    """

    what: str
    again: str
    version: int
    schema: str
    synchronous: Literal["NORMAL", "OFF"] = "NORMAL"


def open_database(path: Path, kind: FileKind) -> sqlite3.Connection:
    """The file, made if need be, with its tables.

    Raises:
        StorageError: it is no such file, is of another version, or cannot be written.
    """
    check_folder(path)
    with database_errors(path, kind):
        db = sqlite3.connect(path, timeout=WAIT_S)
    try:
        with database_errors(path, kind):
            _prepare(db, path, kind)
    except BaseException:
        db.close()
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path, kind: FileKind) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, kind.version):
        raise StorageError(
            f"{path} is a {kind.what} of version {version}, this is version {kind.version}: "
            f"remove it to {kind.again} again"
        )
    # A write-ahead log survives a kill at any moment and spares a sync per row.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA synchronous = {kind.synchronous}")
    db.executescript(kind.schema)
    with db:
        db.execute(f"PRAGMA user_version = {kind.version}")


@contextmanager
def database_errors(path: Path, kind: FileKind) -> Iterator[None]:
    """Turn SQLite's refusals into one sentence."""
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(
            f"the {kind.what} {path} cannot be used ({error}): make room or check its permissions, "
            f"or remove it to {kind.again} again"
        ) from error
