"""Partial passes against full ones, bit for bit, on the real engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bitwright.engine import lib, suffix_check
from bitwright.engine.ggml_types import fits_row
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.suffix import Stream, SuffixRunner, strided
from bitwright.engine.suffix_check import check_suffix
from bitwright.errors import ConfigError, EngineError
from tests.tiny import tiny_gguf
from tests.tiny_arch import tiny_arch_gguf

N_TOKENS = 48
STARTS = (0, 17, 20)
ROWS = np.arange(2, N_TOKENS, 3)
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_gguf(path, n_layer=3),
    "llama-moe": lambda path: tiny_gguf(path, n_expert=4, tied=False),
    "qwen2": lambda path: tiny_arch_gguf(path, "qwen2"),
    "qwen2-tied": lambda path: tiny_arch_gguf(path, "qwen2", tied=True),
    "qwen2moe": lambda path: tiny_arch_gguf(path, "qwen2moe"),
    "gemma3": lambda path: tiny_arch_gguf(path, "gemma3", n_layer=7),
    "mamba": lambda path: tiny_arch_gguf(path, "mamba"),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("suffix")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else MODELS[name](path)

    return get


def open_session(path: Path | str, *, flash_attn: bool | None = None) -> Session:
    options = SessionOptions(threads=1, n_ctx=64, flash_attn=flash_attn, max_sequences=4)
    return Session(open_model(path), options)


@pytest.fixture
def session(make: Callable[[str], Path]) -> Iterator[Session]:
    with open_session(make("llama")) as opened:
        yield opened


def tokens_of(session: Session, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, session.n_vocab, N_TOKENS).astype(np.int32)


def begin(runner: SuffixRunner, seed: int = 0) -> Stream:
    return runner.start(tokens_of(runner.session, seed), STARTS, ROWS)


def swaps(session: Session) -> Iterator[tuple[str, str]]:
    """Every weight that takes Q4_0, in graph order."""
    for name in session.weights:
        info = session.model.tensor(name)
        if fits_row("Q4_0", info.n_per_row) and not name.endswith(("ssm_a", "gate_inp.weight")):
            yield name, "Q4_0"


def assert_every_weight_equal(session: Session, starts: tuple[int, ...], rows: np.ndarray) -> int:
    """Both ways for every weight; returns how many passes were really partial."""
    packer = Packer(session.model, None)
    tokens = tokens_of(session)
    with SuffixRunner(session) as runner:
        stream = runner.start(tokens, starts, rows)
        base = stream.reference_logits().copy()
        assert np.array_equal(base, session.logits(tokens, starts, rows))
        for name, kind in swaps(session):
            packed = packer.pack(name, kind)
            partial = stream.logits_with_swap(name, kind, packed).copy()
            with session.swapped(name, kind, packed):
                full = session.logits(tokens, starts, rows)
                assert np.array_equal(partial, full), name
                assert not np.array_equal(partial, base), name
        return runner.suffix_passes


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-moe", "qwen2", "qwen2moe", "gemma3"])
def test_every_weight_bit_for_bit(make: Callable[[str], Path], name: str, flash_attn: bool) -> None:
    with open_session(make(name), flash_attn=flash_attn) as session:
        partial = assert_every_weight_equal(session, STARTS, ROWS)
        # All but the token embedding and what stands beside it at the front.
        assert partial >= len(list(swaps(session))) - 2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_one_sequence_and_all_rows(make: Callable[[str], Path], name: str) -> None:
    with open_session(make(name)) as session:
        assert_every_weight_equal(session, (0,), np.arange(N_TOKENS))


def test_the_demo_model_bit_for_bit() -> None:
    with open_session("demo") as session:
        assert assert_every_weight_equal(session, STARTS, ROWS) >= len(session.weights) - 2


def test_a_recurrent_model_of_one_sequence(make: Callable[[str], Path]) -> None:
    with open_session(make("mamba")) as session:
        assert_every_weight_equal(session, (0,), ROWS)


def test_a_batch_of_several_graphs_is_computed_whole(make: Callable[[str], Path]) -> None:
    with open_session(make("mamba")) as session:
        assert assert_every_weight_equal(session, STARTS, ROWS) == 0
        with SuffixRunner(session) as runner:
            good, why = check_suffix(runner, tokens_of(session), STARTS, ROWS)
            assert good
            assert "several graphs" in why


@pytest.mark.parametrize("name", ["llama", "qwen2-tied"])
def test_a_tied_embedding_is_computed_whole(make: Callable[[str], Path], name: str) -> None:
    with open_session(make(name)) as session, SuffixRunner(session) as runner:
        stream = begin(runner)
        stream.reference_logits()
        before = runner.full_passes
        packed = Packer(session.model, None).pack("token_embd.weight", "Q4_0")
        partial = stream.logits_with_swap("token_embd.weight", "Q4_0", packed).copy()
        assert (runner.full_passes, runner.suffix_passes) == (before + 1, 0)
        with session.swapped("token_embd.weight", "Q4_0", packed):
            assert np.array_equal(partial, session.logits(stream.tokens, STARTS, ROWS))


def test_any_order_of_weights_and_streams(session: Session) -> None:
    packer = Packer(session.model, None)
    with SuffixRunner(session) as runner:
        streams = [begin(runner, seed) for seed in range(2)]
        names = [name for name, _ in swaps(session)]
        for name in [*names[::-3], *names[::4]]:
            for stream in streams:
                packed = packer.pack(name, "Q4_0")
                partial = stream.logits_with_swap(name, "Q4_0", packed).copy()
                with session.swapped(name, "Q4_0", packed):
                    assert np.array_equal(partial, session.logits(stream.tokens, STARTS, ROWS))


def test_one_swap_for_many_batches(session: Session) -> None:
    name = "blk.2.ffn_up.weight"
    packed = Packer(session.model, None).pack(name, "Q4_0")
    with SuffixRunner(session) as runner:
        streams = [begin(runner, seed) for seed in range(3)]
        for stream in streams:
            assert stream.advance(name)
        with session.swapped(name, "Q4_0", packed):
            for stream in streams:
                partial = stream.logits(name).copy()
                assert np.array_equal(partial, session.logits(stream.tokens, STARTS, ROWS))
        assert runner.suffix_passes == 3


def test_only_one_cut_is_kept(session: Session) -> None:
    with SuffixRunner(session) as runner:
        stream = begin(runner)
        for name in session.weights:
            stream.advance(name)
            cut = stream.cut(name)
            assert cut is None or stream._values.keys() == cut.nodes


def test_logits_without_advance_are_refused(session: Session) -> None:
    with SuffixRunner(session) as runner:
        stream = begin(runner)
        stream.reference_logits()
        with pytest.raises(EngineError, match="call advance"):
            stream.logits("blk.2.ffn_up.weight")


def test_a_full_pass_after_a_partial_one_runs_every_node(session: Session) -> None:
    name = "blk.2.ffn_down.weight"
    with SuffixRunner(session) as runner:
        stream = begin(runner)
        base = stream.reference_logits().copy()
        stream.logits_with_swap(name, "Q4_0", Packer(session.model, None).pack(name, "Q4_0"))
        assert np.array_equal(begin(runner).reference_logits(), base)


def test_the_same_shape_is_analysed_once(session: Session) -> None:
    with SuffixRunner(session) as runner:
        for seed in range(3):
            begin(runner, seed).reference_logits()
        assert len(runner._tapes) == 1


@pytest.mark.parametrize("change", ["operation", "fewer", "more", "size"])
def test_a_drifted_graph_raises(session: Session, change: str) -> None:
    name = "blk.1.ffn_up.weight"
    with SuffixRunner(session) as runner:
        stream = begin(runner)
        assert stream.advance(name)
        tape = stream._tape
        assert tape is not None
        if change == "operation":
            tape.codes[5] += 1
        elif change == "fewer":  # the recording has one more than the graph
            tape.windows.append(tape.windows[-1])
        elif change == "more":
            tape.windows.pop()
            tape.addresses[-2] = 0
        else:
            first = min(stream._values)
            stream._values[first] = stream._values[first][:-4]
        with pytest.raises(EngineError, match="not the one that was recorded"):
            stream.logits(name)


def test_what_the_callback_raises_comes_out_of_the_call(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("inside the callback")

    with SuffixRunner(session) as runner:
        stream = begin(runner)
        stream.advance("blk.1.ffn_up.weight")
        with monkeypatch.context() as patch:
            patch.setattr(lib, "tensor_set", fail)
            with pytest.raises(ZeroDivisionError, match="inside the callback"):
                stream.logits("blk.1.ffn_up.weight")
        stream.logits("blk.1.ffn_up.weight")


def test_nan_logits_name_the_weight_and_the_token(session: Session) -> None:
    name = "blk.2.ffn_down.weight"
    info = session.model.tensor(name)
    packed = Packer(session.model, None).pack(name, "Q4_0").copy()
    packed.reshape(info.n_rows, -1)[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with SuffixRunner(session) as runner:
        stream = begin(runner)
        with pytest.raises(EngineError, match=rf"NaN or infinite with {name}, first at token 2 "):
            stream.logits_with_swap(name, "Q4_0", packed)
        stream.reference_logits()  # restored


def test_a_batch_that_does_not_fit_is_refused(session: Session) -> None:
    with SuffixRunner(session) as runner, pytest.raises(ConfigError, match="takes 1 to 64"):
        runner.start(np.zeros(65, np.int32), (0,), np.array([3]))


def test_the_self_check_passes(session: Session) -> None:
    with SuffixRunner(session) as runner:
        good, why = check_suffix(runner, tokens_of(session), STARTS, ROWS)
    assert good
    assert "bit for bit" in why


def test_the_self_check_sees_a_difference(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Stream.logits_with_swap

    def wrong(stream: Stream, name: str, kind: str, packed: np.ndarray) -> np.ndarray:
        return np.nextafter(honest(stream, name, kind, packed), np.float32(np.inf))

    monkeypatch.setattr(Stream, "logits_with_swap", wrong)
    with SuffixRunner(session) as runner:
        good, why = check_suffix(runner, tokens_of(session), STARTS, ROWS)
    assert not good
    assert "differ by" in why


def test_the_self_check_reports_an_error_as_a_reason(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise EngineError("the graph drifted")

    monkeypatch.setattr(suffix_check, "_pack", broken)
    with SuffixRunner(session) as runner:
        assert check_suffix(runner, tokens_of(session), STARTS, ROWS) == (
            False,
            "the graph drifted",
        )


@pytest.mark.parametrize(
    ("n", "stride", "offset", "expected"),
    [
        (10, 4, 0, [0, 4, 8]),
        (10, 4, 3, [3, 7]),
        (10, 1, 0, list(range(10))),
        (2, 4, 3, [1]),
        (0, 4, 0, []),
    ],
)
def test_rows_by_stride(n: int, stride: int, offset: int, expected: list[int]) -> None:
    assert strided(np.arange(n), stride, offset).tolist() == expected
