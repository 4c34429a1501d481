"""What scoring holds at one time: exact beyond 32 bits, in blocks, and refused where too large."""

import numpy as np
import pytest

from bitwright.corpora.records import Chunk
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError
from bitwright.eval.divergence import plan_blocks
from bitwright.eval.memory import (
    available_memory,
    chunk_bytes,
    fitting_slots,
    kv_bytes,
    require_memory,
)

VOCAB = 151_936


def chunk(n: int, index: int = 0) -> Chunk:
    tokens, kinds = np.zeros(n, np.int32), np.full(n, 2, np.uint8)
    return Chunk("code", "report", index, tokens, (0,), (f"d{index}",), kinds)


def test_a_long_context_is_no_32_bit_product():
    assert chunk_bytes(16_384, VOCAB) == 19_914_555_392
    (block,) = plan_blocks({"code": [chunk(16_384)]}, VOCAB, 1 << 30)
    assert len(block.chunks) == 1


def test_six_hundred_chunks_are_never_held_together():
    chunks = [chunk(512, i) for i in range(600)]
    blocks = plan_blocks({"code": chunks}, VOCAB, 1 << 30)
    sizes = [sum(4 * VOCAB * len(c.rows()) for c in block.chunks) for block in blocks]
    assert sum(len(block.chunks) for block in blocks) == 600
    assert max(sizes) <= 1 << 30 < sum(sizes)


def test_what_does_not_fit_is_refused_with_both_sizes_and_what_would():
    chunks = {"code": [chunk(512)], "chat": [chunk(16_384)]}
    with pytest.raises(ConfigError, match=r"16383 .* 19\.9 GB and 4\.0 GB .* at most 3290 tokens"):
        require_memory(chunks, VOCAB, 4_000_000_000)
    require_memory(chunks, VOCAB, 32 << 30)
    require_memory(chunks, VOCAB, None)
    require_memory({"code": []}, VOCAB, 0)


def test_this_machine_says_what_is_free():
    found = available_memory()
    assert found is None or found > 1 << 20


def test_answers_side_by_side_leave_half_of_the_memory_free():
    demo = open_model("demo")  # 5 layers, 2 of 4 heads with keys, 64 numbers each, F16
    assert kv_bytes(demo, 512) == kv_bytes(demo, 0) == 512 * 5 * 2 * (64 + 64) * 2
    each = kv_bytes(demo, 512)
    options = DecoderOptions(slots=8)
    assert fitting_slots(demo, options, 100 * each).slots == 8
    assert fitting_slots(demo, options, 7 * each).slots == 3
    assert fitting_slots(demo, options, each).slots == 1
    assert fitting_slots(demo, options, None) == options
