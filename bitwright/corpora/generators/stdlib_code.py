"""Text that every Python brings along: the standard library's sources and pydoc's topics."""

import os
import sysconfig
import zlib
from pathlib import Path

HELDOUT_FILES = 20  # 1 file (or topic) in 20 is reserved for evaluation
MAX_BYTES = 150_000
MIN_CHARS = 400
MIN_TOPIC_CHARS = 300

# Files under a licence of their own are left out; by wording, so a best effort.
_OTHER_LICENCE = (
    *("permission is hereby", "permission to use", "redistribution and use"),
    *("gnu ", "apache license", "mit license"),
)
_SKIPPED_FOLDERS = frozenset(
    {
        *("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"),
        *("ensurepip", "pydoc_data", "encodings", "distutils", "__phello__"),
    }
)
_TO_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u2026": "...",
        "\u2022": "*",
        "\u2192": "->",
        "\xab": "<<",
        "\xbb": ">>",
        "\xa0": " ",
    }
)


def _side_is_heldout(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELDOUT_FILES == 0


def code_paths(heldout: bool = False) -> list[str]:
    """Paths of one side's candidates, relative to the standard library's folder, sorted."""
    root = stdlib_folder()
    paths = []
    for folder, subfolders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        # Installed packages may lie inside; walking them would take seconds.
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        paths += [here / name for name in files if name.endswith(".py")]
    relative = [path.as_posix() for path in sorted(paths)]
    return [path for path in relative if _side_is_heldout(path) == heldout]


def stdlib_folder() -> Path:
    """The running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def code_text(relative: str) -> str | None:
    """The source, or None if it is too large or short, not ASCII, or licensed on its own."""
    path = stdlib_folder() / relative
    if path.stat().st_size > MAX_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="ignore")
    if len(text) < MIN_CHARS or not text.isascii():
        return None
    lower = text.lower()
    return None if any(wording in lower for wording in _OTHER_LICENCE) else text


def code_files(heldout: bool = False) -> list[tuple[str, str]]:
    """All (relative path, source) of one side."""
    texts = ((path, code_text(path)) for path in code_paths(heldout))
    return [(path, text) for path, text in texts if text is not None]


def prose_topics(heldout: bool = False) -> list[tuple[str, str]]:
    """All (topic, text) of pydoc's topics of one side: reference prose with some code."""
    from pydoc_data.topics import topics  # 0.7 MB of text: only when it is used

    out = []
    for key, raw in sorted(topics.items()):
        text = raw.translate(_TO_ASCII).strip() + "\n"
        if len(text) > MIN_TOPIC_CHARS and text.isascii() and _side_is_heldout(key) == heldout:
            out.append((key, text))
    return out
