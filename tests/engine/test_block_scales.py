import numpy as np
import pytest

from bitwright.engine import lib
from bitwright.engine.block_scales import first_bad_block
from bitwright.engine.ggml_types import TYPES

# Types that ggml itself can validate.
CHECKED = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "Q1_0", "Q2_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS"),
    *("IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
]


def valid(block, kind):
    return bool(lib.validate_row_data(kind.id, block.ctypes.data, block.nbytes))


@pytest.mark.parametrize("name", CHECKED)
def test_every_byte_pair_of_a_block_against_ggml(name):
    """Put an infinity at each place of a block: found here exactly where ggml finds it."""
    kind = TYPES[name]
    found = []
    for at in range(max(1, kind.block_bytes - 1)):
        block = np.zeros(kind.block_bytes, np.uint8)
        block[at : at + 2] = (0xFF, 0xFF)[: kind.block_bytes - at]
        assert (first_bad_block(block, name) is None) == valid(block, kind), at
        found.append(first_bad_block(block, name))
    assert None in found or kind.block_bytes <= 2
    assert 0 in found or name in ("F32", "IQ1_M")


@pytest.mark.parametrize("name", CHECKED)
def test_random_blocks_against_ggml(name):
    kind = TYPES[name]
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (400, kind.block_bytes), np.uint8)
    if kind.name == "IQ1_M":  # its scale is spread over four words: make some of them infinite
        words = blocks[:200, 48:].view("<u2")
        words[...] = words & 0x0FFF | np.uint16([0x0000, 0x0000, 0xC000, 0x7000])
    for block in blocks:
        block = np.ascontiguousarray(block)
        assert (first_bad_block(block, name) is None) == valid(block, kind)
    bad = [i for i, block in enumerate(blocks) if first_bad_block(block.copy(), name) is not None]
    assert first_bad_block(blocks.ravel(), name) == (bad[0] if bad else None)


def test_types_that_hold_nothing_but_numbers():
    assert first_bad_block(np.full(36, 255, np.uint8), "NVFP4") is None
    assert first_bad_block(np.full(8, 255, np.uint8), "I32") is None


def test_double_precision():
    values = np.array([1.0, 2.0, np.inf, np.nan])
    assert first_bad_block(values.view(np.uint8), "F64") == 2
    assert first_bad_block(values[:2].view(np.uint8), "F64") is None
