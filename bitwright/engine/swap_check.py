"""Does a type swapped in place compute what it should, on this backend?

One weight per kind of memory and operation is swapped to 4 bits and compared with fake-quant: the
same quantized values written in the weight's own float type, which needs no swap at all.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.ggml_types import fits_row
from bitwright.engine.packing import convert_rows, row_slices
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.weight_store import WeightStore
from bitwright.engine.weights import Weight
from bitwright.engine.working_type import FLOAT_BYTES
from bitwright.errors import EngineError

CHECK_TYPE = "Q4_0"
# The real swap also rounds activations to 8 bits, about a tenth of the error that 4-bit weights
# make; wrong strides or stale bytes make as much as that error or more.
TOLERANCE = 0.5
NOISE = 1e-3

Floats = NDArray[np.float32]
Compute = Callable[[], Floats]  # logits of one fixed batch, a copy


def failed_swap(store: WeightStore, compute: Compute, refresh: Callable[[str], None]) -> str | None:
    """What failed, as a note, or None when every kind of weight swaps as it should.

    `refresh(name)` is called after each write to a weight. Every weight is left as it was.
    """
    for weight in _one_of_each_kind(store):
        if not _swap_computes(store, weight.name, compute, refresh):
            return (
                f"the in-place type swap failed its check ({weight.name}, {weight.operation} in "
                f"{weight.buffer}): quantized values are computed in the reference's own type"
            )
    return None


def _one_of_each_kind(store: WeightStore) -> list[Weight]:
    kinds: dict[tuple[str, str], Weight] = {}
    for name, weight in store.weights.items():
        info = store.model.tensor(name)
        if (
            is_quantizable(info, store.model.arch)
            and store.own_types[name] in FLOAT_BYTES  # fake-quant is exact in floats only
            and fits_row(CHECK_TYPE, info.n_per_row)
        ):
            kinds[weight.buffer, weight.operation] = weight
    return list(kinds.values())


def _swap_computes(
    store: WeightStore, name: str, compute: Compute, refresh: Callable[[str], None]
) -> bool:
    info, raw = store.model.tensor(name), store.model.raw(name)
    packed = np.concatenate(
        [convert_rows(raw, info, first, n, CHECK_TYPE, None) for _, first, n in row_slices(info)]
    )
    base = compute()
    store.write_values(name, CHECK_TYPE, packed)
    fake = compute()
    try:
        store.write(name, CHECK_TYPE, packed)
        refresh(name)
        real = compute()
    except EngineError:
        return False
    finally:
        store.load(name)
        refresh(name)
    return bool(np.array_equal(base, compute())) and close_enough(base, fake, real)


def close_enough(base: Floats, fake: Floats, real: Floats) -> bool:
    """Whether rms(real−fake) ≤ max(0.5·rms(fake−base), 0.001·rms(base)); False for NaN.

    The second bound is for a weight that hardly matters on the batch.
    """

    def rms(x: Floats) -> float:
        return float(np.sqrt(np.square(x, dtype=np.float64).mean()))

    return rms(real - fake) <= max(TOLERANCE * rms(fake - base), NOISE * rms(base))
