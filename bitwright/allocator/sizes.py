"""Whole-file bytes as a sum: one term per tensor, and a rest that no choice of types changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.engine.gguf_file import DEFAULT_ALIGNMENT
from bitwright.engine.model_file import ModelFile
from bitwright.engine.quantized_file import Provenance, predict_size, tensor_file_bytes
from bitwright.engine.tensors import is_quantizable


@dataclass(frozen=True, slots=True)
class FileSizes:
    """Sizes of the files that a model can become.

    Attributes:
        alignment: of each quantizable tensor's data; kept shards but the first have the default.
        header_bytes: metadata and tensor table, of all files.
        plain_bytes: all tensors that are never quantized.
    """

    model: ModelFile
    alignment: Mapping[str, int]
    header_bytes: int
    plain_bytes: int

    def tensor_bytes(self, name: str, type_name: str) -> int:
        """Bytes that a quantizable tensor takes at that type, padding included."""
        return tensor_file_bytes(self.model.tensor(name), type_name, self.alignment[name])

    def total_bytes(self, types: Mapping[str, str]) -> int:
        """Bytes of all files; tensors that ``types`` does not name keep their type."""
        own = (
            self.tensor_bytes(name, types.get(name) or self.model.tensor(name).type)
            for name in self.alignment
        )
        return self.header_bytes + self.plain_bytes + sum(own)


def file_sizes(model: ModelFile, provenance: Provenance | None, *, keep_split: bool) -> FileSizes:
    """Measure the rest once, on the model as it is."""
    alignment = {t.name: _alignment(model, t.shard, keep_split) for t in model.tensors}
    contributions = {t.name: tensor_file_bytes(t, t.type, alignment[t.name]) for t in model.tensors}
    total = predict_size(model, {}, provenance, keep_split=keep_split)
    open_to_choice = [t.name for t in model.tensors if is_quantizable(t, model.arch)]
    plain = sum(contributions.values()) - sum(contributions[name] for name in open_to_choice)
    return FileSizes(
        model=model,
        alignment={name: alignment[name] for name in open_to_choice},
        header_bytes=total - sum(contributions.values()),
        plain_bytes=plain,
    )


def _alignment(model: ModelFile, shard: int, keep_split: bool) -> int:
    return DEFAULT_ALIGNMENT if keep_split and shard > 0 else model.alignment
