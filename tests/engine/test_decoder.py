"""Kept prefixes must not change a bit: the reference is Session on the whole sequence."""

import numpy as np
import pytest

from bitwright.engine.decoder import MIN_ROWS, Decoder, DecoderOptions, Part
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.upstream import FTYPES, upstream_layout
from bitwright.errors import ConfigError


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> ModelFile:
    model = open_model("demo")
    out = tmp_path_factory.mktemp("q") / "demo-Q3_K_S.gguf"
    layout = upstream_layout(model, "Q3_K_S", has_imatrix=False)
    packer = Packer(model, None, threads=1)
    write_quantized(model, layout, out, packer=packer, ftype=FTYPES["Q3_K_S"], provenance=None)
    return open_model(out, allow_requantize=True)


@pytest.fixture(scope="module", params=["F16", "Q3_K_S"])
def pair(request, quantized):
    model = open_model("demo") if request.param == "F16" else quantized
    options = SessionOptions(threads=1, n_ctx=512, working_type="file", flash_attn=False)
    with Session(model, options) as session, Decoder(model, DecoderOptions(1, slots=4)) as decoder:
        yield session, decoder


def whole(session: Session, tokens: np.ndarray) -> np.ndarray:
    return session.logits(tokens, [0], np.arange(len(tokens))).copy()


def kept(decoder: Decoder, tokens: np.ndarray, first: int) -> np.ndarray:
    return np.concatenate([view.copy() for _, view in decoder.rows(tokens, first)])


def test_a_kept_prefix_gives_the_bits_of_a_cleared_cache(pair):
    session, decoder = pair
    rng = np.random.default_rng(0)
    base = rng.integers(5, 2000, 300).astype(np.int32)
    for _ in range(12):
        n = int(rng.integers(MIN_ROWS, 400))
        shared = int(rng.integers(0, min(n, 300)))
        fresh = rng.integers(5, 2000, n - shared).astype(np.int32)
        tokens = np.concatenate([base[:shared], fresh])
        first = int(rng.integers(0, n))
        np.testing.assert_array_equal(kept(decoder, tokens, first), whole(session, tokens)[first:])
    assert decoder.counters.reused > 0


def test_slots_side_by_side_do_not_touch_each_other(pair):
    session, decoder = pair
    decoder.clear()
    rng = np.random.default_rng(1)
    base = rng.integers(5, 2000, 120).astype(np.int32)
    lengths = (20, 33, 60, 97)
    for slot, n in enumerate(lengths):
        decoder.append([Part(slot, base[:n], 1)])
    for step in range(4):
        parts = [Part(s, base[n + step : n + step + 1], 1) for s, n in enumerate(lengths)]
        view = decoder.append(parts).copy()
        for slot, n in enumerate(lengths):
            expected = whole(session, base[: max(n + step + 1, MIN_ROWS)])[n + step]
            np.testing.assert_array_equal(view[slot], expected)


def test_filler_rows_are_taken_back(pair):
    _, decoder = pair
    decoder.clear()
    tokens = np.array([7, 8, 9], np.int32)
    decoder.append([Part(0, tokens, 1)])
    assert decoder.held(0) == 3
    assert decoder.counters.filler > 0


def test_what_does_not_fit_is_refused(pair):
    _, decoder = pair
    decoder.clear()
    with pytest.raises(ConfigError, match="do not fit a context"):
        list(decoder.rows(np.full(decoder.n_ctx + 1, 7, np.int32), 0))


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match="was trained for 512"):
        Decoder(open_model("demo"), DecoderOptions(n_ctx=4096))
