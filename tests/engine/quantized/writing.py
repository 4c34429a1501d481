"""A packer without packing, and the shortest ways to write a file with it."""

import numpy as np

from bitwright.engine.ggml_types import fallback_type, row_bytes
from bitwright.engine.quantized_file import (
    Provenance,
    write_quantized,
)
from bitwright.engine.tensors import is_quantizable

OWN = Provenance(
    (
        ("bitwright.version", "0.1"),
        ("bitwright.layout_sha256", "0" * 64),
        ("bitwright.seed", 7),
        ("bitwright.target_bpw", 3.5),
    )
)


class ZeroPacker:
    """Right sizes, in two slices, all zero; `fill` goes into the first byte pair."""

    def __init__(self, model, fill=0, fail=None):
        self.model, self.fill, self.fail, self.asked = model, fill, fail, []

    def pack_slices(self, name, type_name):
        self.asked.append((name, type_name))
        info = self.model.tensor(name)
        packed = np.zeros((info.n_rows, row_bytes(type_name, info.n_per_row)), np.uint8)
        packed[0, :2] = np.frombuffer(np.uint16(self.fill).tobytes(), np.uint8)
        yield packed[:1]
        if self.fail:
            raise self.fail
        yield packed[1:].ravel()


def uniform(model, type_name):
    """Every quantizable tensor at one type, or what its row allows."""
    return {
        t.name: fallback_type(type_name, t.n_per_row)
        for t in model.tensors
        if is_quantizable(t, model.arch)
    }


def write(model, layout, out, *, packer=None, provenance=None, **options):
    packer = packer or ZeroPacker(model)
    return write_quantized(
        model, layout, out, packer=packer, ftype=11, provenance=provenance, **options
    )
