"""JSONL, Parquet and plain text files as documents."""

import json
import re
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bitwright.corpora.recipe import JsonlSource, TextSource
from bitwright.corpora.records import Document
from bitwright.corpora.sources.reading import existing_file, read_lines, read_text, resolve
from bitwright.corpora.sources.rows import Row, row_document
from bitwright.errors import ConfigError, InputError

_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_GLOB = re.compile(r"[*?\[]")
PARQUET_BATCH = 256


def jsonl_documents(source: JsonlSource, category: str, folder: Path) -> Iterator[Document | None]:
    """The documents in file order, None for a row with nothing to score."""
    for path in _matching(source.path, folder):
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path, source)
        for number, row in rows:
            yield row_document(
                row,
                fields=source.fields,
                wanted=source.format,
                category=category,
                source=path.name,
                id=f"{path.name}:{number}",
            )


def _matching(pattern: str, folder: Path) -> list[Path]:
    full = resolve(pattern, folder)
    if full.exists() or not _GLOB.search(pattern):
        return [existing_file(pattern, folder)]
    found = sorted(glob(str(full), recursive=True))  # noqa: PTH207 - absolute patterns
    if not found:
        raise ConfigError(f"no file matches {pattern}; paths start at the recipe's folder")
    return [existing_file(name, folder) for name in found]


def _json_rows(path: Path, source: JsonlSource) -> Iterator[tuple[int, Row]]:
    for number, line in read_lines(path, source.max_expansion):
        where = f"{path.name} line {number}"
        try:
            row = json.loads(line)
        except RecursionError:
            raise InputError(f"{where} is nested too deeply to be a document") from None
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON ({error}): one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{where} is a JSON {type(row).__name__}: one object a line")
        yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path.name} cannot be read as Parquet after row {number} ({error}): get it again"
        ) from None


def text_documents(source: TextSource, category: str, folder: Path) -> Iterator[Document]:
    """The documents of a text file in order."""
    path = existing_file(source.path, folder)
    text = read_text(path, source.max_expansion)
    for number, piece in enumerate(split_text(text, source.separator, source.min_chars), start=1):
        yield Document(f"{path.name}:{number}", category, path.name, text=piece)


def split_text(text: str, separator: str | None, min_chars: int) -> Iterator[str]:
    """Pieces between blank lines (or separators), joined until they have ``min_chars``.

    A rest that is too short joins nothing and stands alone.
    """
    pieces = _BLANK_LINE.split(text) if separator is None else text.split(separator)
    glue = "\n\n" if separator is None else separator
    held: list[str] = []
    size = 0
    for piece in pieces:
        if not piece.strip():
            continue
        held.append(piece.strip("\n"))
        size += len(piece)
        if size >= min_chars:
            yield glue.join(held) + "\n"
            held, size = [], 0
    if held:
        yield glue.join(held) + "\n"
