"""llama.cpp's own quantization of a model: the layout its heuristic chooses, and the file itself.

Both call llama_model_quantize, so a baseline is exactly what users of llama-quantize get. The
layout is read from the log of a dry run, since the library offers no other way to ask for it.
"""

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bitwright.engine import lib
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.imatrix_file import Imatrix
from bitwright.engine.lib import llama
from bitwright.engine.model_file import ModelFile
from bitwright.errors import ConfigError, EngineError

# llama_ftype numbers of llama.h, under the names that llama-quantize takes.
FTYPES: Mapping[str, int] = MappingProxyType(
    {"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7}
    | {"Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14}
    | {"Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31}
    | {"IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22}
    | {"IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25, "IQ4_XS": 30}
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
)

# llama_ftype_get_default_type, where it is not the name without its size letter.
_DEFAULT_TYPES = {"IQ3_XS": "IQ3_S", "IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_M": "IQ3_S"}

# '[  12/  47] blk.0.attn_q.weight - [ 256, 256, 1, 1], type = f16, size = 0.12 MiB -> … (q4_K)'
_LOG_LINE = re.compile(
    r"^\[ *\d+/ *\d+\] (?P<name>.+?) +- \[[^\]]*\], type = +(?P<old>\S+), "
    r"size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((?P<new>\S+)\))?$",
    re.MULTILINE,
)
_REGEX_SPECIALS = re.compile(r"([.^$*+?()\[\]{}|\\])")


def ftype_name(name: str) -> str:
    """The canonical ftype of a user's spelling ('q4_k' → 'Q4_K_M'); ConfigError lists them all."""
    upper = name.strip().upper()
    canonical = ALIASES.get(upper, upper)
    if canonical not in FTYPES:
        raise ConfigError(f"{name!r} is not a stock type; use one of {', '.join(sorted(FTYPES))}")
    return canonical


def default_type(name: str) -> str:
    """The tensor type that most of the body gets in that ftype: 'Q3_K_S' → 'Q3_K'."""
    canonical = ftype_name(name)
    if canonical in _DEFAULT_TYPES:
        return _DEFAULT_TYPES[canonical]
    return re.sub(r"(_K)_[SML]$", r"\1", canonical)


def anchored(name: str) -> str:
    """A pattern that matches this tensor's name only, for std::regex as for Python."""
    return "^" + _REGEX_SPECIALS.sub(r"\\\1", name) + "$"


def upstream_layout(
    model: ModelFile,
    ftype: str,
    *,
    imatrix: Imatrix | None = None,
    has_imatrix: bool | None = None,
) -> dict[str, str]:
    """Tensor → type that llama_model_quantize gives every tensor, in its order.

    An imatrix changes the choice only by being there, so `has_imatrix` is enough. EngineError when
    the dry run fails or its log does not name every tensor of the model once.
    """
    given = has_imatrix if has_imatrix is not None else imatrix is not None
    params = _parameters(model, ftype, threads=1)
    params.dry_run = True
    presence = {"presence": np.ones(1, np.float32)} if given else {}
    keep = _attach_imatrix(params, presence)
    log = _run(model, Path(os.devnull), params)
    del keep
    layout = parse_dry_run(log.text)
    missing = {info.name for info in model.tensors} ^ layout.keys()
    if missing:
        raise EngineError(
            f"the dry run of {ftype} does not name the model's {len(model.tensors)} tensors "
            f"(first difference: {min(missing)}): its log has another form than that of the "
            "pinned build"
        )
    return layout


def parse_dry_run(text: str) -> dict[str, str]:
    """Tensor → type from the log of a dry run; EngineError when a tensor appears twice."""
    layout: dict[str, str] = {}
    for match in _LOG_LINE.finditer(text):
        if match["name"] in layout:
            raise EngineError(f"the dry run names {match['name']} twice")
        layout[match["name"]] = tensor_type(match["new"] or match["old"]).name
    return layout


def upstream_quantize(
    model: ModelFile,
    out: Path,
    ftype: str,
    imatrix: Imatrix | None,
    layout: Mapping[str, str] | None = None,
    threads: int = 1,
) -> None:
    """Write llama_model_quantize's file of the model; `out` appears only when it is complete.

    `layout` overrides its heuristic: it has to name every tensor that is to be quantized, because
    a partial list shifts the counters by which upstream favours some layers. Raises ConfigError
    for a layout with a float ftype (upstream then ignores it without a word), EngineError with
    llama.cpp's own words when it fails.
    """
    canonical = ftype_name(ftype)
    if layout is not None and canonical in {"F32", "F16", "BF16"}:
        raise ConfigError(
            f"llama.cpp ignores a layout when the ftype is {canonical}; give a quantized ftype"
        )
    params = _parameters(model, canonical, threads)
    values = {}
    if imatrix is not None:
        found = {name: imatrix.importance(name) for name in imatrix.entries}
        values = {name: array for name, array in found.items() if array is not None}
    keep = (_attach_imatrix(params, values), _attach_layout(params, layout))
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        _run(model, temporary, params)
        del keep
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _parameters(model: ModelFile, ftype: str, threads: int) -> Any:
    params = llama.llama_model_quantize_default_params()
    params.ftype = FTYPES[ftype_name(ftype)]
    params.nthread = threads
    params.allow_requantize = model.synthetic_reference
    return params


def _attach_imatrix(params: Any, values: Mapping[str, np.ndarray[Any, Any]]) -> object:
    """Point `params` at the values (ends with a null name); keep what is returned alive."""
    if not values:
        return None
    array = (llama.llama_model_imatrix_data * (len(values) + 1))()
    kept = []
    for entry, (name, importance) in zip(array, values.items(), strict=False):
        flat = np.ascontiguousarray(importance, np.float32).reshape(-1)
        entry.name, entry.size = name.encode(), flat.size
        entry.data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        kept.append(flat)
    params.imatrix = array
    return array, kept


def _attach_layout(params: Any, layout: Mapping[str, str] | None) -> object:
    """Point `params` at one anchored rule per tensor (ends with a null pattern); keep alive."""
    if layout is None:
        return None
    array = (llama.llama_model_tensor_override * (len(layout) + 1))()
    for entry, (name, type_name) in zip(array, layout.items(), strict=False):
        entry.pattern, entry.type = anchored(name).encode(), tensor_type(type_name).id
    params.tt_overrides = array
    return array


def _run(model: ModelFile, out: Path, params: Any) -> lib.LogCapture:
    source = model.shards[0].path
    with lib.capture_log() as log:
        code = llama.llama_model_quantize(
            os.fsencode(source), os.fsencode(out), ctypes.byref(params)
        )
    if code != 0:
        raise EngineError(
            f"llama.cpp could not quantize {source.name}: "
            f'"{log.last_error() or f"code {code}, no reason given"}"'
        )
    return log
