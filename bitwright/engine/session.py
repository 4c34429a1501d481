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
from bitwright.engine.ggml_types import fits_row, tensor_type
from bitwright.engine.loaded_model import DecodeContext, LoadedModel, check_loadable
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import (
    Bytes,
    Packer,
    convert_rows,
    quantize_rows,
    row_slices,
    to_float32,
)
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.weights import Weight, find_weights, size_bytes, write_weight
from bitwright.errors import ConfigError, EngineError, InputError

__all__ = ["Session", "SessionOptions", "check_loadable", "resolve_threads"]

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
F16_MAX = 65504.0
CHECK_TYPE = "Q4_0"
CHECK_TOKENS = 16
# The real swap also rounds activations to 8 bits, about a tenth of the error that 4-bit weights
# make; wrong strides or stale bytes make as much as that error or more.
CHECK_TOLERANCE = 0.5
CHECK_NOISE = 1e-3


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How the model runs.

    `threads` 0 = the cores this process may use. `n_ctx`: most tokens of one batch.
    `gpu_layers`: passed on; negative = all. `working_type`: 'auto' = BF16 where the CPU multiplies
    it natively and no layer is offloaded, else the file's own; or 'file', 'F32', 'F16', 'BF16'.
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


def resolve_working_type(wanted: str, reference_type: str, gpu_layers: int) -> str:
    """The type that the body's weights are computed in; ConfigError when it is wider than they are.

    A requantized reference (already quantized file) stays as it is.
    """
    name = wanted.upper()
    if name not in {"AUTO", "FILE", *FLOAT_BYTES}:
        raise ConfigError(f"working type {wanted!r} is not one of auto, file, F32, F16, BF16")
    if name == "FILE" or (name == "AUTO" and reference_type not in FLOAT_BYTES):
        return reference_type
    if name == "AUTO":
        return "BF16" if lib.has_bf16() and gpu_layers == 0 else reference_type
    if FLOAT_BYTES[name] > FLOAT_BYTES.get(reference_type, 1):
        raise ConfigError(
            f"working type {name} is wider than the model's own {reference_type}: weights are "
            "converted in the place they were loaded to, so they cannot grow; use 'file' or a "
            "type that is not wider"
        )
    return name


