"""Finds the content folders (recipes, workflows, suites, ladders) that users read and edit.

In a wheel they lie in ``bitwright/_content``; in a checkout, beside the package.
"""

from pathlib import Path

from bitwright.errors import ConfigError

FOLDERS = ("corpora", "workflows", "eval", "allocator")


def content_dir(folder: str) -> Path:
    """The shipped folder if there is one, else the checkout's.

    Raises:
        ConfigError: the installation lacks the folder.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "_content" / folder, package.parent / folder):
        if candidate.is_dir():
            return candidate
    raise ConfigError(
        f"the content folder {folder!r} is missing from this installation: reinstall bitwright"
    )


def find_content(folder: str, name: str | Path, suffix: str = ".toml") -> Path:
    """A user's file if ``name`` is a path to one, else the built-in ``folder/name.toml``.

    Raises:
        ConfigError: neither exists; the message lists the built-in names.
    """
    given = Path(name)
    if given.suffix == suffix and given.is_file():
        return given.resolve()
    built_in = content_dir(folder)
    path = built_in / f"{name}{suffix}"
    if given.name == str(name) and path.is_file():
        return path
    known = ", ".join(sorted(p.stem for p in built_in.glob(f"*{suffix}")))
    raise ConfigError(
        f"{name} is neither a {suffix} file nor a built-in of {folder}/: "
        f"give a path, or one of {known or 'none'}"
    )
