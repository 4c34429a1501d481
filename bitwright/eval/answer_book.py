"""Answers and scores of one model file as they come, so that a killed run asks nothing twice.

One SQLite file holds them for one `key`: whatever decides them beside the question itself (the
file, the engine). A book of another key is begun anew. It is a working file, gone once the results
are kept (`answers_until_kept`).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bitwright.engine.database import FileKind, database_errors, open_database
from bitwright.errors import StorageError
from bitwright.eval.generation import Finish, Generation, Prompt
from bitwright.eval.score import Pair, Score

BOOK_VERSION = 1  # 2026-11-30: answers by prompt, scores by context and continuation
NAME = ".asked.sqlite"
FINISHES: tuple[Finish, ...] = ("end", "stop", "length", "context", "too_long")

SCHEMA = """
CREATE TABLE IF NOT EXISTS book (key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    ask BLOB PRIMARY KEY, text TEXT NOT NULL, tokens BLOB NOT NULL, finish TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS scores (
    ask BLOB PRIMARY KEY, logprob REAL NOT NULL, greedy INTEGER NOT NULL, per_token BLOB NOT NULL,
    too_long INTEGER NOT NULL
) WITHOUT ROWID;
"""
# After a power cut, what is lost is asked again.
KIND = FileKind("book of answers", "ask", BOOK_VERSION, SCHEMA, synchronous="OFF")


class AnswerBook:
    """An open book; a context manager, used by the thread that opened it.

    Raises:
        StorageError: the file is no book, is of another version, or cannot be written.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._db = open_database(path, KIND)
        try:
            with database_errors(path, KIND):
                self._begin(key)
        except BaseException:
            self._db.close()
            raise

    def answer(self, prompt: Prompt) -> Generation | None:
        """The answer to exactly this prompt, if it is known."""
        row = self._find("SELECT text, tokens, finish FROM answers WHERE ask = ?", _of(prompt))
        if row is None:
            return None
        text, tokens, finish = row
        if finish not in FINISHES:
            raise StorageError(f"{self.path} holds an answer that ended by {finish!r}: remove it")
        return Generation(text, tuple(np.frombuffer(tokens, "<i4").tolist()), finish)

    def keep_answer(self, prompt: Prompt, found: Generation) -> None:
        """Add an answer."""
        tokens = np.asarray(found.tokens, "<i4").tobytes()
        self._add(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)",
            (_of(prompt), found.text, tokens, found.finish),
        )

    def score(self, pair: Pair) -> Score | None:
        """The score of exactly this request, if it is known."""
        row = self._find(
            "SELECT logprob, greedy, per_token, too_long FROM scores WHERE ask = ?", _of_pair(pair)
        )
        if row is None:
            return None
        logprob, greedy, per_token, too_long = row
        return Score(logprob, bool(greedy), np.frombuffer(per_token, "<f8"), bool(too_long))

    def keep_score(self, pair: Pair, found: Score) -> None:
        """Add a score."""
        per_token = np.asarray(found.per_token, "<f8").tobytes()
        self._add(
            "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?)",
            (_of_pair(pair), found.logprob, int(found.greedy), per_token, int(found.too_long)),
        )

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._db.close()

    def remove(self) -> None:
        """Close it and take its files away."""
        self.close()
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def _begin(self, key: str) -> None:
        with self._db:
            if self._db.execute("SELECT key FROM book").fetchall() != [(key,)]:
                for table in ("book", "answers", "scores"):
                    self._db.execute(f"DELETE FROM {table}")
                self._db.execute("INSERT INTO book VALUES (?)", (key,))

    def _find(self, query: str, ask: bytes) -> tuple[Any, ...] | None:
        with database_errors(self.path, KIND):
            row: tuple[Any, ...] | None = self._db.execute(query, (ask,)).fetchone()
        return row

    def _add(self, query: str, row: tuple[object, ...]) -> None:
        with database_errors(self.path, KIND), self._db:
            self._db.execute(query, row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _of(prompt: Prompt) -> bytes:
    """All that decides an answer."""
    how = (prompt.max_tokens, prompt.stops, prompt.sampling, prompt.special)
    return hashlib.sha256(
        np.asarray(prompt.tokens, "<i4").tobytes() + repr(how).encode("utf-8")
    ).digest()


def _of_pair(pair: Pair) -> bytes:
    """All that decides a score."""
    digest = hashlib.sha256(len(pair[0]).to_bytes(8, "little"))
    for tokens in pair:
        digest.update(np.asarray(tokens, "<i4").tobytes())
    return digest.digest()


@contextmanager
def answers_until_kept(folder: Path, key: str) -> Iterator[AnswerBook]:
    """A book in a folder for results; removed at the end of the block, unless that is an error."""
    with AnswerBook(folder / NAME, key) as book:
        yield book
        book.remove()
