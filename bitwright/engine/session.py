"""A reference model in memory whose weights can be swapped, tensor by tensor, and put back.

Opening a session loads the file, finds the weights, brings them to the working type, and checks
that a swapped tensor computes what it should; where a backend fails that, the session goes on by
writing quantized *values* in the working type and says so in `swap_mode` and `notes`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.loaded_model import DecodeContext, LoadedModel, check_decodes, check_loadable
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Bytes, Packer
from bitwright.engine.swap_check import failed_swap
from bitwright.engine.weight_store import WeightStore
from bitwright.engine.working_type import resolve_working_type
from bitwright.errors import ConfigError, NotFiniteError

__all__ = ["Session", "SessionOptions", "check_loadable", "resolve_threads"]

CHECK_TOKENS = 16
F16_FOR_BF16 = (
    "BF16 weights are computed in F16, with the same values down to 6e-5: this CPU only emulates"
    " BF16, several times slower; --working-type file computes as the file is"
)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How the model runs.

    `threads` 0 = the cores this process may use. `n_ctx`: most tokens of one batch.
    `gpu_layers`: passed on; negative = all. `working_type`: 'auto' = BF16 where the CPU multiplies
    it natively and no layer is offloaded, F16 for a BF16 file where it does not, else the file's
    own; or 'file', 'F32', 'F16', 'BF16'.
    `flash_attn` None lets llama.cpp choose. `max_sequences`: most sequences of one batch.
    """

    threads: int = 0
    n_ctx: int = 512
    gpu_layers: int = 0
    working_type: str = "auto"
    flash_attn: bool | None = None
    max_sequences: int = 64


