import ctypes

import gguf
import llama_cpp
import pytest

from bitwright.engine.ggml_types import (
    BY_ID,
    TYPES,
    fallback_type,
    fits_row,
    row_bytes,
    tensor_type,
    type_of_id,
)
from bitwright.errors import InputError


def test_table_agrees_with_the_gguf_package():
    for known in gguf.GGMLQuantizationType:
        if known.name == "Q8_1":  # the package counts 4 bytes too many; see the next test
            continue
        mine = TYPES[known.name]
        assert (mine.id, mine.block_size, mine.block_bytes) == (
            int(known),
            *gguf.GGML_QUANT_SIZES[known],
        )


def test_table_agrees_with_the_pinned_library():
    ggml = ctypes.CDLL(llama_cpp.llama_cpp._lib._name)
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_type_name.restype = ctypes.c_char_p
    names = {i: ggml.ggml_type_name(i) for i in range(43)}
    live = {i: name.decode().upper() for i, name in names.items() if ggml.ggml_blck_size(i) > 0}
    assert {i: t.name for i, t in BY_ID.items()} == live
    for i, kind in BY_ID.items():
        assert kind.block_size == ggml.ggml_blck_size(i)
        assert kind.block_bytes == ggml.ggml_type_size(i)


def test_bits_and_families():
    assert TYPES["Q3_K"].bpw == 3.4375
    assert TYPES["F16"].bpw == 16
    assert [TYPES[n].family for n in ("BF16", "Q6_K", "IQ4_NL", "Q8_0", "MXFP4")] == [
        "float",
        "K",
        "IQ",
        "block32",
        "other",
    ]
    needing = {name for name, kind in TYPES.items() if kind.needs_imatrix}
    assert needing == {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
    assert [TYPES[n].is_quantized for n in ("F32", "BF16", "I32", "Q4_0")] == [False] * 3 + [True]


def test_names_in_any_case():
    assert tensor_type("q4_k").name == "Q4_K"
    assert tensor_type(" IQ2_xxs ").name == "IQ2_XXS"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"'Q4_K_M' is not a tensor type: .*Q4_K, Q5_K"):
        tensor_type("Q4_K_M")


@pytest.mark.parametrize("type_id", [4, 31, 43, 99, 2**32 - 1])
def test_unknown_id(type_id):
    with pytest.raises(InputError, match=rf"tensor blk.0.x has type id {type_id}, unknown to this"):
        type_of_id(type_id, "blk.0.x")


# As the pinned build's tensor_type_fallback has it (2024's table had Q3_K → IQ4_NL).
FALLBACKS = {
    **{"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
    **{"IQ4_XS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL"},
    **{"IQ2_S": "IQ4_NL", "IQ2_XXS": "IQ4_NL", "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL"},
    **{"TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q2_0": "Q4_0"},
}


@pytest.mark.parametrize("n_per_row", [1408 + 32, 2688 + 32, 4544 + 32, 96])
@pytest.mark.parametrize(("asked", "instead"), FALLBACKS.items())
def test_fallback_of_odd_rows(n_per_row, asked, instead):
    assert not fits_row(asked, n_per_row)
    assert fallback_type(asked, n_per_row) == instead
    assert fits_row(instead, n_per_row)


@pytest.mark.parametrize("n_per_row", [1408, 2688, 4544])
@pytest.mark.parametrize("asked", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S"])
def test_fallback_of_rows_seen_in_the_wild(n_per_row, asked):
    assert fallback_type(asked, n_per_row) == FALLBACKS[asked]


def test_fallback_keeps_what_fits_and_ends_in_f16():
    assert fallback_type("Q2_K", 512) == "Q2_K"
    assert fallback_type("q3_k", 100) == "F16"
    assert fallback_type("Q4_0", 100) == "F16"
    assert fallback_type("MXFP4", 40) == "F16"
    with pytest.raises(InputError, match="no replacement"):
        fallback_type("Q1_0", 64)


def test_row_bytes():
    assert row_bytes("Q4_K", 512) == 288
    assert row_bytes("F32", 3) == 12
    with pytest.raises(InputError, match=r"576 elements cannot be Q3_K.* use Q4_0"):
        row_bytes("Q3_K", 576)
