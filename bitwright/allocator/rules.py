"""The rules of allocator/names.toml: names and shares, tiny tensors, tensors without a measure."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright.content import find_content, read_content
from bitwright.engine.ggml_types import tensor_type
from bitwright.errors import InputError

Part = Annotated[float, Field(gt=0, le=1)]


def _known_type(name: str) -> str:
    try:
        return tensor_type(name).name
    except InputError as error:
        raise ValueError(str(error)) from None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shares(_Strict):
    """Least shares of the body's weights in the named type; ``whole``: names without a letter."""

    S: Part
    M: Part
    L: Part
    whole: Part


class Tiny(_Strict):
    """Float tensors of fewer weights get this type."""

    below_weights: Annotated[int, Field(ge=0)]
    type: Literal["F32", "F16", "BF16"]


class Rules(_Strict):
    """The whole file. ``unmeasured``: role → type, ``other`` for the roles not listed."""

    schema_version: Annotated[Literal[1], Field(alias="schema")]
    shares: Shares
    sizes: dict[str, tuple[Literal["S", "M", "L"], ...]]
    tiny: Tiny
    unmeasured: dict[str, str]

    @field_validator("sizes")
    @classmethod
    def _sizes(
        cls, value: dict[str, tuple[Literal["S", "M", "L"], ...]]
    ) -> dict[str, tuple[Literal["S", "M", "L"], ...]]:
        return {_known_type(name): letters for name, letters in value.items()}

    @field_validator("unmeasured")
    @classmethod
    def _unmeasured(cls, value: dict[str, str]) -> dict[str, str]:
        if "other" not in value:
            raise ValueError("give the type of all other roles as 'other'")
        return {role: _known_type(name) for role, name in value.items()}


def load_rules() -> Rules:
    """The rules, checked.

    Raises:
        ConfigError: the file is not TOML, or holds an unknown key, type or share.
    """
    path = find_content("allocator", "names")
    return read_content(path, Rules)
