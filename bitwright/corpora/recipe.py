"""Recipes: one TOML file says which text makes up a category, and how it is split."""

import hashlib
import json
import math
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bitwright.content import find_content, in_toml_words
from bitwright.corpora.records import SPLITS
from bitwright.errors import ConfigError, InputError

Category = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Source(_Strict):
    """Keys that every source has.

    weight: share of the category's tokens, relative to the other sources of the recipe.
    max_documents: at most so many are read, in the source's own order.
    """

    weight: float = Field(default=1.0, gt=0)
    max_documents: int = Field(default=20_000, gt=0)


class BuiltinSource(_Source):
    """Text that comes with Bitwright or with Python; never the held-out side."""

    kind: Literal["builtin"]
    name: Literal["chat", "math", "tool_calling", "stdlib_code", "prose"]


class FolderSource(_Source):
    """A folder of source files, such as the user's own repository."""

    kind: Literal["folder"]
    path: str
    include: tuple[str, ...] = ("*.py",)
    exclude: tuple[str, ...] = ()
    gitignore: bool = True
    max_file_kb: int = Field(default=256, gt=0)
    min_chars: int = Field(default=200, ge=0)


class Fields(_Strict):
    """Names of the keys of a row, where they differ from Bitwright's.

    role and content are the keys inside a message; roles maps role names, such as human = "user".
    """

    messages: str = "messages"
    text: str = "text"
    query: str = "query"
    tools: str = "tools"
    calls: str = "calls"
    role: str = "role"
    content: str = "content"
    roles: dict[str, str] = Field(default_factory=dict)


class _Rows(_Source):
    """Keys of the sources made of rows.

    format 'auto' takes messages, query/calls or text, whichever the row has, in this order.
    parse_special: special tokens written out in a ``text`` become those tokens.
    """

    format: Literal["auto", "messages", "calls", "text"] = "auto"
    fields: Fields = Fields()
    parse_special: bool = True


class JsonlSource(_Rows):
    """A .jsonl or .jsonl.gz file, or a glob of them (sorted by name)."""

    kind: Literal["jsonl"]
    path: str
    max_expansion: float = Field(default=100.0, gt=1)


class TextSource(_Source):
    """A UTF-8 text file, cut at blank lines or at a separator.

    Pieces are joined until a document has min_chars characters; 0 keeps each piece.
    """

    kind: Literal["text"]
    path: str
    separator: str | None = None
    min_chars: int = Field(default=1000, ge=0)
    max_expansion: float = Field(default=100.0, gt=1)
    parse_special: bool = True


class HubSource(_Rows):
    """A Hugging Face data set, streamed; every part of the address must be given.

    config may be "default"; revision is a commit or tag; an id that starts with "." is a local
    folder. Loading scripts are never run.
    """

    kind: Literal["hub"]
    id: str
    config: str
    split: str
    revision: str
    max_documents: int = Field(default=4_000, gt=0)


Source = Annotated[
    BuiltinSource | FolderSource | JsonlSource | TextSource | HubSource,
    Field(discriminator="kind"),
]


class Shares(_Strict):
    """The share of the documents that each split gets, by hash of their content."""

    calibrate: float = Field(default=0.4, ge=0)
    probe: float = Field(default=0.2, ge=0)
    select: float = Field(default=0.2, ge=0)
    report: float = Field(default=0.2, ge=0)

    @model_validator(mode="after")
    def _sum(self) -> "Shares":
        total = sum(self.as_dict().values())
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"the four shares add up to {total:g}, they must add up to 1")
        return self

    def as_dict(self) -> dict[str, float]:
        """Split → share, in the order of SPLITS."""
        return {name: getattr(self, name) for name in SPLITS}


class ChunkCounts(_Strict):
    """How much text each split takes, in chunks of n_ctx tokens."""

    calibrate: int = Field(default=24, ge=0)
    probe: int = Field(default=4, ge=0)
    select: int = Field(default=6, ge=0)
    report: int = Field(default=10, ge=0)

    def as_dict(self) -> dict[str, int]:
        """Split → chunks, in the order of SPLITS."""
        return {name: getattr(self, name) for name in SPLITS}


class Recipe(_Strict):
    """A category's recipe; ``folder`` is where its paths start (not part of the hash).

    context: tokens at the start of each window of plain text that are not scored.
    max_windows: windows (of n_ctx tokens) taken from one long document.
    leak_share: a document leaks if more than this share of its 13-grams is in another split.
    """

    title: str = ""
    category: Category
    context: int = Field(default=32, ge=0)
    max_windows: int = Field(default=2, gt=0)
    max_sequences: int = Field(default=64, gt=0)
    on_leak: Literal["refuse", "drop"] = "refuse"
    leak_share: float = Field(default=0.2, ge=0, le=1)
    splits: Shares = Shares()
    chunks: ChunkCounts = ChunkCounts()
    sources: tuple[Source, ...] = Field(min_length=1)
    folder: Path = Field(default=Path(), exclude=True)

    def sha256(self) -> str:
        """Hash of everything the recipe says; the same in any folder."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _sentence(error: ValidationError) -> str:
    parts = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "recipe"
        parts.append(f"{where}: {in_toml_words(problem)}")
    return "; ".join(parts)


def parse_recipe(text: str, *, name: str, folder: Path) -> Recipe:
    """The recipe of a TOML text; ``folder`` is where relative paths start.

    Raises:
        ConfigError: not TOML, an unknown key, or a value out of range; all of them are named.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {name} is not valid TOML ({error}): correct it") from None
    if "folder" in data:
        raise ConfigError(f"recipe {name}: folder is not a key; paths start at the recipe's folder")
    try:
        return Recipe.model_validate({**data, "folder": folder})
    except ValidationError as error:
        raise ConfigError(
            f"recipe {name} cannot be used: {_sentence(error)}; see corpora/README.md for the keys"
        ) from None


def load_recipe(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name (``code``), or a recipe file by path.

    Raises:
        ConfigError: no such recipe, or something in it is wrong.
        InputError: the file is not UTF-8.
    """
    path = find_content("corpora", name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name} is not UTF-8 (byte {error.start}): save it as UTF-8"
        ) from None
    return parse_recipe(text, name=path.name, folder=path.parent)
