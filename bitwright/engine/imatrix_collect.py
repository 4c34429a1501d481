"""The importance matrix: sums of squared inputs of every weight, gathered while text runs through.

Which nodes count, and how rows are counted, follows llama.cpp's llama-imatrix (tools/imatrix): a
MUL_MAT counts from 16 rows of F32 on and only for weights of blocks; a MUL_MAT_ID counts each
token once per expert it was routed to.

llama-imatrix leaves the output and the token embedding out, as its layouts keep them large. Ours
do not: at few bits they are packed much better with importance (benchmarks/heads_imatrix.py).
The output is a product as any other; a tied embedding counts as the output that it is. The rows of
an untied embedding are looked up, nothing is multiplied with them: `embedding_importance`.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.imatrix_file import Imatrix, ImatrixEntry
from bitwright.engine.loaded_model import DecodeContext
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import to_float32
from bitwright.engine.session import Session
from bitwright.engine.tensors import OUTPUT
from bitwright.errors import EngineError, InputError

LEAST_ROWS = 16
LEAST_SHARE = 1e-3  # of the mean, that an embedding's column counts at least
EMBEDDING, FIRST_NORM = "token_embd.weight", "blk.0.attn_norm.weight"
F32_ID, I32_ID = 0, 26

# Part of the keys of collected ones. 2 (2026-11): with the embedding and the output.
IMATRIX_VERSION = 2

Batch = tuple[NDArray[np.int32], Sequence[int]]


def collect_imatrix(
    session: Session,
    batches: Iterable[Batch],
    *,
    dataset: str,
    heads: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Imatrix:
    """Run batches (tokens, starts) through the session's model and gather its imatrix.

    `heads` adds the output and the token embedding, which llama-imatrix leaves out. `progress` gets
    the number of batches done. Raises InputError without a batch, EngineError naming the weight
    whose inputs are NaN or infinite.
    """
    names = {info.name for info in session.model.tensors}
    collector = _Collector(names, heads=heads)
    n_batches = n_tokens = 0
    with DecodeContext(
        session.loaded,
        n_ctx=session.options.n_ctx,
        max_sequences=session.options.max_sequences,
        threads=session.threads,
        flash_attn=session.options.flash_attn,
        watcher=collector.watch,
    ) as context:
        for tokens, starts in batches:
            # Every position is an output: where few are, the last block computes only those.
            context.decode(tokens, starts, np.arange(len(tokens)))
            n_batches, n_tokens = n_batches + 1, n_tokens + len(tokens)
            if progress:
                progress(n_batches)
    if not collector.sums:
        raise InputError(
            f"{n_tokens} tokens in {n_batches} batches gave no importance data; batches need at "
            f"least {LEAST_ROWS} tokens each"
        )
    chunk_size = session.options.n_ctx
    entries = collector.entries()
    importance = embedding_importance(session.model) if heads and EMBEDDING not in entries else None
    if importance is not None:
        counts = np.array([n_tokens], np.float32)
        entry = ImatrixEntry((importance * counts)[None, :], counts)
        entries = dict(sorted({**entries, EMBEDDING: entry}.items()))
    return Imatrix(
        entries=entries,
        chunk_count=-(-n_tokens // chunk_size),
        chunk_size=chunk_size,
        datasets=(dataset,),
    )


def embedding_importance(model: ModelFile) -> NDArray[np.float32] | None:
    """Importance (n_embd,) of an embedding's columns; None where the first block has no norm.

    What a column's error does to the first block goes through its norm: squared, the norm's weight.
    """
    norm, embedding = model.by_name.get(FIRST_NORM), model.by_name.get(EMBEDDING)
    if norm is None or embedding is None or norm.n_elements != embedding.n_per_row:
        return None
    found = np.square(to_float32(model.raw(FIRST_NORM), norm.type, norm.n_elements))
    mean = found.mean()
    # Columns that the norm switches off still go on beside it, and some packers divide by sums.
    return np.maximum(found, LEAST_SHARE * mean) if np.isfinite(mean) and mean > 0 else None


class _Collector:
    """Sums in float64 and counts per weight; fed by the graph's nodes."""

    def __init__(self, names: set[str], *, heads: bool) -> None:
        self.names = names
        self.heads = heads
        self.sums: dict[str, NDArray[np.float64]] = {}
        self.counts: dict[str, NDArray[np.int64]] = {}

    def watch(self, address: int, ask: bool) -> bool:
        node = lib.Tensor.from_address(address)
        operation = lib.op_name(node.op)
        if operation not in ("MUL_MAT", "MUL_MAT_ID"):
            return False
        name = weight_name(lib.Tensor.from_address(node.src[0]).name)
        if name not in self.names or not self._counts(name, operation, node):
            return False
        if not ask:
            if operation == "MUL_MAT_ID":
                self._add_routed(name, node)
            else:
                self._add_dense(name, node)
            if not np.isfinite(self.sums[name]).all():
                raise EngineError(
                    f"the inputs of {name} are NaN or infinite: no importance can be had from "
                    "this model and text; check the model file"
                )
        return True

    def _counts(self, name: str, operation: str, node: lib.Tensor) -> bool:
        if operation == "MUL_MAT_ID":
            return True
        inputs = lib.Tensor.from_address(node.src[1])
        body = name.startswith("blk.") or (self.heads and name in (OUTPUT, EMBEDDING))
        return bool(body and inputs.ne[1] >= LEAST_ROWS and inputs.type == F32_ID)

    def _prepare(self, name: str, n_matrices: int, n_counts: int, n_per_row: int) -> None:
        if name not in self.sums:
            self.sums[name] = np.zeros((n_matrices, n_per_row))
            self.counts[name] = np.zeros(n_counts, np.int64)

    def _add_dense(self, name: str, node: lib.Tensor) -> None:
        weight = lib.Tensor.from_address(node.src[0])
        x = read_tensor(node.src[1])  # (ne3, ne2, rows, n_per_row)
        n3, n2 = weight.ne[3], weight.ne[2]
        self._prepare(name, n3 * n2, 1, x.shape[-1])
        for i3 in range(x.shape[0]):
            for i2 in range(x.shape[1]):
                matrix = (i3 % n3) * n2 + i2 % n2
                self.sums[name][matrix] += squares(x[i3, i2])
        self.counts[name] += x.shape[0] * x.shape[1] * x.shape[2] // (n3 * n2)

    def _add_routed(self, name: str, node: lib.Tensor) -> None:
        n_experts = lib.Tensor.from_address(node.src[0]).ne[2]
        x = read_tensor(node.src[1])[0]  # (tokens, used or 1, n_per_row)
        experts = read_tensor(node.src[2])[0, 0]  # (tokens, used)
        self._prepare(name, n_experts, n_experts, x.shape[-1])
        for expert in np.unique(experts):
            token, slot = np.nonzero(experts == expert)
            self.sums[name][expert] += squares(x[token, slot % x.shape[1]])
            self.counts[name][expert] += len(token)

    def entries(self) -> dict[str, ImatrixEntry]:
        """One entry per weight, sorted by name; a dense 3-D weight has one count for all."""
        return {
            name: ImatrixEntry(
                sums=self.sums[name].astype(np.float32),
                counts=self.counts[name].astype(np.float32),
            )
            for name in sorted(self.sums)
        }


def weight_name(raw: bytes) -> str:
    """A weight's name without what the scheduler adds: 'CUDA0#blk.0.attn_k.weight#0'."""
    text = raw.decode("utf-8", errors="replace")
    _, mark, rest = text.partition("#")
    return rest.partition("#")[0] if mark else text


def squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum of squares of each column of (rows, n)."""
    sums: NDArray[np.float64] = np.einsum("ij,ij->j", rows, rows).astype(np.float64)
    return sums


def read_tensor(address: int) -> NDArray[np.float32] | NDArray[np.int32]:
    """A graph tensor's values as (ne3, ne2, ne1, ne0), F32 or I32, strides respected."""
    tensor = lib.Tensor.from_address(address)
    if tensor.type not in (F32_ID, I32_ID):
        raise EngineError(f"an input has type id {tensor.type}, only F32 and I32 can be read")
    data = np.empty(lib.tensor_nbytes(address), np.uint8)
    lib.tensor_get(address, data.ctypes.data, 0, data.nbytes)
    dtype = np.float32 if tensor.type == F32_ID else np.int32
    return np.ndarray(
        shape=tuple(reversed(tensor.ne)),
        dtype=dtype,
        buffer=data,
        strides=tuple(reversed(tensor.nb)),
    )
