"""What the pages of sweeps and of builds share: rows of sizes, score cells, and the figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.report.blocks import Figure, Table
from bitwright.report.curves import Mark, curves
from bitwright.report.wording import NO_DATA, size_text

Sizes = Sequence[Mapping[str, Any]]

SIGNS = {"unharmed": " ✓", "harmed": " ✗", "undecided": " ?"}
LEGEND = "✓ shown unharmed, ✗ shown harmed, ? not decided; in brackets the KLD in nats"
METRICS = {
    "exact_call": "right calls",
    "right_function": "right function",
    "accuracy": "likeliest function",
    "exact_number": "right numbers",
    "exact_match": "right answers",
    "pass_at_1": "programs that pass",
    "nats_per_token": "nats per token",
    "bits_per_byte": "bits per byte",
}


def categories_of(sizes: Sizes) -> tuple[str, ...]:
    """Every category that some size was scored on."""
    return tuple(dict.fromkeys(c for one in sizes for c in one["scores"]))


def metric_name(metric: str) -> str:
    """A metric in words."""
    return METRICS.get(metric, metric.replace("_", " "))


def size_table(
    title: str, sizes: Sizes, max_loss: float, names: Mapping[str, str] | None = None
) -> Table:
    """Score and KLD of each category at each size; ``names``: a further column by label."""
    categories = categories_of(sizes)
    more = () if names is None else ("name earned",)
    head = ("file", *more, "bpw", "bytes", *(category_head(sizes, c) for c in categories))
    rows = tuple(
        (
            one["label"],
            *(() if names is None else (names.get(one["label"], ""),)),
            f"{one['bpw']:.2f}",
            f"{one['size_bytes']:,}",
            *(score_cell(one["scores"].get(c, {})) for c in categories),
        )
        for one in sizes
    )
    note = f"{LEGEND}. Harm: {max_loss:.0%} of the original's score lost"
    return Table(title, head, rows, note, words=(0, 1) if more else (0,))


def category_head(sizes: Sizes, category: str) -> str:
    """The category and how it is scored."""
    found = [s["scores"][category]["metric"] for s in sizes if "metric" in scores(s, category)]
    return f"{category}: {metric_name(found[0])}" if found else category


def scores(size: Mapping[str, Any], category: str) -> Mapping[str, Any]:
    """What a size scored on a category; empty where nothing."""
    found: Mapping[str, Any] = size["scores"].get(category, {})
    return found


def score_cell(found: Mapping[str, Any]) -> str:
    """``0.755 ✓ (0.0123)``."""
    kld = found.get("kld_nats")
    shown = "" if kld is None else f"({kld:.3g})"
    value = found.get("value")
    if value is None:
        return shown or NO_DATA
    return f"{abs(value):.3f}{SIGNS.get(found.get('state', ''), '')} {shown}".strip()


MOST_WARNINGS = 8


def warning_lines(flags: Sequence[str]) -> tuple[str, ...]:
    """Warnings of single tasks, without the samples that result.json holds."""
    short = tuple(flag.split("; samples")[0] for flag in flags)
    rest = len(short) - MOST_WARNINGS
    more = (f"and {rest} more: see flags in result.json",) if rest > 0 else ()
    return (*short[:MOST_WARNINGS], *more)


def place_text(bpw: float | None, size_bytes: float | None) -> str:
    """``3.49 bpw (1.94 MB)``, or that it is not established."""
    if bpw is None:
        return "not established"
    size = "" if size_bytes is None else f" ({size_text(int(size_bytes))})"
    return f"{bpw:.2f} bpw{size}"


LOST = "share of the original's score that is lost"


def sweep_figures(sizes: Sizes) -> list[Figure]:
    """Score lost and KLD over bits per weight, one line per category."""
    categories = categories_of(sizes)
    loss = curves({c: _loss_marks(sizes, c) for c in categories}, LOST, share=True)
    kld = curves({c: _kld_marks(sizes, c) for c in categories}, "KLD in nats per token", log=True)
    return [Figure("Score lost, by size", loss), Figure("KLD, by size", kld)]


def file_figure(files: Sizes) -> Figure:
    """Score lost by single files, which are named."""
    names = {one["label"]: one["bpw"] for one in files}
    series = {c: _loss_marks(files, c) for c in categories_of(files)}
    return Figure("Score lost, by size", curves(series, LOST, share=True, names=names))


def _loss_marks(sizes: Sizes, category: str) -> list[Mark]:
    marks = []
    for one in sizes:
        found = scores(one, category)
        reference = found.get("reference")
        if reference and "against_reference" in found:
            drop = found["against_reference"]
            low, value, high = (drop.get(k) for k in ("low", "value", "high"))
            ends = None if low is None or high is None else (low, high)
            scale = abs(reference)
            title = f"{one['label']}, {category}: {value / scale:.1%} of the score lost"
            marks.append(
                Mark(
                    one["bpw"],
                    value / scale,
                    title,
                    None if ends is None else (ends[0] / scale, ends[1] / scale),
                )
            )
    return marks


def _kld_marks(sizes: Sizes, category: str) -> list[Mark]:
    marks = []
    for one in sizes:
        kld = scores(one, category).get("kld_nats")
        if kld is not None:
            marks.append(Mark(one["bpw"], kld, f"{one['label']}, {category}: {kld:.4g} nats"))
    return marks
