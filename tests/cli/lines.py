"""Command lines with what most tests do not care about filled in."""

from pathlib import Path

from tests.workflows.support import Ran, bitwright


def run_line(home: Path, out: Path, model: Path | str = "", *more: str) -> Ran:
    model = model or home / "tiny-F16.gguf"
    return bitwright("run", home / "small.toml", "--model", model, "--out", out, *more)


def quantize_line(home: Path, out: Path, layout: str | Path, *more: str | Path) -> Ran:
    model = ("--model", home / "tiny-F16.gguf") if "--model" not in more else ()
    return bitwright("quantize", *model, "--layout", layout, "--out", out, *more)
