"""Type ladders: the sets of tensor types that the solver may choose from."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright.content import find_content, read_content
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.packing import PACKABLE
from bitwright.errors import ConfigError, InputError


class _Ladder(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str = ""
    types: Annotated[tuple[str, ...], Field(min_length=1)]

    @field_validator("types")
    @classmethod
    def _known_types(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return ordered_types(names)


class _LadderFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Annotated[Literal[1], Field(alias="schema")]
    ladders: Annotated[dict[str, _Ladder], Field(min_length=1)]


def ordered_types(names: tuple[str, ...]) -> tuple[str, ...]:
    """Canonical names, each once, from few to many bits.

    Raises:
        ValueError: a name is no type, or one that llama.cpp cannot pack.
    """
    try:
        kinds = {tensor_type(name).name: tensor_type(name) for name in names}
    except InputError as error:
        raise ValueError(str(error)) from None
    unpackable = sorted(set(kinds) - PACKABLE)
    if unpackable:
        raise ValueError(
            f"llama.cpp cannot pack {unpackable[0]}: use types among {', '.join(sorted(PACKABLE))}"
        )
    return tuple(sorted(kinds, key=lambda name: (kinds[name].bpw, name)))


def load_ladders() -> Mapping[str, tuple[str, ...]]:
    """Ladder name → types, from few to many bits, as allocator/ladders.toml has them.

    Raises:
        ConfigError: the file is not TOML, or holds an unknown key or type.
    """
    path = find_content("allocator", "ladders")
    found = read_content(path, _LadderFile)
    return MappingProxyType({name: one.types for name, one in found.ladders.items()})


def ladder(name: str) -> tuple[str, ...]:
    """The types of a ladder, from few to many bits.

    Raises:
        ConfigError: no such ladder; the message lists the known ones.
    """
    ladders = load_ladders()
    if name not in ladders:
        raise ConfigError(
            f"{name!r} is not a ladder: use one of {', '.join(ladders)}, or add it to"
            " allocator/ladders.toml"
        )
    return ladders[name]
