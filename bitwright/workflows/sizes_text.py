"""Sweeps, variants and thresholds as text for a terminal."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitwright.workflows.output import bytes_text

WIDTH = 200
MARKS = {"unharmed": "", "harmed": " ✗", "undecided": " ?"}


def sweep_text(result: Mapping[str, Any]) -> str:
    """One table of sizes, one of thresholds, and what breaks first."""
    return "\n".join(
        [
            rendered(size_table(result["sizes"], tuple(result["thresholds"]))),
            rendered(threshold_table({result["model"]: result})),
            first_text(result),
            *_failure_lines(result),
        ]
    )


def sweep_facts(result: Mapping[str, Any]) -> list[str]:
    """The thresholds and failures as sentences."""
    lines = [f"{c}: {one['verdict']}" for c, one in result["thresholds"].items()]
    return [*lines, *_failure_lines(result)]


def variants_text(result: Mapping[str, Any]) -> str:
    """One table of the builds and the nearest stock files, and how the builds were found."""
    categories = tuple(result["variants"][0]["scores"])
    rows = [{**one, "label": one["name"]} for one in result["variants"]]
    seen = {one["label"]: one for one in result["nearest_stock"].values()}
    lines = [rendered(size_table([*rows, *seen.values()], categories))]
    return "\n".join([*lines, *variants_facts(result)])


def variants_facts(result: Mapping[str, Any]) -> list[str]:
    """Names, and how the builds were found, as sentences."""
    lines = [
        f"{one['name']}: {one['honest_name']} ({one['reason']}), {one['path']}"
        for one in result["variants"]
    ]
    lines.append(f"Tightrope: {result['tightrope']['how']}")
    rounds = result["back_off"]
    if len(rounds) > 1:
        lines.append(
            f"Bedrock: groups that are safe alone were not safe together; "
            f"{len(rounds[-1]['raised'])} of {len(result['groups'])} were raised in "
            f"{len(rounds) - 1} rounds"
        )
    if rounds[-1]["not_shown_safe"]:
        lines.append(
            "Bedrock is not shown under the threshold on "
            f"{', '.join(rounds[-1]['not_shown_safe'])}: more select text would narrow it"
        )
    return lines


def size_table(sizes: Sequence[Mapping[str, Any]], categories: Sequence[str]) -> Table:
    """Score and KLD of each category at each size; ✗ harmed, ? undecided."""
    table = _table("score (KLD nats) by size; ✗ shown harmed, ? not decided", "size")
    for name in ("bpw", "bytes", *categories):
        table.add_column(name, justify="right", overflow="fold")
    for size in sizes:
        cells = [_score_cell(size["scores"].get(c, {})) for c in categories]
        table.add_row(Text(size["label"]), f"{size['bpw']:.2f}", f"{size['size_bytes']:,}", *cells)
    return table


def _score_cell(scores: Mapping[str, Any]) -> str:
    kld = scores.get("kld_nats")
    shown = "" if kld is None else f" ({kld:.3g})"
    value = scores.get("value")
    if value is None:
        return shown.strip()
    return f"{abs(value):.3f}{MARKS[scores['state']]}{shown}"


def threshold_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Thresholds of runs side by side."""
    table = _table("breaks between (bpw)", "run")
    for name in ("category", "unharmed at", "harmed at", "items", "verdict"):
        table.add_column(name, justify="left" if name == "verdict" else "right", overflow="fold")
    for run, result in runs.items():
        for category, one in result["thresholds"].items():
            more = one.get("more_items")
            verdict = str(one.get("verdict", ""))
            if more:
                verdict += f"; about {more} more items would decide"
            if not one.get("executed", True):
                verdict += " (likelihood, not executed)"
            table.add_row(
                Text(run),
                category,
                _bpw(one["last_unharmed_bpw"]),
                _bpw(one["first_harmed_bpw"]),
                str(one["n_items"]),
                verdict,
            )
    return table


def _bpw(value: float | None) -> str:
    return "not established" if value is None else f"{value:.2f}"


def first_text(result: Mapping[str, Any]) -> str:
    """Which category breaks first, in a sentence."""
    first = result["first_to_break"]
    if first["category"] is not None:
        return f"first to break: {first['category']} (probability {first['probability']:.2f})"
    if first.get("leader") is None:
        return "first to break: undecided"
    return (
        f"first to break: undecided ({first['leader']} in {first['probability']:.0%} of the "
        "resamples)"
    )


def _failure_lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    failure = result.get("first_failure")
    if failure and failure["kind"]:
        counts = ", ".join(f"{kind} {n}" for kind, n in failure["kinds"].items())
        lines.append(f"first failures of {failure['category']} at {failure['label']}: {counts}")
    found = result.get("explained_by")
    if found:
        shares = ", ".join(f"{one['group']} {one['share']:.0%}" for one in found["groups"])
        lines.append(f"damage on {found['category']} at {found['label']} by role: {shares}")
    for size in result["sizes"][-1:]:
        lines.append(f"smallest size: {bytes_text(size['size_bytes'])}")
    return lines


def _table(title: str, first: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    return table


def rendered(table: Table) -> str:
    """Plain lines that are never folded."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
