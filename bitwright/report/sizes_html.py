"""The report of a sweep, or of the three builds, as one HTML file that asks for nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bitwright.report.curves import Mark, curves
from bitwright.report.wording import SYNTHETIC

SIGNS = {"unharmed": "", "harmed": " ✗", "undecided": " ?"}


def sizes_html(result: Mapping[str, Any], verdict: str, facts: Sequence[str]) -> str:
    """A page with the verdict, one plot, one table; ``facts`` are sentences under them.

    All text that comes from outside is escaped.
    """
    sizes = rows_of(result)
    categories = list(dict.fromkeys(c for one in sizes for c in one["scores"]))
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = f"{result['model']}: {result['workflow']}"
    warning = f'<p class="warn">{escape(SYNTHETIC)}</p>' if result["synthetic_reference"] else ""
    lost = "share of the reference's score that is lost"
    body = [
        f'<p class="verdict">{escape(verdict)}</p>{warning}<h1>{escape(title)}</h1>',
        "<h2>Score lost, by size</h2>",
        curves({c: _loss_marks(sizes, c) for c in categories}, lost),
        "<h2>KLD, by size</h2>",
        curves({c: _kld_marks(sizes, c) for c in categories}, "KLD in nats per token", log=True),
        "<h2>Every size</h2>",
        '<p class="soft">Score (KLD in nats); ✗ shown harmed, ? not decided.</p>',
        _table(sizes, categories),
        *(f"<p>{escape(fact)}</p>" for fact in facts),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def rows_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Sizes of a sweep; builds and the stock files beside them, each once."""
    if "sizes" in result:
        return list(result["sizes"])
    builds = [{**one, "label": one["name"]} for one in result["variants"]]
    stock = {one["label"]: one for one in result["nearest_stock"].values()}
    return [*builds, *stock.values()]


def _loss_marks(sizes: Sequence[Mapping[str, Any]], category: str) -> list[Mark]:
    marks = []
    for one in sizes:
        scores = one["scores"].get(category, {})
        reference = scores.get("reference")
        if reference:
            lost = scores["against_reference"]["value"] / abs(reference)
            title = f"{one['label']}, {category}: {lost:.1%} of the score lost"
            marks.append(Mark(one["bpw"], lost, title))
    return marks


def _kld_marks(sizes: Sequence[Mapping[str, Any]], category: str) -> list[Mark]:
    marks = []
    for one in sizes:
        kld = one["scores"].get(category, {}).get("kld_nats")
        if kld is not None:
            title = f"{one['label']}, {category}: {kld:.4g} nats"
            marks.append(Mark(one["bpw"], kld, title))
    return marks


def _table(sizes: Sequence[Mapping[str, Any]], categories: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in ("size", "bpw", "bytes", *categories))
    rows = []
    for one in sizes:
        cells = [one["label"], f"{one['bpw']:.2f}", f"{one['size_bytes']:,}"]
        cells += [_cell(one["scores"].get(c, {})) for c in categories]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _cell(scores: Mapping[str, Any]) -> str:
    kld = scores.get("kld_nats")
    shown = "" if kld is None else f"({kld:.3g})"
    value = scores.get("value")
    if value is None:
        return shown
    return f"{abs(value):.3f}{SIGNS[scores['state']]} {shown}".strip()