class Session:
    """One loaded model, its swappable weights and a decode context.

    `weights`: names of the 2-D and 3-D weights that a forward pass reads, in graph order.
    `swap_mode`: 'real' or 'fake'. `notes`: what the report should say about this session.
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
        self._swapped: set[str] = set()
        self._context: DecodeContext | None = None
        self.loaded = LoadedModel(model, gpu_layers=self.options.gpu_layers)
        try:
            self._check_limits()
            found = find_weights(self.loaded, {info.name for info in model.tensors})
            self._weights = {weight.name: weight for weight in found}
            self._convert_all()
            self._check_swaps()
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
        return tuple(self._weights)

    def _check_limits(self) -> None:
        if not self.loaded.decodes:
            raise InputError(
                f"{self.model.path.name} (architecture '{self.model.arch}') is not a decoder-only "
                "language model; give a causal language model"
            )
        n_ctx, trained = self.options.n_ctx, self.loaded.n_ctx_train
        if n_ctx < 1 or (trained and n_ctx > trained):
            raise ConfigError(
                f"a context of {n_ctx} tokens was asked for and {self.model.path.name} was trained "
                f"for {trained}; give --ctx between 1 and {trained}"
            )
        if not 1 <= self.options.max_sequences <= lib.MAX_SEQUENCES:
            raise ConfigError(
                f"max_sequences is {self.options.max_sequences}; llama.cpp takes 1 to "
                f"{lib.MAX_SEQUENCES}"
            )

    # -- logits ---------------------------------------------------------------------------------

    def logits(
        self, tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Logits (len(rows), n_vocab) of one batch, as a view: copy it before the next call.

        `tokens` (n ≤ n_ctx,) hold independent sequences, the j-th being
        tokens[starts[j]:starts[j+1]] with positions from 0; `rows` are ascending positions in
        `tokens` whose next token is wanted. Deterministic. Raises ConfigError for a batch that
        does not fit, EngineError naming the row when a logit is NaN or infinite.
        """
        rows = np.asarray(rows, np.int64)
        self._check_batch(tokens, starts, rows)
        view = self._open_context().decode(tokens, starts, rows)
        # A sum is finite only if every term is, and costs a fraction of the forward pass.
        with np.errstate(invalid="ignore", over="ignore"):
            finite = np.isfinite(view.sum(axis=1))
        if not finite.all():
            bad = np.flatnonzero(~finite)
            position = int(rows[bad[0]])
            sequence = int(np.searchsorted(np.asarray(starts), position, side="right")) - 1
            raise EngineError(
                f"{len(bad)} of {len(rows)} rows of logits are NaN or infinite, first row "
                f"{bad[0]} (token {position}, sequence {sequence}); this result cannot be scored"
            )
        return view

    def _check_batch(
        self, tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
    ) -> None:
        n, limit = len(tokens), self.options.n_ctx
        if not 0 < n <= limit:
            raise ConfigError(f"a batch has {n} tokens and the session's context takes 1 to {limit}")
        if len(starts) > self.options.max_sequences:
            raise ConfigError(
                f"a batch has {len(starts)} sequences and the session takes "
                f"{self.options.max_sequences}; raise max_sequences"
            )
        first = np.asarray(starts, np.int64)
        if len(first) == 0 or first[0] != 0 or (np.diff(first, append=n) < 1).any():
            raise ConfigError(f"starts {list(starts)[:8]} do not cut {n} tokens into sequences")
        if len(rows) == 0 or rows[0] < 0 or rows[-1] >= n or (np.diff(rows) < 1).any():
            raise ConfigError(f"rows must be ascending positions below {n}, without repeats")
        if int(np.min(tokens)) < 0 or int(np.max(tokens)) >= self.n_vocab:
            raise ConfigError(
                f"a token id is outside 0…{self.n_vocab - 1}: the text was tokenized for another "
                "model"
            )

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

    # -- weights --------------------------------------------------------------------------------

    def set_tensor(self, name: str, type_name: str, packed: Bytes) -> None:
        """Make weight `name` what a file with these packed bytes would have loaded."""
        weight = self._weight(name)
        if tensor_type(type_name).name == self._own_type(weight):
            self._write(weight, type_name, [packed])
        elif self.swap_mode == "fake" or size_bytes(weight, type_name) > weight.capacity_bytes:
            self._write_values(weight, type_name, packed)
        else:
            self._write(weight, type_name, [packed])
        self._swapped.add(name)

    def restore(self, name: str) -> None:
        """Put the model file's weight back, in the working type: bit-exact with the start."""
        self._load_from_file(self._weight(name))
        self._swapped.discard(name)

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
        """Make the whole model what a file of this layout would have loaded.

        Weights outside the layout are restored; names that no forward pass reads are left out,
        since they cannot change a logit.
        """
        for name in sorted(self._swapped - layout.keys()):
            self.restore(name)
        for name in self.weights:
            if name in layout:
                self.set_tensor(name, layout[name], packer.pack(name, layout[name]))

    def _weight(self, name: str) -> Weight:
        if name not in self._weights:
            raise InputError(
                f"{name} is not a weight that {self.model.path.name} reads in a forward pass, so "
                "it can be neither swapped nor measured"
            )
        return self._weights[name]

    def _own_type(self, weight: Weight) -> str:
        """The type the weight has when it is not swapped."""
        info = self.model.tensor(weight.name)
        if info.type not in FLOAT_BYTES or self.working_type not in FLOAT_BYTES:
            return info.type
        if not is_quantizable(info, self.model.arch):
            return info.type
        fits = FLOAT_BYTES[self.working_type] <= FLOAT_BYTES[info.type]
        return self.working_type if fits else info.type

    def _write(self, weight: Weight, type_name: str, parts: Sequence[Bytes]) -> None:
        write_weight(weight, tensor_type(type_name).name, parts)
        if weight.viewed and self._context is not None:
            # A view in a reused graph would keep the old type: build the graph anew.
            self._context.close()
            self._context = None

    def _write_values(self, weight: Weight, type_name: str, packed: Bytes) -> None:
        n_elements = weight.n_rows * weight.n_per_row
        values = to_float32(packed, type_name, n_elements).reshape(-1, weight.n_per_row)
        own = self._own_type(weight)
        self._write(weight, own, [quantize_rows(values, own)])

    def _load_from_file(self, weight: Weight) -> None:
        info = self.model.tensor(weight.name)
        own, raw = self._own_type(weight), self.model.raw(weight.name)
        if own == info.type:
            write_weight(weight, own, [raw])
        else:
            write_weight(
                weight,
                own,
                (convert_rows(raw, info, first, n, own, None) for _, first, n in row_slices(info)),
            )
        if weight.viewed and self._context is not None:
            self._context.close()
            self._context = None

    def _convert_all(self) -> None:
        for weight in self._weights.values():
            info = self.model.tensor(weight.name)
            own = self._own_type(weight)
            if own == info.type:
                continue
            if own == "F16":
                self._check_f16_range(weight)
            self._load_from_file(weight)

    def _check_f16_range(self, weight: Weight) -> None:
        info, raw = self.model.tensor(weight.name), self.model.raw(weight.name)
        stride = raw.nbytes // info.n_rows
        for _, first, n in row_slices(info):
            part = raw[first * stride : (first + n) * stride]
            if np.abs(to_float32(part, info.type, n * info.n_per_row)).max() > F16_MAX:
                raise ConfigError(
                    f"{weight.name} holds values above {F16_MAX:.0f}, which F16 cannot represent; "
                    "use working type BF16 or file"
                )

    # -- self-check -----------------------------------------------------------------------------

    def _check_swaps(self) -> None:
        """Swap one weight per kind of memory and operation; fall back to 'fake' where it fails."""
        kinds: dict[tuple[str, str], Weight] = {}
        for weight in self._weights.values():
            info = self.model.tensor(weight.name)
            if (
                is_quantizable(info, self.model.arch)
                and fits_row(CHECK_TYPE, info.n_per_row)
                and size_bytes(weight, CHECK_TYPE) <= weight.capacity_bytes
                and self._own_type(weight) != CHECK_TYPE
            ):
                kinds[weight.buffer, weight.operation] = weight
        if not kinds:
            self.notes.append(f"no weight takes {CHECK_TYPE}, so the in-place swap was not checked")
        for (buffer, operation), weight in kinds.items():
            if not self._swap_computes(weight):
                self.swap_mode = "fake"
                self.notes.append(
                    f"the in-place type swap failed its check ({weight.name}, {operation} in "
                    f"{buffer}): quantized values are computed in {self.working_type} instead"
                )
                return

    def _swap_computes(self, weight: Weight) -> bool:
        """Real swap against the same values written in the weight's own type (fake-quant)."""
        info, raw = self.model.tensor(weight.name), self.model.raw(weight.name)
        packed = np.concatenate(
            [convert_rows(raw, info, first, n, CHECK_TYPE, None) for _, first, n in row_slices(info)]
        )
        base = self._check_logits()
        try:
            self._write_values(weight, CHECK_TYPE, packed)
            fake = self._check_logits()
            self._write(weight, CHECK_TYPE, [packed])
            real = self._check_logits()
        finally:
            self._load_from_file(weight)
        restored = np.array_equal(base, self._check_logits())
        return restored and close_enough(base, fake, real)

    def _check_logits(self) -> NDArray[np.float32]:
        n = min(CHECK_TOKENS, self.options.n_ctx)
        tokens = (np.arange(n, dtype=np.int64) * 7919 % self.n_vocab).astype(np.int32)
        return self._open_context().decode(tokens, [0], np.arange(n)).copy()

    # -- life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the context and the model; a second call does nothing."""
        if self._context is not None:
            self._context.close()
            self._context = None
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def close_enough(
    base: NDArray[np.float32], fake: NDArray[np.float32], real: NDArray[np.float32]
) -> bool:
    """Whether a real swap agrees with fake-quant: rms(real−fake) at most half of rms(fake−base),
    or a thousandth of rms(base) where the weight hardly matters. False for NaN.
    """

    def rms(x: NDArray[np.float32]) -> float:
        return float(np.sqrt(np.square(x, dtype=np.float64).mean()))

    return rms(real - fake) <= max(CHECK_TOLERANCE * rms(fake - base), CHECK_NOISE * rms(base))
