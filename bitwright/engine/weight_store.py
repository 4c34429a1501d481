"""The swappable weights of a loaded model: from the file, as packed bytes, or as values."""

from collections.abc import Iterator

import numpy as np

from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.loaded_model import LoadedModel
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import (
    Bytes,
    convert_rows,
    quantize_rows,
    row_slices,
    to_float32,
)
from bitwright.engine.weights import Weight, find_weights, size_bytes, write_weight
from bitwright.engine.working_type import own_type
from bitwright.errors import ConfigError, InputError

F16_MAX = 65504.0


class WeightStore:
    """Weights by name, in graph order, and the type each has while it is not swapped."""

    def __init__(self, loaded: LoadedModel, model: ModelFile, working_type: str) -> None:
        self.model = model
        self.weights = {w.name: w for w in find_weights(loaded, model.by_name.keys())}
        self.own_types = {
            name: own_type(model.tensor(name), model.arch, working_type) for name in self.weights
        }

    def find(self, name: str) -> Weight:
        """The weight of that name; InputError when no forward pass reads it."""
        if name not in self.weights:
            raise InputError(
                f"{name} is not a weight that {self.model.name} reads in a forward pass, so it can "
                "be neither swapped nor measured"
            )
        return self.weights[name]

    def fits(self, name: str, type_name: str) -> bool:
        """Whether the weight's buffer holds it at `type_name`."""
        weight = self.find(name)
        return size_bytes(weight, type_name) <= weight.capacity_bytes

    def write(self, name: str, type_name: str, packed: Bytes) -> None:
        """Make it a tensor of `type_name` with these bytes."""
        write_weight(self.find(name), type_name, [packed])

    def write_values(self, name: str, type_name: str, packed: Bytes) -> None:
        """Write what these packed bytes stand for, in the weight's own type (fake-quant)."""
        weight, own = self.find(name), self.own_types[name]
        values = to_float32(packed, type_name, weight.n_rows * weight.n_per_row)
        self.write(name, own, quantize_rows(values.reshape(-1, weight.n_per_row), own))

    def load(self, name: str) -> None:
        """Write the model file's weight, in its own type: the state right after the start."""
        weight, own = self.find(name), self.own_types[name]
        info, raw = self.model.tensor(name), self.model.raw(name)
        if own == info.type:
            write_weight(weight, own, [raw])
        else:
            parts = (
                convert_rows(raw, info, first, n, own, None) for _, first, n in row_slices(info)
            )
            write_weight(weight, own, parts)

    def convert_all(self) -> None:
        """Bring every weight that has another type in the file to its own type.

        Raises ConfigError when a value is beyond what F16 can hold.
        """
        for name, own in self.own_types.items():
            info = self.model.tensor(name)
            if own == info.type:
                continue
            if own == "F16" and any(peak > F16_MAX for peak in self._peaks(info)):
                raise ConfigError(
                    f"{name} holds values above {F16_MAX:.0f}, which F16 cannot represent; use "
                    "working type BF16 or file"
                )
            self.load(name)

    def _peaks(self, info: TensorInfo) -> Iterator[float]:
        raw = self.model.raw(info.name)
        stride = raw.nbytes // info.n_rows
        for _, first, n in row_slices(info):
            values = to_float32(
                raw[first * stride : (first + n) * stride], info.type, n * info.n_per_row
            )
            yield float(np.abs(values).max())
