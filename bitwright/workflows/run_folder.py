"""A run is a folder: one manifest per stage, keyed by what can change its result.

A stage whose manifest carries the same key, and whose files are all there with the recorded
sizes, is not computed again. Everything is written to a temporary name, synced and renamed, so
that a kill at any moment leaves either the old file or the new one.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bitwright import __version__
from bitwright.corpora.records import Chunk
from bitwright.engine.atomic import sweep_leftovers, write_atomic
from bitwright.errors import StorageError

SCHEMA_VERSION = 1  # 2026-11-29: first layout of the run folder
METRICS_VERSION = 1  # 2026-11-29: KLD on scored spans, bootstrap over documents

SUBFOLDERS = (
    *("cache", "corpus", "imatrix", "mix", "damage", "select", "report"),
    *("sweep", "calibration", "final", "explain", "joint", "ladders", "layouts"),
    *("items", "items-1", "items-2"),
)


def to_json(value: object) -> str:
    """Strict JSON (no NaN), sorted keys, for manifests and keys."""
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, default=str)


def key_of(*parts: object) -> str:
    """sha256 of the parts as strict, sorted JSON."""
    return hashlib.sha256(to_json(parts).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions that a result may depend on; stored beside it, and in no key but the engine's."""
    return {
        "bitwright": __version__,
        "llama-cpp-python": version("llama-cpp-python"),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "python": platform.python_version(),
    }


def _lock(path: Path) -> int | None:
    """A handle that holds the folder itself for this process, so that no file is left in it.

    None where the system has no such locks; a file system without them guards nothing either.

    Raises:
        StorageError: another run holds it.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise StorageError(
            f"{path} is in use by another run: wait for it, or give another folder with --out"
        ) from None
    except OSError:
        pass
    return handle


class NotDone(Exception):
    """What a read-only run folder says of a stage that it does not hold."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run; a read-only one (--dry-run) makes nothing and computes nothing."""

    path: Path
    read_only: bool = False

    @staticmethod
    def open(path: Path) -> "RunFolder":
        """Make the folder if need be.

        Raises:
            StorageError: it cannot be made or written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise StorageError(f"{path} is a file: give a folder for the run") from None
        except OSError as error:
            raise StorageError(f"cannot make the run folder {path}: {error.strerror}") from None
        if not os.access(path, os.W_OK):
            raise StorageError(f"the run folder {path} cannot be written: check its permissions")
        return RunFolder(path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The folder for one run alone; the lock goes with the process, however it ends.

        Raises:
            StorageError: another run is using it.
        """
        handle = _lock(self.path)
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)

    def sweep(self) -> None:
        """Remove temporary files that a killed run left; only in subfolders that a run makes."""
        for name in SUBFOLDERS:
            sweep_leftovers(self.path / name)

    def file(self, *names: str) -> Path:
        """A path inside the run; its folder is made."""
        path = self.path.joinpath(*names)
        if not self.read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def check_writable(self) -> None:
        """Raise NotDone if nothing may be computed here; before a stage loads the model."""
        if self.read_only:
            raise NotDone

    def manifest(self, stage: str) -> dict[str, Any] | None:
        """The stage's manifest, or None where there is none that can be read."""
        try:
            loaded = json.loads((self.path / f"{stage}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None

    def is_done(self, stage: str, key: str) -> bool:
        """Whether the stage ended with this key and its files are as it left them."""
        manifest = self.manifest(stage)
        if manifest is None or manifest.get("key") != key:
            return False
        files: Mapping[str, int] = manifest.get("files", {})
        return all(
            (self.path / name).is_file() and (self.path / name).stat().st_size == size
            for name, size in files.items()
        )

    def stage(
        self,
        name: str,
        key: str,
        compute: Callable[[], tuple[dict[str, Any], list[Path]]],
        *,
        inputs: Mapping[str, object],
    ) -> dict[str, Any]:
        """The stage's result: from its manifest, or computed and recorded.

        ``compute`` returns (JSON result, files it wrote inside the run).
        """
        if self.is_done(name, key):
            manifest = self.manifest(name)
            assert manifest is not None  # is_done has just read it
            result: dict[str, Any] = manifest["result"]
            return result
        self.check_writable()
        started = time.monotonic()
        result, files = compute()
        record = {
            "schema": SCHEMA_VERSION,
            "stage": name,
            "key": key,
            "inputs": dict(inputs),
            "versions": versions(),
            "elapsed_s": round(time.monotonic() - started, 3),
            "files": {str(f.relative_to(self.path)): f.stat().st_size for f in files},
            "result": result,
        }
        text = json.dumps(record, indent=1, allow_nan=False)
        write_atomic(self.file(f"{name}.json"), text.encode())
        return result


def chunks_sha256(chunks: Iterable[Chunk]) -> str:
    """What is computed on: tokens, sequence borders, and which rows are scored."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(np.asarray([len(chunk.tokens), *chunk.starts], np.int64).tobytes())
        digest.update(np.ascontiguousarray(chunk.tokens, np.int32).tobytes())
        digest.update(np.ascontiguousarray(chunk.kinds, np.uint8).tobytes())
    return digest.hexdigest()
