"""Layouts: tensor → type, and the text file that llama-quantize takes as it is.

The file has one rule per tensor, ``^blk\\.0\\.attn_q\\.weight$=Q3_K``. llama-quantize
(--tensor-type-file) splits it at white space, knows no comments, puts patterns into lower case,
searches (not matches) each tensor's name with them as ECMAScript expressions, and takes the first
that is found; types in any case. Anchored and escaped rules cannot meet one another, so that
their order does not matter. The reader here takes hand-written rules with the same meaning.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwright.allocator.option_set import listed
from bitwright.engine.atomic import write_atomic
from bitwright.engine.ggml_types import fallback_type, tensor_type
from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import PACKABLE
from bitwright.engine.tensors import file_order, is_quantizable
from bitwright.errors import InputError

MAX_FILE_BYTES = 16 << 20
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-/,:;")  # mean themselves, escape nothing
SPECIAL = frozenset(".^$*+?()[]{}|\\")
# What Python's expressions know and ECMAScript's do not: it would match something else there.
_PYTHON_ONLY = re.compile(r"\(\?(?![:=!])|\\[aAzZ]|[*+?}]\+")


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensor → type.

    Attributes:
        types: canonical type names; tensors that are not named stay as they are.
        notes: what a reader of rules has to know (overlaps, replaced types); not part of the hash.
    """

    types: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rule:
    text: str
    pattern: re.Pattern[bytes]  # std::regex works on bytes too
    type: str


def anchored_rule(name: str, type_name: str) -> str:
    """The rule for exactly that tensor.

    Capitals, '=' and spaces are written as ``\\xNN``: llama-quantize lowers the case of patterns,
    and splits rules at the others.
    """
    return f"^{''.join(map(_escaped, name))}$={tensor_type(type_name).name}"


def _escaped(char: str) -> str:
    if char in PLAIN:
        return char
    return f"\\{char}" if char in SPECIAL else "".join(f"\\x{b:02x}" for b in char.encode())


def format_layout(layout: Layout) -> str:
    """The file's text: one rule per line, in the order of the model file."""
    names = sorted(layout.types, key=file_order)
    return "".join(f"{anchored_rule(name, layout.types[name])}\n" for name in names)


def write_layout(layout: Layout, path: Path) -> None:
    """Write the file (temporary file, then rename).

    Raises:
        StorageError: it cannot be written there.
    """
    write_atomic(path, format_layout(layout).encode("ascii"))


def layout_sha256(layout: Layout) -> str:
    """Hash of the file that `write_layout` writes: 64 hexadecimal digits."""
    return hashlib.sha256(format_layout(layout).encode("ascii")).hexdigest()


def read_layout(path: Path, model: ModelFile) -> Layout:
    """Apply a file of rules to a model: for each tensor the first rule found in its name holds.

    The result names the quantizable tensors that some rule matches. Types that a tensor's rows
    cannot take are replaced as llama-quantize does it, and noted; so are overlapping rules.

    Raises:
        InputError: no such file, not text, a rule that cannot be read, matches no tensor of the
            model, or would change only tensors that are never quantized.
    """
    rules = [_parse_rule(token, path) for token in _read_text(path).split()]
    if not rules:
        raise InputError(f"{path} holds no rules: write one per tensor, pattern=type")
    matches = [[t for t in model.tensors if rule.pattern.search(t.name.encode())] for rule in rules]
    for rule, matched in zip(rules, matches, strict=True):
        _check_rule(rule, matched, path, model)
    types: dict[str, str] = {}
    by: dict[str, _Rule] = {}
    notes: list[str] = []
    for rule, matched in zip(rules, matches, strict=True):
        open_to_it = [t for t in matched if is_quantizable(t, model.arch)]
        taken = [t for t in open_to_it if t.name in types]
        if taken:
            notes.append(_overlap(rule, by, taken))
        for info in open_to_it:
            if info.name not in types:
                types[info.name] = fallback_type(rule.type, info.n_per_row)
                by[info.name] = rule
    notes += _replaced(model, types, by) + _left_out(model, types)
    ordered = {t.name: types[t.name] for t in model.tensors if t.name in types}
    return Layout(ordered, tuple(notes))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: no layout file")
        return data.decode("utf-8")
    except OSError as error:
        raise InputError(f"the layout {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text: give a layout file, pattern=type rules") from None


def _parse_rule(token: str, path: Path) -> _Rule:
    pattern, equals, type_name = token.partition("=")
    shown = token[:80]
    if not (pattern and equals and type_name):
        raise InputError(
            f"{path}: {shown!r} is no rule: write pattern=type, without comments, spaces or"
            " line breaks inside (llama-quantize takes none)"
        )
    if _PYTHON_ONLY.search(pattern):
        raise InputError(f"{path}: {shown!r} uses an expression that llama-quantize does not know")
    try:
        compiled = re.compile(pattern.lower().encode())
        kind = tensor_type(type_name).name
    except re.error as error:
        raise InputError(f"{path}: {shown!r} is no regular expression ({error})") from None
    except InputError as error:
        raise InputError(f"{path}: {shown!r}: {error}") from None
    if kind not in PACKABLE:
        raise InputError(f"{path}: {shown!r}: llama.cpp cannot pack {kind}, choose another type")
    return _Rule(token, compiled, kind)


def _check_rule(rule: _Rule, matched: Sequence[TensorInfo], path: Path, model: ModelFile) -> None:
    if not matched:
        raise InputError(
            f"{path}: the rule {rule.text!r} matches no tensor of {model.name}: correct or remove"
            " it (`bitwright inspect --json` lists the tensors)"
        )
    open_to_it = any(is_quantizable(t, model.arch) for t in matched)
    if not open_to_it and any(t.type != rule.type for t in matched):
        raise InputError(
            f"{path}: the rule {rule.text!r} would change only tensors that are never quantized"
            f" ({listed([t.name for t in matched])}): remove it"
        )


def _overlap(rule: _Rule, by: Mapping[str, _Rule], taken: Sequence[TensorInfo]) -> str:
    earlier = dict.fromkeys(by[t.name].text for t in taken)
    return (
        f"{rule.text} has no effect on {len(taken)} tensor(s) that an earlier rule"
        f" ({listed(list(earlier))}) decides: {listed([t.name for t in taken])}"
    )


def _replaced(model: ModelFile, types: Mapping[str, str], by: Mapping[str, _Rule]) -> list[str]:
    return [
        f"{name}: rows of {model.tensor(name).n_per_row} cannot be {by[name].type}, llama.cpp's"
        f" replacement {used} is used"
        for name, used in types.items()
        if used != by[name].type
    ]


def _left_out(model: ModelFile, types: Mapping[str, str]) -> list[str]:
    left = [t.name for t in model.tensors if is_quantizable(t, model.arch) and t.name not in types]
    if not left:
        return []
    return [
        f"no rule names {len(left)} quantizable tensor(s), which stay as they are (llama-quantize"
        f" would choose types of its own): {listed(left)}"
    ]
