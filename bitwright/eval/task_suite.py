"""Task suites: one TOML file names tasks, where their items come from, and how many are used."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright.content import find_content, read_content
from bitwright.eval.tool_formats import FORMS

METHODS = (
    *("tool_exact", "tool_name", "tool_choice", "tool_nats"),
    *("number", "exact", "bits_per_byte", "code", "lm_eval"),
)
SOURCES = ("builtin", "bfcl", "hub", "lm_eval")


# How a user gives local files: to `evaluate`, and to a workflow.
BY_DATA = "by --data ([scores] data in a workflow)"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskSpec(_Strict):
    """One task of a suite.

    ``source`` is ``builtin:CATEGORY``, ``bfcl:CATEGORY``, ``hub:OWNER/NAME[/CONFIG]#SPLIT`` or
    ``lm_eval:TASK``. ``file`` names the JSON Lines file that holds the same rows when a data folder
    is given. ``shots``: solved examples before the question (lm-eval). ``limit`` 0 takes every
    item. ``half`` 1 or 2: one of two fixed halves of the items, which have none in common; 0: all.
    ``chance``: what guessing scores, where it is known. ``form``: how calls are read (a key of
    tool_formats.FORMS); empty: as the chat template or the answers have it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$")]
    category: str
    method: Literal[METHODS]  # type: ignore[valid-type]
    source: str
    file: str = ""
    limit: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 1001
    half: Literal[0, 1, 2] = 0
    shots: Annotated[int, Field(ge=0, le=64)] = 0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    stops: tuple[str, ...] = ()
    metric: str = ""
    chance: Annotated[float, Field(ge=0, le=1)] | None = None
    form: Literal["", *FORMS] = ""  # type: ignore[valid-type]

    @field_validator("source")
    @classmethod
    def _known_source(cls, source: str) -> str:
        kind, _, rest = source.partition(":")
        if kind not in SOURCES or not rest:
            raise ValueError(f"{source!r} is none of {', '.join(f'{s}:…' for s in SOURCES)}")
        return source

    def settings(self) -> dict[str, object]:
        """How the task is asked: what must be the same for two files that are compared."""
        return {
            "method": self.method,
            "shots": self.shots,
            "max_tokens": self.max_tokens,
            "stops": list(self.stops),
        }

    @property
    def source_parts(self) -> tuple[str, str]:
        """('builtin', 'math')."""
        kind, _, rest = self.source.partition(":")
        return kind, rest


class TaskSuite(_Strict):
    """A whole suite file."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    description: str = ""
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1)]

    @field_validator("tasks")
    @classmethod
    def _unique(cls, tasks: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
        names = [task.name for task in tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"task names stand twice: {', '.join(twice)}")
        return tasks


def load_task_suite(name: str | Path) -> TaskSuite:
    """A built-in suite by name, or a TOML file.

    Raises:
        ConfigError: no such suite, not TOML, or a key or value that is not allowed.
    """
    path = find_content("eval", name)
    return read_content(path, TaskSuite)
