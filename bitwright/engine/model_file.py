"""A model on disk: one GGUF or a set of shards, checked, with its tensors in llama.cpp's order."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from bitwright.engine.ggml_types import TYPES
from bitwright.engine.gguf_file import GgufFile, TensorInfo
from bitwright.engine.locate import locate
from bitwright.engine.shards import base_name, read_shards
from bitwright.engine.tensors import OUTPUT, file_order, is_body, is_quantizable
from bitwright.errors import InputError

HASH_SLICE_BYTES = 16 << 20

# What a GGUF can be instead of a language model: general.type or architecture → sentence.
OTHER_TYPES = {
    "imatrix": "an importance matrix: pass it with --imatrix",
    "adapter": "a LoRA adapter: merge it into its model first (llama-export-lora)",
    "mmproj": "a multimodal projector: give the language model that it belongs to",
    "vocab": "a vocabulary without weights: give the model",
}
OTHER_ARCHS = {
    "clip": "a vision or audio projector (mmproj): give the language model that it belongs to",
    "eagle3": "a draft model for speculative decoding: give the model that it drafts for",
    "dflash": "a draft model for speculative decoding: give the model that it drafts for",
}
IMATRIX_SUFFIXES = (".in_sum2", ".counts")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A checked model.

    Attributes:
        path: the first shard.
        name: base name without folder, shard number and suffix.
        tensors: by block number, then by name; tensors outside blocks first.
        reference_type: the type that holds most weights of the body.
        synthetic_reference: some weights are quantized already, so that what is measured against
            is not the original model.
    """

    path: Path
    shards: tuple[GgufFile, ...]
    arch: str
    name: str
    tensors: tuple[TensorInfo, ...]
    reference_type: str
    synthetic_reference: bool
    by_name: Mapping[str, TensorInfo] = field(repr=False, compare=False)

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name.

        Raises:
            InputError: the model has none.
        """
        found = self.by_name.get(name)
        if found is None:
            raise InputError(
                f"{self.name} has no tensor {name}: `bitwright inspect --json` lists them"
            )
        return found

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of that name."""
        return name in self.by_name

    @property
    def is_tied(self) -> bool:
        """True when the token embedding is also the output head."""
        return OUTPUT not in self.by_name

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def alignment(self) -> int:
        """Alignment of the first shard's data, in bytes."""
        return self.shards[0].alignment

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the file."""
        info = self.tensor(name)
        return np.memmap(
            self.shards[info.shard].path,
            dtype=np.uint8,
            mode="r",
            offset=info.offset,
            shape=(info.size_bytes,),
        )

    def meta(self, key: str, default: object = None) -> object:
        """A decoded metadata value (arrays are tuples), or ``default``."""
        entry = self.shards[0].kv.get(key)
        return default if entry is None else entry.value

    def sha256(self) -> str:
        """Hash of the file; of several shards, the hash of their hashes in order."""
        digests = []
        for shard in self.shards:
            stat = shard.path.stat()
            digests.append(_file_sha256(shard.path, stat.st_size, stat.st_mtime_ns))
        whole = digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()
        return whole.hex()


@lru_cache(maxsize=64)
def _file_sha256(path: Path, size_bytes: int, mtime_ns: int) -> bytes:
    """Hash of a file; size and time are there so that a changed file is hashed again."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(HASH_SLICE_BYTES):
            digest.update(part)
    return digest.digest()


def open_model(
    spec: str | Path, *, allow_requantize: bool = False, revision: str | None = None
) -> ModelFile:
    """Open and check a model.

    Args:
        spec: 'demo' (the embedded model), 'hf:owner/repo/file.gguf' (optionally '@revision'),
            or a path: any shard of a split model will do.
        allow_requantize: accept a model that is quantized already.

    Raises:
        InputError: there is no such file, it is damaged, it is no language model, or it is
            quantized and that was not allowed.
    """
    path = locate(spec, revision=revision)
    shards = read_shards(path)
    arch = _check_kind(shards)
    tensors = tuple(
        sorted((t for shard in shards for t in shard.tensors), key=lambda t: file_order(t.name))
    )
    by_name = {t.name: t for t in tensors}
    if not tensors:
        raise InputError(f"{path} holds no tensors (a vocabulary only?): give the model itself")
    if len(by_name) != len(tensors):
        twice = next(name for name, n in Counter(t.name for t in tensors).items() if n > 1)
        raise InputError(f"{path}: tensor {twice} is in two shards: get the shards again")
    quantized = [t for t in tensors if TYPES[t.type].is_quantized and is_quantizable(t, arch)]
    if quantized and not allow_requantize:
        first = quantized[0]
        raise InputError(
            f"{path} is quantized already (tensor {first.name} is {first.type}): give the F32, F16"
            " or BF16 model, or accept the second loss with --allow-requantize"
        )
    return ModelFile(
        path=shards[0].path,
        shards=shards,
        arch=arch,
        name=base_name(path),
        tensors=tensors,
        reference_type=_reference_type(tensors, arch),
        synthetic_reference=bool(quantized),
        by_name=MappingProxyType(by_name),
    )


def other_kind(file: GgufFile) -> str | None:
    """What a GGUF is if it is no language model, with what to do; None if it may be one."""
    general_type = file.kv["general.type"].value if "general.type" in file.kv else "model"
    arch = file.kv["general.architecture"].value if "general.architecture" in file.kv else None
    if general_type in OTHER_TYPES:
        return OTHER_TYPES[str(general_type)]
    if arch in OTHER_ARCHS:
        return OTHER_ARCHS[str(arch)]
    if file.tensors and all(t.name.endswith(IMATRIX_SUFFIXES) for t in file.tensors):
        return OTHER_TYPES["imatrix"]
    return None


def _check_kind(shards: tuple[GgufFile, ...]) -> str:
    first = shards[0]
    other = other_kind(first)
    if other:
        raise InputError(f"{first.path} is {other}")
    entry = first.kv.get("general.architecture")
    arch = entry.value if entry else None
    if not isinstance(arch, str) or not arch:
        raise InputError(
            f"{first.path} does not say its architecture (general.architecture): it is no model"
            " that llama.cpp can load, convert it again"
        )
    return arch


def _reference_type(tensors: tuple[TensorInfo, ...], arch: str) -> str:
    weights: Counter[str] = Counter()
    for tensor in tensors:
        if is_quantizable(tensor, arch):
            weights[tensor.type] += tensor.n_elements * (1 if is_body(tensor.name) else 0)
    if not weights:
        return tensors[0].type
    return max(weights, key=lambda name: weights[name])
