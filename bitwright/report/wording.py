"""Numbers and verdicts as words, the same in the table, the page and the model card."""

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

NO_DATA = "no data"
SYNTHETIC = (
    "The reference is synthetic: the input was already quantized, so every distance below is from "
    "that input and not from the original full-precision model."
)


def warnings_of(result: Mapping[str, Any]) -> list[str]:
    """What must stand above every figure of a result: its reference or its damages are no own."""
    found = [SYNTHETIC] if result.get("synthetic_reference") else []
    if result.get("not_measured"):
        found.append(f"No damage map: {result['not_measured']}.")
    return found


def size_text(size_bytes: int) -> str:
    """Decimal units, four digits: ``861.2 MB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= factor:
            digits = f"{size_bytes / factor:#.4g}".rstrip(".")
            return f"{digits} {unit}"
    return f"{size_bytes} bytes"


def kld_text(value: float | None, se: float | None) -> str:
    """``0.0331 ± 0.0029``: as many decimals as two digits of the error; ``no data`` without any."""
    if value is None:
        return NO_DATA
    if se is None or se <= 0.0:
        return f"{value:.4g}"
    decimals = min(9, max(2, 1 - math.floor(math.log10(se))))
    return f"{value:.{decimals}f} ± {se:.{decimals}f}"


def share_text(value: float | None) -> str:
    """A share as per cent: ``93.2 %``."""
    return NO_DATA if value is None else f"{100 * value:.1f} %"


def number_text(value: float | None, digits: int = 4) -> str:
    """A number, or ``no data``."""
    return NO_DATA if value is None else f"{value:.{digits}g}"


def ratio_text(ratio: Mapping[str, Any] | None) -> str:
    """``×0.51 [0.46, 0.57]``."""
    if ratio is None or ratio.get("value") is None:
        return NO_DATA
    if ratio.get("low") is None or ratio.get("high") is None:
        return f"×{ratio['value']:.3f} [interval not known]"
    return f"×{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def ratio_verdict(ratio: Mapping[str, Any] | None) -> str:
    """``lower``, ``higher`` or ``no difference shown``."""
    if ratio is None or ratio.get("low") is None or ratio.get("high") is None:
        return "no difference shown"
    if ratio["high"] < 1.0:
        return "lower"
    return "higher" if ratio["low"] > 1.0 else "no difference shown"


def file_of(result: Mapping[str, Any], label: str) -> Mapping[str, Any]:
    """The entry of ``files`` with this label.

    Raises:
        KeyError: there is none.
    """
    for entry in result["files"]:
        if entry["label"] == label:
            found: Mapping[str, Any] = entry
            return found
    raise KeyError(label)


def categories_of(result: Mapping[str, Any]) -> list[str]:
    """All categories of the scores, the target first."""
    names = dict.fromkeys(c for entry in result["files"] for c in entry["scores"])
    names.pop(result["target"], None)
    return [result["target"], *names]


def verdict_sentence(result: Mapping[str, Any]) -> str:
    """The whole outcome in one sentence, with its interval and the price in bytes."""
    chosen, baseline = (file_of(result, result[k]) for k in ("chosen", "baseline"))
    target, ratio = result["target"], result["target_kld_ratio"]
    opening = f"{result['verdict'][:1].upper()}{result['verdict'][1:]}"
    if ratio.get("value") is None:
        return f"No verdict: no KLD ratio on {target} can be given for {chosen['label']}."
    times = f"{ratio['value']:.3f} times the KLD of {baseline['label']}{_bounds(ratio)}"
    if chosen["label"] == baseline["label"]:
        why = f" ({result['reason']})" if result.get("reason") else ""
        return f"{opening}: on {target}, our best layout has {times}{why}."
    bytes_text = _bytes_compared(chosen["size_bytes"], baseline["size_bytes"])
    return f"{opening}: on {target}, {chosen['label']} has {times} in {bytes_text}."


def compared_name(result: Mapping[str, Any]) -> str:
    """What the ratios of result.json are of: the chosen file, or ours where stock was written."""
    return "our best layout" if result["chosen"] == result["baseline"] else result["chosen"]


def _bounds(ratio: Mapping[str, Any]) -> str:
    if ratio.get("low") is None or ratio.get("high") is None:
        return " (too few documents for an interval)"
    return f" (between {ratio['low']:.3f} and {ratio['high']:.3f})"


def _bytes_compared(size_bytes: int, baseline_bytes: int) -> str:
    if size_bytes == baseline_bytes:
        return "the same bytes"
    change = 100.0 * abs(size_bytes / baseline_bytes - 1.0)
    return f"{change:.2f} % {'more' if size_bytes > baseline_bytes else 'fewer'} bytes"


def model_name(result: Mapping[str, Any]) -> str:
    """The model's base name: folders of this machine never leave it."""
    model = str(result["model"])
    return model if model.startswith("hf:") else PurePath(model.replace("\\", "/")).name


def file_name(entry: Mapping[str, Any]) -> str:
    """The base name of a written file, or an empty string for one that only lived in memory."""
    path = entry.get("path")
    return PurePath(str(path).replace("\\", "/")).name if path else ""


def flat_items(items: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as (dotted name, text) pairs."""
    for key, value in items.items():
        if isinstance(value, Mapping):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
