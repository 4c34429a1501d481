"""The tensor types of ggml: names, ids, block sizes, and what replaces one that a row cannot take.

Names are those of the ``gguf`` package (``Q4_K``, ``IQ2_XXS``, ``BF16``). Sizes are in bytes,
row lengths in elements. The table is data of the llama.cpp build that this version is pinned to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import gguf

from bitwright.errors import InputError

FLOAT = ("F32", "F16", "BF16")
BLOCK32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
K = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
# Types whose search has no useful default weights: llama.cpp refuses them without an imatrix.
NEED_IMATRIX = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})

# Where the gguf package lacks a type of the pinned build, or sizes it otherwise than the library
# does: name → (id, block, bytes).
CORRECTIONS = {"Q8_1": (9, 32, 36), "Q2_0": (42, 64, 18)}

# What llama.cpp takes instead when the row length is no multiple of the block
# (tensor_type_fallback in src/llama-quant.cpp); F16 when that does not fit either.
FALLBACK = {
    **dict.fromkeys(("Q2_K", "Q3_K", "Q2_0", "TQ1_0", "TQ2_0"), "Q4_0"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **dict.fromkeys((name for name in IQ if name != "IQ4_NL"), "IQ4_NL"),
}
SMALL_BLOCK = 32  # at or below it there is no smaller block to fall back to: F16 follows


@dataclass(frozen=True, slots=True)
class TensorType:
    """One ggml type.

    Attributes:
        family: 'float', 'K', 'IQ', 'block32' or 'other'.
        needs_imatrix: refused without importance, except for token embeddings and output.
    """

    name: str
    id: int
    block_size: int
    block_bytes: int
    family: str
    needs_imatrix: bool

    @property
    def bpw(self) -> float:
        """Bits per weight, block scales included."""
        return 8 * self.block_bytes / self.block_size

    @property
    def is_quantized(self) -> bool:
        """True for block types; False for floats and for integers."""
        return self.block_size > 1


def _family(name: str) -> str:
    families = {"float": FLOAT, "K": K, "IQ": IQ, "block32": BLOCK32}
    return next((family for family, names in families.items() if name in names), "other")


def _build_table() -> Mapping[str, TensorType]:
    sizes = {t.name: (int(t), *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    table = {
        name: TensorType(name, number, block, block_bytes, _family(name), name in NEED_IMATRIX)
        for name, (number, block, block_bytes) in (sizes | CORRECTIONS).items()
    }
    return MappingProxyType(dict(sorted(table.items(), key=lambda item: item[1].id)))


TYPES: Mapping[str, TensorType] = _build_table()
BY_ID: Mapping[int, TensorType] = MappingProxyType({t.id: t for t in TYPES.values()})


def tensor_type(name: str) -> TensorType:
    """The type of that name, in any case.

    Raises:
        InputError: no such type; the message lists the known ones.
    """
    found = TYPES.get(name.strip().upper())
    if found is None:
        raise InputError(f"{name!r} is not a tensor type: use one of {', '.join(TYPES)}")
    return found


def type_of_id(type_id: int, tensor: str) -> TensorType:
    """The type with that number in a file.

    Raises:
        InputError: the number belongs to a newer, or a removed, type.
    """
    found = BY_ID.get(type_id)
    if found is None:
        raise InputError(
            f"tensor {tensor} has type id {type_id}, unknown to this version of bitwright"
            f" (highest known: {max(BY_ID)}): use a newer version, or convert the model again"
        )
    return found


def fits_row(type_name: str, n_per_row: int) -> bool:
    """Whether rows of that many elements divide into whole blocks of the type."""
    return n_per_row % tensor_type(type_name).block_size == 0


def row_bytes(type_name: str, n_per_row: int) -> int:
    """Bytes of one row.

    Raises:
        InputError: the row is no multiple of the block.
    """
    kind = tensor_type(type_name)
    if n_per_row % kind.block_size:
        raise InputError(
            f"a row of {n_per_row} elements cannot be {kind.name}, whose blocks hold"
            f" {kind.block_size}: use {fallback_type(kind.name, n_per_row)}"
        )
    return n_per_row // kind.block_size * kind.block_bytes


def fallback_type(type_name: str, n_per_row: int) -> str:
    """The type that llama.cpp puts in the place of one the row cannot take; itself if it can.

    Raises:
        InputError: llama.cpp defines no replacement for the type.
    """
    kind = tensor_type(type_name)
    if fits_row(kind.name, n_per_row):
        return kind.name
    instead = FALLBACK.get(kind.name, kind.name if kind.block_size <= SMALL_BLOCK else None)
    if instead is None:
        raise InputError(
            f"a row of {n_per_row} elements cannot be {kind.name} (blocks of {kind.block_size}),"
            " and llama.cpp defines no replacement for it: choose another type"
        )
    return instead if fits_row(instead, n_per_row) else "F16"
