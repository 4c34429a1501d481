"""Writing files so that the final name never holds half of one: temp → fsync → rename.

The temporary name `.NAME.PID.tmp` lies in the same folder; leftovers of processes that are gone
are removed by the next run for the same NAME.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.errors import StorageError

MARGIN_BYTES = 16 << 20  # left free on the disk
NAME_LIMIT = 200  # of the final name inside the temporary one, so that both fit in 255 bytes

_TEMPORARY = re.compile(r"\..+\.(\d+)\.tmp")


def temp_path(path: Path) -> Path:
    """This process's temporary file for ``path``."""
    return path.with_name(f".{_short(path)}.{os.getpid()}.tmp")


def _short(path: Path) -> str:
    return path.name.encode()[:NAME_LIMIT].decode(errors="ignore")


def remove_leftovers(path: Path) -> None:
    """Remove temporary files for ``path`` of processes that no longer run."""
    pattern = re.compile(rf"\.{re.escape(_short(path))}\.(\d+)\.tmp")
    for other in path.parent.iterdir():
        found = pattern.fullmatch(other.name)
        if found and not _runs(int(found.group(1))):
            other.unlink(missing_ok=True)


def sweep_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that no longer run, in and under a folder of our own."""
    for path in folder.rglob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found and not _runs(int(found.group(1))):
            path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def check_folder(path: Path) -> None:
    """Refuse a path whose folder is missing or not writable, or that is a folder itself.

    Raises:
        StorageError: with the reason.
    """
    with storage_errors(path):
        if path.is_dir():
            raise StorageError(f"{path} is a folder: give the name of a file")
        if not path.parent.is_dir():
            raise StorageError(f"cannot write {path}: the folder {path.parent} does not exist")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise StorageError(f"cannot write {path}: no permission in the folder {path.parent}")


def check_space(path: Path, size_bytes: int) -> None:
    """Refuse when the disk of ``path`` has not that many bytes free, and a margin.

    Raises:
        StorageError: with what is needed and what is there.
    """
    free = shutil.disk_usage(path.parent).free
    if size_bytes + MARGIN_BYTES > free:
        raise StorageError(
            f"cannot write {path}: it needs {size_bytes} bytes (and {MARGIN_BYTES} to spare), but"
            f" only {free} are free there: make room or choose another folder"
        )


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write ``path`` into one sentence."""
    try:
        yield
    except OSError as error:
        reason = {
            errno.ENOSPC: "the disk is full: make room or choose another folder",
            errno.EDQUOT: "your disk quota is used up: make room or choose another folder",
            errno.EACCES: "no permission there: choose another folder",
            errno.EPERM: "no permission there: choose another folder",
            errno.EROFS: "that disk is read-only: choose another folder",
            errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
            errno.EFBIG: "that disk cannot hold files of this size: choose another folder",
        }.get(error.errno or 0, f"{error.strerror}")
        raise StorageError(f"cannot write {path}: {reason}") from error


def publish(temp: Path, path: Path) -> None:
    """Give a finished temporary file its name, and make the rename last."""
    temp.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole small file.

    Raises:
        StorageError: it cannot be written there; an old file is then untouched.
    """
    check_folder(path)
    temp = temp_path(path)
    with storage_errors(path):
        remove_leftovers(path)
        try:
            with temp.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish(temp, path)
        finally:
            temp.unlink(missing_ok=True)
