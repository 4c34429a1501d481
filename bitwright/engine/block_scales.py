"""Find NaN and infinite values in tensor data by looking at the scales of its blocks.

A block whose scale is not finite decodes to nothing but NaN; the rest of a block cannot be wrong
in that way. Offsets are those of the block structs in ggml (ggml-common.h).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bitwright.engine.ggml_types import TYPES

Bytes = npt.NDArray[np.uint8]

# Where the half-precision scales (and minima) of a block stand, in bytes from its start.
HALF_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q8_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
# Floats: unsigned view, exponent bits (all set means infinite or NaN).
EXPONENTS: dict[str, tuple[str, int]] = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
HALF = EXPONENTS["F16"]
IQ1_M_SCALES = 48  # four 16-bit words; their top nibbles together are the half-precision scale
MXFP4_NAN = 0xFF


def first_bad_block(raw: Bytes, type_name: str) -> int | None:
    """Index of the first block (element, for floats) that is not finite; None if all are.

    Args:
        raw: flat bytes, whole blocks.
    """
    bad = _bad_blocks(raw, type_name)
    return int(np.argmax(bad)) if bad is not None and bad.any() else None


def _bad_blocks(raw: Bytes, type_name: str) -> npt.NDArray[np.bool_] | None:
    """One flag per block; None for types that cannot hold anything but numbers."""
    if type_name in EXPONENTS:
        return _not_finite(raw, EXPONENTS[type_name])
    blocks = raw.reshape(-1, TYPES[type_name].block_bytes)
    if type_name in HALF_SCALES:
        columns = [blocks[:, at : at + 2] for at in HALF_SCALES[type_name]]
        flags = [_not_finite(np.ascontiguousarray(column).ravel(), HALF) for column in columns]
        result: npt.NDArray[np.bool_] = np.logical_or.reduce(flags)
        return result
    special = SPECIAL.get(type_name)
    return special(blocks) if special else None


def _not_finite(raw: Bytes, kind: tuple[str, int]) -> npt.NDArray[np.bool_]:
    view, exponent = kind
    values = raw.view(np.dtype(view))
    flags: npt.NDArray[np.bool_] = (values & values.dtype.type(exponent)) == exponent
    return flags


def _bad_iq1_m(blocks: Bytes) -> npt.NDArray[np.bool_]:
    words = np.ascontiguousarray(blocks[:, IQ1_M_SCALES:]).view("<u2") >> 12
    scale = words[:, 0] | words[:, 1] << 4 | words[:, 2] << 8 | words[:, 3] << 12
    return _not_finite(scale.astype("<u2").view(np.uint8), HALF)


def _bad_mxfp4(blocks: Bytes) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = blocks[:, 0] == MXFP4_NAN
    return flags


SPECIAL: dict[str, Callable[[Bytes], npt.NDArray[np.bool_]]] = {
    "IQ1_M": _bad_iq1_m,
    "MXFP4": _bad_mxfp4,
}
