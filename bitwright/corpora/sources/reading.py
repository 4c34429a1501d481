"""Careful reading of text files that a user points to: bounded, UTF-8 only, nothing executed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from bitwright.errors import ConfigError, InputError

MAX_LINE_BYTES = 16 << 20
MAX_TEXT_BYTES = 512 << 20  # a text source is held in memory
ALWAYS_ALLOWED_BYTES = 8 << 20  # short repetitive text may well shrink by more than the limit
GZIP_MAGIC = b"\x1f\x8b"

_REFUSED_SUFFIXES = frozenset(
    {
        *(".pkl", ".pickle", ".pt", ".pth", ".joblib", ".npy", ".npz", ".py"),
        *(".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar"),
    }
)
_REFUSED_STARTS = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
}


def resolve(path: str, folder: Path) -> Path:
    """A recipe's path: relative ones start at the recipe's folder, ``~`` is the home folder."""
    return folder / Path(path).expanduser()


def existing_file(path: str, folder: Path) -> Path:
    """The file, checked to be there and not to be an archive, a pickle or a script.

    Raises:
        ConfigError: no such file.
        InputError: a kind of file that is never opened.
    """
    full = resolve(path, folder)
    if not full.is_file():
        raise ConfigError(f"{path} is not a file; paths in a recipe start at the recipe's folder")
    _refuse_unsafe(full)
    return full


def _refuse_unsafe(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    for magic, what in _REFUSED_STARTS.items():
        if start.startswith(magic):
            raise InputError(
                f"{path.name} is {what}: corpora are read from plain or gzipped text, .jsonl or "
                ".parquet only; unpack or convert it yourself first"
            )
    if path.suffix.lower() in _REFUSED_SUFFIXES:
        raise InputError(
            f"{path.name}: files of type {path.suffix} are not read as a corpus, since they may "
            "run code or unpack elsewhere; give .txt, .jsonl, .parquet or .gz"
        )


class _Bounded(io.RawIOBase):
    """A decompressed stream that stops at a limit instead of filling the memory."""

    def __init__(self, inner: BinaryIO, limit_bytes: int, name: str) -> None:
        self._inner = inner
        self._left = limit_bytes
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{self._name} is a damaged gzip file ({error}): get it again"
            ) from None
        self._left -= len(data)
        if self._left < 0:
            raise InputError(
                f"{self._name} grows beyond its limit when it is unpacked: raise max_expansion in "
                "the recipe if it really is text"
            )
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def open_bytes(path: Path, max_expansion: float) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked if it is gzip (decided by content, not by suffix)."""
    with path.open("rb") as file:
        if file.read(2) != GZIP_MAGIC:
            file.seek(0)
            yield file
            return
        file.seek(0)
        packed = path.stat().st_size
        limit = max(ALWAYS_ALLOWED_BYTES, int(packed * max_expansion))
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield io.BufferedReader(_Bounded(unpacked, limit, path.name))  # type: ignore[arg-type]


def decode(data: bytes, where: str, start: int = 0) -> str:
    """UTF-8 without NUL; ``start`` is the byte offset of ``data`` in its file.

    Raises:
        InputError: with the offset of the first bad byte.
    """
    if start == 0:
        data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8: byte {start + error.start} is 0x{data[error.start]:02x}; "
            "save it as UTF-8"
        ) from None
    if "\0" in text:
        offset = start + data.index(b"\0")
        raise InputError(
            f"{where} has a NUL byte at byte {offset}, so it is binary or UTF-16: "
            "give plain UTF-8 text"
        )
    return text


def read_text(path: Path, max_expansion: float) -> str:
    """A whole text file of bounded size, with \\n line ends."""
    with open_bytes(path, max_expansion) as file:
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise InputError(
            f"{path.name} has more than {MAX_TEXT_BYTES >> 20} MiB of text: split the file"
        )
    return decode(data, path.name).replace("\r\n", "\n")


def read_lines(path: Path, max_expansion: float) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of the non-blank lines of a file of any size."""
    offset = 0
    with open_bytes(path, max_expansion) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"{path.name} line {number} is longer than {MAX_LINE_BYTES >> 20} MiB: "
                    "one line must hold one document"
                )
            text = decode(line, path.name, offset).strip()
            offset += len(line)
            if text:
                yield number, text
