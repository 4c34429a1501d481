"""Next-token logits with kept prefixes: what scoring and generation are made of.

A slot is one stream of the KV cache and remembers its tokens, so that a sequence which starts like
the last one pays for its new tokens only. The logits are bit for bit those of a cleared cache:

- flash attention is off: its CPU kernels round differently for few and for many rows;
- a batch has at least `MIN_ROWS` rows, as many of them are outputs (the head multiplies those
  alone), and each slot has at least `MIN_SLOT_ROWS`, since ggml multiplies fewer rows by other
  kernels. Missing rows are later positions, which no earlier position sees; they are taken back
  after the batch.
- slots are streams of their own (`kv_unified` off): a neighbour cannot move a sequence's cells.

Measured on K-quants, F16 and BF16 with 1 and 2 threads; a GPU backend has its own kernels.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.lib import llama
from bitwright.engine.loaded_model import LoadedModel, check_decodes, make_batch
from bitwright.engine.model_file import ModelFile
from bitwright.engine.session import resolve_threads
from bitwright.errors import ConfigError, EngineError

MIN_ROWS = 8
MIN_SLOT_ROWS = 2
DEFAULT_CTX = 4096
MAX_BATCH = 512
# Steps of smaller models are so short that threads mostly wait for each other: on a model of 4.5
# million weights, `evaluate --suite builtin` took 48-67 s with two threads and 18 s with one,
# other work beside them.
ONE_THREAD_BELOW = 32_000_000
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """How to run: `threads` 0 = all cores, or one for a tiny model; `n_ctx` 0 = the model's own, at
    most 4096.

    `slots`: sequences that are generated at the same time; each has `n_ctx` tokens.
    """

    threads: int = 0
    n_ctx: int = 0
    slots: int = 8
    gpu_layers: int = 0


@dataclass(slots=True)
class Part:
    """Tokens to append to a slot; `wanted` logits rows are those of its last `wanted` tokens."""

    slot: int
    tokens: Tokens
    wanted: int


@dataclass(slots=True)
class Counters:
    """What was done: tokens decoded for the caller, rows added as filler, tokens reused."""

    decoded: int = 0
    filler: int = 0
    reused: int = 0


@dataclass(slots=True)
class _Slot:
    kept: Tokens = field(default_factory=lambda: np.empty(0, np.int32))


class Decoder:
    """A model file, quantized or not, that decodes with kept prefixes.

    Raises InputError for a model that is no decoder, ConfigError for options that do not fit it.
    """

    def __init__(self, model: ModelFile, options: DecoderOptions | None = None) -> None:
        self.model = model
        self.options = options or DecoderOptions()
        self.threads = resolve_threads(self.options.threads)
        self.counters = Counters()
        self.loaded = LoadedModel(model, gpu_layers=self.options.gpu_layers)
        self._pointer = None
        try:
            check_decodes(self.loaded, model)
            self.n_ctx = _context_size(self.options.n_ctx, self.loaded.n_ctx_train, model.name)
            pointer = self.loaded.pointer
            self.rewinds = not (
                llama.llama_model_is_recurrent(pointer) or llama.llama_model_is_hybrid(pointer)
            )
            self.n_batch = min(MAX_BATCH, self.n_ctx)
            self._slots = [_Slot() for _ in range(self.options.slots)]
            self._pointer = self._make_context()
        except BaseException:
            self.close()
            raise
        self._memory = llama.llama_get_memory(self._pointer)

    @property
    def n_vocab(self) -> int:
        """Columns of the logits."""
        return self.loaded.n_vocab

    @property
    def n_slots(self) -> int:
        """Sequences that fit at one time."""
        return len(self._slots)

    def is_end(self, token_id: int) -> bool:
        """Whether the model ends its turn with this token."""
        return bool(llama.llama_vocab_is_eog(self.loaded.vocab, token_id))

    def piece(self, token_id: int, *, special: bool = True) -> bytes:
        """The bytes of one token; `special` False leaves control tokens out."""
        size = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = llama.llama_token_to_piece(self.loaded.vocab, token_id, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n
        raise EngineError(f"llama.cpp could not give the text of token {token_id}")

    def rows(
        self, tokens: Tokens, first: int, slot: int | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Logits of positions first … n-1, in blocks of (position of the block, view (k, n_vocab)).

        Row i predicts tokens[i+1]. A view is overwritten by the next block. ``slot`` None takes the
        one that holds the longest prefix.
        """
        slot = self.best_slot(tokens) if slot is None else slot
        start = self.reuse(slot, tokens, first)
        for begin, end in _cuts(start, len(tokens), self.n_batch):
            wanted = min(end - begin, max(0, end - first))
            view = self.append([Part(slot, tokens[begin:end], wanted)])
            if wanted:
                yield end - wanted, view

    def best_slot(self, tokens: Tokens, free: Sequence[int] | None = None) -> int:
        """The slot (of `free`, default all) that holds the longest prefix of the tokens."""
        candidates = range(self.n_slots) if free is None else free
        return max(candidates, key=lambda s: (_common(self._slots[s].kept, tokens), -s))

    def reuse(self, slot: int, tokens: Tokens, first: int) -> int:
        """Cut a slot back to what it shares with the tokens; where decoding has to go on.

        At most `first`, since a row is only had by decoding it; a few tokens earlier when the rest
        would be too small a batch.
        """
        held = self._slots[slot]
        shared = min(_common(held.kept, tokens), first, max(0, len(tokens) - MIN_ROWS))
        self._cut(slot, shared)
        kept = len(held.kept)
        self.counters.reused += kept
        return kept

    def append(self, parts: Sequence[Part]) -> NDArray[np.float32]:
        """Decode the parts in one batch; their wanted rows, part after part, as a view.

        Raises ConfigError for a part that does not fit its slot, EngineError for NaN logits.
        """
        padded = self._with_filler(parts)
        sizes = [len(p) for p in padded]
        if sum(sizes) > self.n_batch:
            raise ConfigError(f"a batch has {sum(sizes)} tokens and takes {self.n_batch}")
        starts = np.cumsum([0, *sizes[:-1]])
        rows = np.concatenate(
            [
                np.arange(start + len(part.tokens) - part.wanted, start + len(part.tokens))
                for start, part in zip(starts, parts, strict=True)
            ]
        )
        view = self._decode(parts, padded, rows)
        for part, filled in zip(parts, padded, strict=True):
            held = self._slots[part.slot]
            held.kept = np.concatenate([held.kept, filled])
            if len(filled) > len(part.tokens):
                self._cut(part.slot, len(held.kept) - len(filled) + len(part.tokens))
        return view

    def cut(self, slot: int, length: int) -> None:
        """Take the slot's tokens from `length` on back."""
        self._cut(slot, length)

    def held(self, slot: int) -> int:
        """How many tokens the slot holds."""
        return len(self._slots[slot].kept)

    def clear(self) -> None:
        """Forget everything."""
        llama.llama_memory_clear(self._memory, True)
        for held in self._slots:
            held.kept = np.empty(0, np.int32)

    def close(self) -> None:
        """Free the context and the model; a second call does nothing."""
        if self._pointer is not None:
            llama.llama_free(self._pointer)
            self._pointer = None
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _make_context(self) -> int:
        params = llama.llama_context_default_params()
        params.n_ctx = self.n_ctx * self.n_slots
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = self.n_slots
        params.n_outputs_max_per_seq = 0
        params.kv_unified = False
        params.swa_full = True  # a kept prefix must hold what a sliding window has passed
        tiny = sum(info.n_elements for info in self.model.tensors) < ONE_THREAD_BELOW
        threads = 1 if tiny and not self.options.threads else self.threads
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 0
        params.op_offload = False
        with lib.capture_log() as log:
            pointer = llama.llama_init_from_model(self.loaded.pointer, params)
        if not pointer:
            raise EngineError(
                f"llama.cpp could not make {self.n_slots} sequences of {self.n_ctx} tokens "
                f'("{log.last_error()}"); try fewer'
            )
        return int(pointer)

    def _with_filler(self, parts: Sequence[Part]) -> list[Tokens]:
        """The parts' tokens, with rows after them until the batch is large enough."""
        if not self.rewinds:
            return [part.tokens for part in parts]
        least = max(MIN_SLOT_ROWS, -(-MIN_ROWS // len(parts)))
        out = []
        for part in parts:
            room = self.n_ctx - len(self._slots[part.slot].kept) - len(part.tokens)
            if room < 0:
                raise ConfigError(
                    f"{len(self._slots[part.slot].kept) + len(part.tokens)} tokens do not fit a "
                    f"context of {self.n_ctx}"
                )
            missing = min(room, max(0, least - len(part.tokens)))
            self.counters.decoded += len(part.tokens)
            self.counters.filler += missing
            out.append(np.concatenate([part.tokens, np.repeat(part.tokens[-1:], missing)]))
        return out

    def _decode(
        self, parts: Sequence[Part], padded: Sequence[Tokens], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        begins = [len(self._slots[part.slot].kept) for part in parts]
        positions = [np.arange(b, b + len(p)) for b, p in zip(begins, padded, strict=True)]
        slots = [np.full(len(p), part.slot) for part, p in zip(parts, padded, strict=True)]
        asked = _enough_rows(rows, sum(map(len, padded)))
        batch, keep = make_batch(
            np.concatenate(padded), np.concatenate(slots), np.concatenate(positions), asked
        )
        with lib.capture_log() as log:
            code = llama.llama_decode(self._pointer, batch)
            llama.llama_synchronize(self._pointer)
        del keep
        if code != 0:
            raise EngineError(
                f"llama.cpp refused to decode {sum(map(len, padded))} tokens "
                f'(code {code}, "{log.last_error()}")'
            )
        address = ctypes.cast(llama.llama_get_logits(self._pointer), ctypes.POINTER(ctypes.c_float))
        view = np.ctypeslib.as_array(address, shape=(len(asked), self.n_vocab))
        if len(asked) > len(rows):
            view = view[np.searchsorted(asked, rows)]
        with np.errstate(invalid="ignore", over="ignore"):
            if len(rows) and not np.isfinite(view.sum()):
                raise EngineError("logits are NaN or infinite; this file cannot be scored")
        return view

    def _cut(self, slot: int, length: int) -> None:
        held = self._slots[slot]
        if length >= len(held.kept):
            return
        if not llama.llama_memory_seq_rm(self._memory, slot, length, -1):
            # A recurrent memory cannot go back: start anew.
            llama.llama_memory_seq_rm(self._memory, slot, -1, -1)
            length = 0
        held.kept = held.kept[:length]


def _context_size(wanted: int, trained: int, name: str) -> int:
    if wanted < 0 or (trained and wanted > trained):
        raise ConfigError(
            f"a context of {wanted} tokens was asked for and {name} was trained for {trained}; "
            f"give 1 to {trained}"
        )
    return wanted or min(trained or DEFAULT_CTX, DEFAULT_CTX)


def _enough_rows(rows: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """The wanted rows with others before them: the last layers and the head see these alone."""
    if not 0 < len(rows) < MIN_ROWS:
        return rows
    others = np.setdiff1d(np.arange(n), rows)
    return np.sort(np.concatenate([rows, others[max(0, len(others) + len(rows) - MIN_ROWS) :]]))


def _common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _cuts(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """[start, end) in batches of at most `size`, the last one never too small."""
    cuts = [*range(start, end, size), end]
    if len(cuts) > 2 and cuts[-1] - cuts[-2] < MIN_ROWS:
        cuts[-2] = cuts[-1] - MIN_ROWS
    return list(pairwise(cuts))
