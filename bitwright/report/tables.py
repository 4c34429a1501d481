"""The result as text: the verdict, the target's table, and the price on the other categories."""

import io
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwright.report.wording import (
    categories_of,
    kld_text,
    number_text,
    ratio_text,
    share_text,
    size_text,
    verdict_sentence,
    warnings_of,
)

FULL_WIDTH = 124  # narrower terminals get the target's table without p99 and PPL ratio
PLAIN_WIDTH = 200  # wide enough that no line of a redirected table is folded


def results_text(
    result: Mapping[str, Any],
    *,
    width: int | None = None,
    color: bool = False,
) -> str:
    """Verdict and tables of a result.json.

    ``width`` None is for a file or pipe: plain lines that are never folded.
    """
    console = Console(
        file=io.StringIO(),
        width=width or PLAIN_WIDTH,
        force_terminal=color,
        color_system="auto" if color else None,
        highlight=False,
    )
    console.print(Text(verdict_sentence(result), style="bold"))
    for warning in warnings_of(result):
        console.print(Text(warning, style="yellow"))
    console.print(target_table(result, short=console.width < FULL_WIDTH))
    console.print(category_table(result))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def target_table(result: Mapping[str, Any], *, short: bool = False) -> Table:
    """One row per file: size, and what was measured on the target category."""
    target = result["target"]
    table = _table(f"{target} (target); → chosen, = baseline")
    names = ["size", "bpw", "KLD nats", "top-1", "KLD / baseline"]
    for name in names if short else [*names, "p99", "PPL ratio"]:
        table.add_column(name, justify="right", overflow="fold")
    for entry in result["files"]:
        scores = entry["scores"].get(target, {})
        bpw = entry.get("bpw")
        cells = [
            size_text(entry["size_bytes"]),
            "" if bpw is None else f"{bpw:.3f}",
            kld_text(scores.get("kld_nats"), scores.get("se")),
            share_text(scores.get("top1")),
            _ratio_cell(result, entry, target),
        ]
        if not short:
            cells += [number_text(scores.get("kld_p99"), 3), number_text(scores.get("ppl_ratio"))]
        table.add_row(_file_cell(result, entry), *cells, style=_row_style(result, entry))
    return table


def category_table(result: Mapping[str, Any]) -> Table:
    """One row per file, one column of KLD ± standard error per category."""
    table = _table("KLD nats ± standard error, every category")
    categories = categories_of(result)
    for index, category in enumerate(categories):
        table.add_column(category + (" *" if index == 0 else ""), justify="right", overflow="fold")
    for entry in result["files"]:
        scores = [entry["scores"].get(c, {}) for c in categories]
        cells = [kld_text(s.get("kld_nats"), s.get("se")) for s in scores]
        table.add_row(_file_cell(result, entry), *cells, style=_row_style(result, entry))
    ratios = {result["target"]: result["target_kld_ratio"], **result["off_target_kld_ratio"]}
    table.add_section()
    table.add_row(
        Text("→ / =" if result["chosen"] != result["baseline"] else "ours / ="),
        *[ratio_text(ratios.get(c)) for c in categories],
    )
    return table


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("file", overflow="fold")
    return table


def _file_cell(result: Mapping[str, Any], entry: Mapping[str, Any]) -> Text:
    mark = {result["chosen"]: "→ ", result["baseline"]: "= "}.get(entry["label"], "  ")
    return Text(mark + entry["label"])  # Text, not str: a label from outside may hold markup


def _ratio_cell(result: Mapping[str, Any], entry: Mapping[str, Any], category: str) -> str:
    if entry["label"] == result["baseline"]:
        return "1"
    ratio = entry["scores"].get(category, {}).get("ratio")
    if ratio is None and entry["label"] == result["chosen"]:
        ratio = result["target_kld_ratio"]
    return "" if ratio is None else ratio_text(ratio)


def _row_style(result: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    return "bold" if entry["label"] == result["chosen"] else ""
