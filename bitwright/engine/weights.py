"""The model's weights inside llama.cpp: where they are, and how their type is swapped in place.

A weight's tensor is found as a source of the nodes of one small graph. Changing its type, strides
and bytes is what loading another file would have done, so logits are those of that file, bit for
bit. Bytes go through the backend only: the weight may live on an accelerator.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.ggml_types import row_bytes, tensor_type
from bitwright.engine.loaded_model import DecodeContext, LoadedModel
from bitwright.errors import EngineError

DISCOVERY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that the graph uses.

    `addresses`: its ggml_tensor structs (two when a tied embedding is copied to an accelerator).
    `operation`: the first node that reads it. `buffer`: the name of the memory it lives in.
    `viewed`: read through a view, which keeps the old type until the graph is built again.
    `capacity_bytes`: what its buffer holds, so the widest type it can be swapped to.
    """

    name: str
    addresses: tuple[int, ...]
    operation: str
    buffer: str
    viewed: bool
    n_per_row: int
    n_rows: int
    capacity_bytes: int


def find_weights(loaded: LoadedModel, names: Collection[str]) -> tuple[Weight, ...]:
    """The 2-D and 3-D weights of `names` that one forward pass reads, in graph order."""
    found: dict[str, Weight] = {}

    def watch(address: int, ask: bool) -> bool:
        node = lib.Tensor.from_address(address)
        for source in filter(None, node.src):
            _note_weight(found, names, source, lib.op_name(node.op))
        return False

    n = DISCOVERY_TOKENS
    tokens = np.arange(n, dtype=np.int32) % loaded.n_vocab
    with DecodeContext(loaded, n_ctx=n, max_sequences=1, threads=1, watcher=watch) as context:
        context.decode(tokens, [0], np.array([n - 1]))
    if not found:
        raise EngineError("no weight was seen in the model's graph: it cannot be probed in place")
    return tuple(found.values())


def _note_weight(
    found: dict[str, Weight], names: Collection[str], source: int, operation: str
) -> None:
    view_src = lib.Tensor.from_address(source).view_src
    address = view_src or source
    tensor = lib.Tensor.from_address(address)
    name = tensor.name.decode("utf-8", errors="replace")
    if name not in names or tensor.ne[1] * tensor.ne[2] * tensor.ne[3] < 2:
        return
    old = found.get(name)
    addresses = old.addresses if old else ()
    found[name] = Weight(
        name=name,
        addresses=addresses if address in addresses else (*addresses, address),
        operation=old.operation if old else operation,
        buffer=lib.buffer_name(tensor.buffer).decode(),
        viewed=bool(view_src) or (old.viewed if old else False),
        n_per_row=tensor.ne[0],
        n_rows=tensor.ne[1] * tensor.ne[2] * tensor.ne[3],
        capacity_bytes=lib.tensor_nbytes(address),
    )


def size_bytes(weight: Weight, type_name: str) -> int:
    """Bytes of the whole weight at `type_name`."""
    return row_bytes(type_name, weight.n_per_row) * weight.n_rows


def write_weight(weight: Weight, type_name: str, parts: Iterable[NDArray[np.uint8]]) -> None:
    """Make it a `type_name` tensor with these bytes, given in order in one or more parts."""
    total = size_bytes(weight, type_name)
    if total > weight.capacity_bytes:
        raise EngineError(
            f"{weight.name} at {type_name} takes {total} bytes and its buffer holds "
            f"{weight.capacity_bytes}: a weight can only be swapped to a type that is not wider"
        )
    for address in weight.addresses:
        _retype(address, type_name)
    offset = 0
    for part in parts:
        data = np.ascontiguousarray(part)
        if offset + data.nbytes > total:
            raise EngineError(f"more than {total} bytes were given for {weight.name}")
        for address in weight.addresses:
            lib.tensor_set(address, data.ctypes.data, offset, data.nbytes)
        offset += data.nbytes
    if offset != total:
        raise EngineError(f"{offset} of {total} bytes were given for {weight.name}")


def _retype(address: int, type_name: str) -> None:
    tensor = lib.Tensor.from_address(address)
    kind = tensor_type(type_name)
    if tensor.type == kind.id:
        return
    if not lib.buffer_is_host(tensor.buffer):
        # Accelerators read rows padded with zeros: leave no old bytes behind the shorter new ones.
        zeros = np.zeros(lib.tensor_nbytes(address), np.uint8)
        lib.tensor_set(address, zeros.ctypes.data, 0, zeros.nbytes)
    tensor.type = kind.id
    tensor.nb[0] = kind.block_bytes
    tensor.nb[1] = row_bytes(kind.name, tensor.ne[0])
    tensor.nb[2] = tensor.nb[1] * tensor.ne[1]
    tensor.nb[3] = tensor.nb[2] * tensor.ne[2]
