"""A model loaded by llama.cpp, and a context that decodes one batch per call.

Both own native memory and are closed explicitly; a context must be closed before its model.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.lib import llama
from bitwright.engine.model_file import ModelFile
from bitwright.errors import EngineError, InputError

LOAD_MODE_NONE = 0  # read into own buffers: a mapped file must never be written through
LAZY_MODE_OFF = 0

# Called for each graph node: (address of its ggml_tensor, ask). With ask=True the answer says
# whether the node's result is wanted; if so it is called again with ask=False once computed.
NodeWatcher = Callable[[int, bool], bool]


class LoadedModel:
    """llama_model of a file, with the vocabulary always and the weights unless `vocab_only`.

    `repack` lets the CPU rearrange quantized weights, as llama.cpp's own tools do.
    """

    def __init__(
        self,
        model: ModelFile,
        *,
        gpu_layers: int = 0,
        vocab_only: bool = False,
        no_alloc: bool = False,
        repack: bool = False,
    ) -> None:
        params = llama.llama_model_default_params()
        params.load_mode = LOAD_MODE_NONE
        params.lazy_mode = LAZY_MODE_OFF
        params.n_gpu_layers = gpu_layers
        # Repacked weights cannot be swapped, and change the numbers by as much as one tensor does.
        params.use_extra_bufts = repack
        params.vocab_only = vocab_only
        params.no_alloc = no_alloc
        path = model.shards[0].path
        with lib.capture_log() as log:
            self.pointer = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise InputError(_refusal(path, model.arch, log))
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(self.pointer))

    @property
    def decodes(self) -> bool:
        """Whether it predicts next tokens at all (an encoder-only model does not)."""
        return bool(llama.llama_model_has_decoder(self.pointer)) and not bool(
            llama.llama_model_has_encoder(self.pointer)
        )

    def close(self) -> None:
        """Free it; a second call does nothing."""
        if self.pointer:
            llama.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _refusal(path: Path, arch: str, log: lib.LogCapture) -> str:
    # The loader's exception is wrapped twice; the last error line only says "failed to load".
    reasons = [
        text.strip()
        for level, text in log.records
        if level == lib.LOG_ERROR and "error loading model" in text
    ]
    reason = reasons[-1] if reasons else log.last_error() or "it gave no reason"
    return (
        f"{path.name} (architecture '{arch}') cannot be loaded by {lib.backend_version()}, which "
        f'says "{reason}"; use a model that this version knows'
    )


def check_decodes(loaded: LoadedModel, model: ModelFile) -> None:
    """Refuse a model that does not predict next tokens (InputError)."""
    if not loaded.decodes:
        raise InputError(
            f"{model.path.name} (architecture '{model.arch}') is not a decoder-only language "
            "model, and only those predict the next token that KLD is measured on; give a causal "
            "language model"
        )


def check_loadable(model: ModelFile) -> None:
    """Refuse a model that llama.cpp would not load, without reading its weights.

    Raises InputError with the architecture, the library's version and its own error line, for an
    unknown architecture, missing or misshapen tensors and missing hyperparameters.
    """
    with LoadedModel(model, no_alloc=True) as loaded:
        check_decodes(loaded, model)


class DecodeContext:
    """llama_context that takes up to `n_ctx` tokens of up to `max_sequences` sequences at once.

    One batch is one ubatch and one graph: the KV cache is unified, so a batch is not split by
    sequence (llama-kv-cache.cpp, init_batch); recurrent memories may split it, with equal results.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        n_ctx: int,
        max_sequences: int,
        threads: int,
        flash_attn: bool | None = None,
        watcher: NodeWatcher | None = None,
    ) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_seq_max = min(max_sequences, n_ctx)
        params.n_outputs_max_per_seq = 0  # as many as the batch has
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = -1 if flash_attn is None else int(flash_attn)
        # Offloaded ops would work on copies of host weights that keep the type they had at first.
        params.op_offload = False
        self._failure: BaseException | None = None
        self._callback = self._guarded(watcher) if watcher else None
        if self._callback is not None:
            params.cb_eval = self._callback
        self.n_vocab = loaded.n_vocab
        with lib.capture_log() as log:
            self.pointer = llama.llama_init_from_model(loaded.pointer, params)
        if not self.pointer:
            raise EngineError(
                f"llama.cpp could not make a context of {n_ctx} tokens "
                f'("{log.last_error()}"); try fewer with --ctx'
            )

    def _guarded(self, watcher: NodeWatcher) -> Any:
        # ctypes prints and drops what a callback raises and the decode goes on with garbage, so
        # the exception is kept and raised after the decode.
        def on_node(address: int, ask: bool, _user_data: Any) -> bool:
            if self._failure is not None:
                return False
            try:
                return watcher(address, ask)
            except BaseException as failure:  # noqa: BLE001 - kept, raised after the decode
                self._failure = failure
                return False

        return lib.EVAL_CALLBACK(on_node)

    def decode(
        self, tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run one batch from an empty memory; logits (len(rows), n_vocab) as a view.

        Sequence j is tokens[starts[j]:starts[j+1]], positions from 0. The view is overwritten by
        the next call and dies with the context.
        """
        batch, keep = _make_batch(tokens, starts, rows)
        # Data too, not only its bookkeeping: a NaN left in the cache by a broken layout would
        # come back through masked positions (0 * NaN).
        llama.llama_memory_clear(llama.llama_get_memory(self.pointer), True)
        with lib.capture_log() as log:
            code = llama.llama_decode(self.pointer, batch)
            llama.llama_synchronize(self.pointer)
        del keep
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if code != 0:
            raise EngineError(
                f"llama.cpp refused to decode {len(tokens)} tokens in {len(starts)} sequences "
                f'(code {code}, "{log.last_error()}")'
            )
        address = ctypes.cast(llama.llama_get_logits(self.pointer), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, shape=(len(rows), self.n_vocab))

    def close(self) -> None:
        """Free it; a second call does nothing."""
        if self.pointer:
            llama.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _make_batch(
    tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
) -> tuple[Any, tuple[NDArray[Any], ...]]:
    """A batch of independent sequences, each with positions from 0."""
    n = len(tokens)
    first = np.asarray(starts, np.int64)
    lengths = np.diff(np.append(first, n))
    sequence = np.repeat(np.arange(len(first)), lengths)
    return make_batch(tokens, sequence, np.arange(n) - np.repeat(first, lengths), rows)


def make_batch(
    tokens: NDArray[np.int32],
    sequences: NDArray[np.int64],
    positions: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> tuple[Any, tuple[NDArray[Any], ...]]:
    """A llama_batch over NumPy arrays, and those arrays: keep them until it was decoded.

    Token i (n,) belongs to sequences[i] at positions[i]; `rows` are the tokens whose logits are
    wanted.
    """
    n = len(tokens)
    token = np.ascontiguousarray(tokens, np.int32)
    sequence = np.ascontiguousarray(sequences, np.int32)
    position = np.ascontiguousarray(positions, np.int32)
    ones = np.ones(n, np.int32)
    # seq_id is an array of pointers, one per token, each to that token's list of one id
    pointers = (sequence.ctypes.data + 4 * np.arange(n)).astype(np.uint64)
    output = np.zeros(n, np.int8)
    output[rows] = 1
    batch = llama.llama_batch()
    batch.n_tokens = n
    for name, array in (
        ("token", token),
        ("pos", position),
        ("n_seq_id", ones),
        ("seq_id", pointers),
        ("logits", output),
    ):
        field_type = dict(llama.llama_batch._fields_)[name]
        setattr(batch, name, ctypes.cast(array.ctypes.data, field_type))
    return batch, (token, sequence, position, ones, pointers, output)
