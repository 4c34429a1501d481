"""Finds the content folders (recipes, workflows, suites, ladders) that users read and edit.

In a wheel they lie in ``bitwright/_content``; in a checkout, beside the package.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from bitwright.errors import ConfigError

FOLDERS = ("corpora", "workflows", "eval", "allocator")
M = TypeVar("M", bound=BaseModel)

TOML_WORDS = {"valid tuple": "list", "valid dictionary": "table"}
MOST_SHOWN = 60  # characters of a value in a message


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


def read_content(path: Path, model: type[M]) -> M:
    """A TOML file, checked.

    Raises:
        ConfigError: it is not TOML, or holds a key or value that ``model`` does not allow.
    """
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name} is not valid TOML: it is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first complaint of pydantic as one sentence: where, what, and what to do."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}: remove it, or check its spelling"
    if problem["type"] == "missing":
        return f"the key {where!r} is missing: add it"
    message = in_toml_words(problem)
    return f"{where}: {message}" if where else message


def in_toml_words(problem: Mapping[str, Any]) -> str:
    """Pydantic's message in the words of a TOML file, with what was given where that is short."""
    message, given = str(problem["msg"]), problem.get("input")
    if message.startswith("Value error, "):  # our own, which say what was given
        return message.removeprefix("Value error, ")
    for python, toml in TOML_WORDS.items():
        message = message.replace(python, toml)
    plain = isinstance(given, bool | int | float | str)
    return f"{message}, not {given!r}" if plain and len(repr(given)) <= MOST_SHOWN else message
