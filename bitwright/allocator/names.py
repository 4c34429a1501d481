"""Honest names: a stock type's name only for files whose weights are that type.

The share counts the body's weights: without token embeddings, output head, and whatever is never
quantized. The K family's names promise that no IQ type is inside, which some backends decode
slowly.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.allocator.layout import Layout
from bitwright.allocator.rules import Rules, load_rules
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.engine.upstream import FTYPES, default_type
from bitwright.errors import ConfigError

MAX_STEM = 120  # characters; file systems allow 255 bytes, temporary names need some of them

_PRECISION = re.compile(r"[-_. ](?:f16|f32|bf16|fp16|fp32)$", re.IGNORECASE)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Share:
    """A type's part of the body: of its weights, and of its tensors; 0 to 1."""

    type: str
    by_weights: float
    by_tensors: float


@dataclass(frozen=True, slots=True)
class HonestName:
    """A file's name, and the sentence that justifies it."""

    name: str
    reason: str


def body_shares(layout: Layout | Mapping[str, str], model: ModelFile) -> list[Share]:
    """Every type of the body with its shares, the most weights first."""
    types = layout.types if isinstance(layout, Layout) else layout
    weights: dict[str, int] = {}
    tensors: dict[str, int] = {}
    for info in model.tensors:
        if is_body(info.name) and is_quantizable(info, model.arch):
            kind = types.get(info.name, info.type)
            weights[kind] = weights.get(kind, 0) + info.n_elements
            tensors[kind] = tensors.get(kind, 0) + 1
    n_weights, n_tensors = sum(weights.values()), sum(tensors.values())
    shares = [Share(kind, weights[kind] / n_weights, tensors[kind] / n_tensors) for kind in weights]
    return sorted(shares, key=lambda one: (-one.by_weights, one.type))


def honest_name(
    layout: Layout | Mapping[str, str], model: ModelFile, *, target: str, size_bytes: int
) -> HonestName:
    """The stock name that the layout has earned, else a neutral one with its bits per weight.

    Args:
        target: the category that leads a neutral name.
        size_bytes: of the whole file; its bits are counted over all weights of the model.
    """
    types = layout.types if isinstance(layout, Layout) else layout
    rules = load_rules()
    bpw = 8 * size_bytes / sum(t.n_elements for t in model.tensors)
    neutral = f"{target}-{bpw:.2f}bpw"
    shares = body_shares(layout, model)
    if not shares:
        return HonestName(neutral, "the model has no tensors that could carry a type's name")
    most = shares[0]
    found = f"{most.by_weights:.1%} of the body's weights ({most.by_tensors:.1%} of its tensors)"
    if TYPES[most.type].family == "K":
        quantizable = [t for t in model.tensors if is_quantizable(t, model.arch)]
        foreign = {types.get(t.name, t.type) for t in quantizable}
        foreign = {kind for kind in foreign if TYPES[kind].family == "IQ"}
        if foreign:
            return HonestName(
                neutral,
                f"{found} are {most.type}, but a K name never holds IQ types, and"
                f" {', '.join(sorted(foreign))} is inside",
            )
    earned, least = _earned(most, rules)
    if earned is None:
        return HonestName(neutral, f"{found} are {most.type}; its name needs at least {least:.0%}")
    return HonestName(earned, f"{found} are {most.type}; the name needs at least {least:.0%}")


def _earned(share: Share, rules: Rules) -> tuple[str | None, float]:
    """The first name whose least share is met, and that share; None and the least of all."""
    letters = rules.sizes.get(share.type, ())
    names = {f"{share.type}_{letter}": getattr(rules.shares, letter) for letter in letters}
    names = names or {share.type: rules.shares.whole}
    met = {name: least for name, least in names.items() if share.by_weights >= least}
    if not met:
        return None, min(names.values())
    name = max(met, key=lambda one: met[one])
    return name, met[name]


def nominal_ftype(layout: Layout | Mapping[str, str], model: ModelFile) -> str:
    """The stock type for general.file_type: the one whose own type most body weights have.

    Among Q3_K_S, Q3_K_M and Q3_K_L it is the name that the layout has earned, else the plainest.
    Readers only show it; types that no stock type is named after are passed over.
    """
    rules = load_rules()
    for share in body_shares(layout, model):
        named = [name for name in FTYPES if default_type(name) == share.type]
        earned, _ = _earned(share, rules)
        for wanted in (earned, share.type):
            if wanted in named:
                return wanted
        if named:
            return named[0]
    return model.reference_type if model.reference_type in FTYPES else "F16"


def file_stem(model_name: str, target: str, name: str) -> str:
    """The file name without suffix: 'demo-F16', 'code', 'code-3.81bpw' → 'demo-code-3.81bpw'.

    Raises:
        ConfigError: nothing is left of it that may stand in a file name.
    """
    base = _PRECISION.sub("", model_name) or model_name
    tail = name if name.startswith(f"{target}-") else f"{target}-{name}"
    safe_tail = _safe(tail)
    safe_base = _safe(base)[: max(1, MAX_STEM - len(safe_tail) - 1)].rstrip(".-")
    stem = "-".join(part for part in (safe_base, safe_tail) if part)
    if not stem:
        raise ConfigError(f"no file name can be made from {model_name!r}, {target!r} and {name!r}")
    return stem


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text).strip(".-")
