"""The divergence suite: which tokens count in which category, and how they are compared."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright.content import find_content, read_content
from bitwright.corpora.records import KIND_NONE, SPAN_KINDS

SpanList = Annotated[tuple[str, ...], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StatisticsSettings(_Strict):
    """Bootstrap over documents: how often, how sure, from which seed."""

    resamples: Annotated[int, Field(ge=200, le=1_000_000)] = 4000
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    seed: Annotated[int, Field(ge=0)] = 0


class CategorySpans(_Strict):
    """Kinds that make a category's main numbers, and further rows by name."""

    spans: SpanList
    details: dict[str, SpanList] = {}

    @field_validator("spans")
    @classmethod
    def _known_spans(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        return _check_kinds(kinds)

    @field_validator("details")
    @classmethod
    def _known_details(cls, details: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {name: _check_kinds(kinds) for name, kinds in details.items()}

    def codes(self) -> tuple[int, ...]:
        """Span codes of the main numbers."""
        return kind_codes(self.spans)


class DivergenceSuite(_Strict):
    """A whole eval/*.toml file."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    description: str = ""
    statistics: StatisticsSettings = StatisticsSettings()
    default: CategorySpans
    categories: dict[str, CategorySpans] = {}

    def category(self, name: str) -> CategorySpans:
        """The category's own spans, else the default's."""
        return self.categories.get(name, self.default)


def load_suite(name: str | Path = "divergence") -> DivergenceSuite:
    """A built-in suite by name, or a TOML file.

    Raises:
        ConfigError: no such suite, not TOML, or a key or value that is not allowed.
    """
    path = find_content("eval", name)
    return read_content(path, DivergenceSuite)


def kind_codes(kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Span codes of the named kinds."""
    return tuple(SPAN_KINDS.index(kind) for kind in kinds)


def _check_kinds(kinds: tuple[str, ...]) -> tuple[str, ...]:
    allowed = tuple(k for code, k in enumerate(SPAN_KINDS) if code != KIND_NONE)
    for kind in kinds:
        if kind not in allowed:
            raise ValueError(f"{kind!r} is not a kind of span: one of {', '.join(allowed)}")
    return kinds