def resolve_threads(threads: int) -> int:
    """`threads`, or the number of cores this process may use for 0; ConfigError below 0."""
    if threads < 0:
        raise ConfigError(f"threads is {threads}; give 1 or more, or 0 for all cores")
    if threads:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Session:
    """One loaded model, its swappable weights and a decode context.

    `weights`: names of the 2-D and 3-D weights that a forward pass reads, in graph order.
    `swap_mode`: 'real' or 'fake'. `notes`: what a report should say about this session.
    """

    def __init__(self, model: ModelFile, options: SessionOptions | None = None) -> None:
        self.model = model
        self.options = options or SessionOptions()
        self.threads = resolve_threads(self.options.threads)
        self.working_type = resolve_working_type(
            self.options.working_type, model.reference_type, self.options.gpu_layers
        )
        self.swap_mode = "real"
        self.notes: list[str] = []
        if self.working_type == "BF16" and not lib.has_bf16() and not self.options.gpu_layers:
            self.notes.append(
                "this CPU has no BF16 instructions: --working-type F16 is several times faster"
            )
        if self.working_type == "F16" and model.reference_type == "BF16":
            self.notes.append(F16_FOR_BF16)
        self._swapped: set[str] = set()
        self._context: DecodeContext | None = None
        self.loaded = LoadedModel(model, gpu_layers=self.options.gpu_layers)
        try:
            check_decodes(self.loaded, model)
            _check_limits(self.options, model, self.loaded.n_ctx_train)
            self._store = WeightStore(self.loaded, model, self.working_type)
            self._store.convert_all()
            if failure := failed_swap(self._store, self._check_logits, self._refresh):
                self.swap_mode = "fake"
                self.notes.append(failure)
        except BaseException:
            self.close()
            raise

    @property
    def n_vocab(self) -> int:
        """Columns of the logits."""
        return self.loaded.n_vocab

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the executed weights, in graph order."""
        return tuple(self._store.weights)

    def logits(
        self, tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Logits (len(rows), n_vocab) of one batch, as a view: copy it before the next call.

        `tokens` (n ≤ n_ctx,) hold independent sequences, the j-th being
        tokens[starts[j]:starts[j+1]] with positions from 0; `rows` are ascending positions in
        `tokens` whose next token is wanted. Deterministic; a sequence gives the logits it gives
        alone, up to the rounding of F16 attention. Raises ConfigError for a batch that does not
        fit, NotFiniteError naming the row when a logit is NaN or infinite.
        """
        rows = np.asarray(rows, np.int64)
        first = np.asarray(starts, np.int64)
        self.check_batch(tokens, first, rows)
        view = self._open_context().decode(tokens, starts, rows)
        # A sum is finite only if every term is, and costs a fraction of the forward pass.
        with np.errstate(invalid="ignore", over="ignore"):
            bad = np.flatnonzero(~np.isfinite(view.sum(axis=1)))
        if len(bad):
            position = int(rows[bad[0]])
            sequence = int(np.searchsorted(first, position, side="right")) - 1
            raise NotFiniteError(
                f"{len(bad)} of {len(rows)} rows of logits are NaN or infinite, first row "
                f"{bad[0]} (token {position}, sequence {sequence}); this result cannot be scored"
            )
        return view

    def check_batch(
        self, tokens: NDArray[np.int32], first: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> None:
        """Raise ConfigError for a batch that does not fit the context or the vocabulary."""
        n, limit = len(tokens), self.options.n_ctx
        if not 0 < n <= limit:
            raise ConfigError(
                f"a batch has {n} tokens and the session's context takes 1 to {limit}"
            )
        if len(first) > self.options.max_sequences:
            raise ConfigError(
                f"a batch has {len(first)} sequences and the session takes "
                f"{self.options.max_sequences}; raise max_sequences"
            )
        if len(first) == 0 or first[0] != 0 or (np.diff(first, append=n) < 1).any():
            raise ConfigError(f"starts {list(first[:8])} do not cut {n} tokens into sequences")
        if len(rows) == 0 or rows[0] < 0 or rows[-1] >= n or (np.diff(rows) < 1).any():
            raise ConfigError(f"rows must be ascending positions below {n}, without repeats")
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= self.n_vocab:
            raise ConfigError(
                f"a token id is outside 0…{self.n_vocab - 1}: the text was tokenized for another "
                "model"
            )

    def set_tensor(self, name: str, type_name: str, packed: Bytes) -> None:
        """Make weight `name` what a file with these packed bytes would have loaded.

        In swap_mode 'fake', and for a type wider than the file's, the values are written in the
        weight's own type instead.
        """
        kind = tensor_type(type_name).name
        own = kind == self._store.own_types.get(name)
        if own or (self.swap_mode == "real" and self._store.fits(name, kind)):
            self._store.write(name, kind, packed)
        else:
            self._store.write_values(name, kind, packed)
        self._swapped.add(name)
        self._refresh(name)

    def restore(self, name: str) -> None:
        """Put the model file's weight back, in the working type: bit-exact with the start."""
        self._store.load(name)
        self._swapped.discard(name)
        self._refresh(name)

    def restore_all(self) -> None:
        """Restore every weight that was set since the start."""
        for name in sorted(self._swapped):
            self.restore(name)

    @contextmanager
    def swapped(self, name: str, type_name: str, packed: Bytes) -> Iterator[None]:
        """`set_tensor` for the block, `restore` after it."""
        self.set_tensor(name, type_name, packed)
        try:
            yield
        finally:
            self.restore(name)

    def apply(self, layout: Mapping[str, str], packer: Packer) -> None:
        """Give the whole model this layout.

        Weights outside the layout, or at the file's own type in it, are the reference's. Names that
        no forward pass reads are left out, since they cannot change a logit.
        """
        changes = {
            name: layout[name]
            for name in self.weights
            if name in layout and layout[name] != self.model.tensor(name).type
        }
        for name in sorted(self._swapped - changes.keys()):
            self.restore(name)
        for name, type_name in changes.items():
            self.set_tensor(name, type_name, packer.pack(name, type_name))

    def close(self) -> None:
        """Free the context and the model; a second call does nothing."""
        self._close_context()
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _open_context(self) -> DecodeContext:
        if self._context is None:
            self._context = DecodeContext(
                self.loaded,
                n_ctx=self.options.n_ctx,
                max_sequences=self.options.max_sequences,
                threads=self.threads,
                flash_attn=self.options.flash_attn,
            )
        return self._context

    def _close_context(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def _refresh(self, name: str) -> None:
        # A view of the weight in a reused graph would keep the old type: build the graph anew.
        if self._store.find(name).viewed:
            self._close_context()

    def _check_logits(self) -> NDArray[np.float32]:
        n = min(CHECK_TOKENS, self.options.n_ctx)
        tokens = (np.arange(n, dtype=np.int64) * 7919 % self.n_vocab).astype(np.int32)
        return self._open_context().decode(tokens, [0], np.arange(n)).copy()


def _check_limits(options: SessionOptions, model: ModelFile, n_ctx_train: int) -> None:
    if options.n_ctx < 1 or (n_ctx_train and options.n_ctx > n_ctx_train):
        raise ConfigError(
            f"a context of {options.n_ctx} tokens was asked for and {model.name} was trained for "
            f"{n_ctx_train}; give --ctx between 1 and {n_ctx_train}"
        )
    if not 1 <= options.max_sequences <= lib.MAX_SEQUENCES:
        raise ConfigError(
            f"max_sequences is {options.max_sequences}; llama.cpp takes 1 to {lib.MAX_SEQUENCES}"
        )
