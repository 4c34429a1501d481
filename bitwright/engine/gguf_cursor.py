"""Bounded reading of untrusted little-endian bytes.

Nothing is allocated, and no loop is entered, before the number that asks for it has been
compared with the bytes that are left.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path

from bitwright.errors import InputError

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Cursor:
    """A position in a buffer that refuses to pass ``end``."""

    __slots__ = ("buffer", "end", "name", "pos")

    def __init__(self, buffer: mmap | bytes, name: str, end: int) -> None:
        self.buffer = buffer
        self.name = name
        self.end = end
        self.pos = 0

    @property
    def left(self) -> int:
        """Bytes that may still be read."""
        return self.end - self.pos

    def need(self, size_bytes: int, what: str) -> None:
        """Refuse unless that many bytes are left."""
        if size_bytes > self.left:
            raise InputError(
                f"{self.name}: {what} needs {size_bytes} bytes at byte {self.pos},"
                f" but only {self.left} are left: the file is cut short or damaged,"
                " get it again"
            )

    def need_items(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that cannot fit, from the least size one item can have."""
        if count * least_bytes > self.left:
            raise InputError(
                f"{self.name}: it announces {count} {what}, which need at least"
                f" {count * least_bytes} bytes, but only {self.left} are left:"
                " the file is cut short or damaged, get it again"
            )

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        self.need(4, what)
        value: int = U32.unpack_from(self.buffer, self.pos)[0]
        self.pos += 4
        return value

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        self.need(8, what)
        value: int = U64.unpack_from(self.buffer, self.pos)[0]
        self.pos += 8
        return value

    def take(self, size_bytes: int, what: str) -> bytes:
        """A copy of the next bytes."""
        self.need(size_bytes, what)
        taken = self.buffer[self.pos : self.pos + size_bytes]
        self.pos += size_bytes
        return taken

    def skip(self, size_bytes: int, what: str) -> None:
        """Pass over bytes."""
        self.need(size_bytes, what)
        self.pos += size_bytes

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over ``count`` strings, each a 64-bit length and its bytes."""
        self.need_items(count, 8, f"strings in {what}")
        length_of, buffer, pos, last = U64.unpack_from, self.buffer, self.pos, self.end - 8
        for _ in range(count):
            if pos > last:
                break
            pos += 8 + length_of(buffer, pos)[0]
        else:
            if pos <= self.end:
                self.pos = pos
                return
        raise InputError(
            f"{self.name}: the strings of {what} run past the end: the file is cut short or"
            " damaged, get it again"
        )


@contextmanager
def mapped(path: Path) -> Iterator[mmap | bytes]:
    """The bytes of a file, paged in as they are read.

    Raises:
        InputError: missing, not a plain file, or not readable.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder: name the file in it")
        if not path.exists():
            raise InputError(f"{path} does not exist: check the path")
        if not path.is_file():
            raise InputError(f"{path} is not a plain file: copy its contents to one first")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                yield b""
                return
            with mmap(file.fileno(), 0, access=ACCESS_READ) as view:
                yield view
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
