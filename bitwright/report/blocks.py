"""A page as blocks (sentences, tables, figures), shown on a terminal, as HTML or as Markdown."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bitwright.report.card import markdown

WIDTH = 200  # of a terminal table: wide enough that no line is folded


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text. The columns in ``words`` hold words, the others numbers.

    ``long``: detail that stands in the HTML page only.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: tuple[int, ...] = (0,)
    long: bool = False


@dataclass(frozen=True, slots=True)
class Sentences:
    """A titled list of sentences."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG figure, for HTML."""

    title: str
    svg: str


Block = Table | Sentences | Figure


@dataclass(frozen=True, slots=True)
class Page:
    """``verdict``: the answer in a sentence or two; ``warnings`` stand above every number."""

    title: str
    verdict: str
    warnings: tuple[str, ...]
    blocks: tuple[Block, ...]

    def shown(self) -> tuple[Block, ...]:
        """Blocks that hold something."""
        return tuple(block for block in self.blocks if _holds(block))


def _holds(block: Block) -> bool:
    if isinstance(block, Table):
        return bool(block.rows)
    return bool(block.lines if isinstance(block, Sentences) else block.svg)


def terminal_text(page: Page) -> str:
    """Plain lines: verdict, warnings, tables and sentences; no figures and no long tables."""
    parts = [page.verdict, *page.warnings]
    for block in page.shown():
        if isinstance(block, Table) and not block.long:
            parts.append(terminal_table(block))
        elif isinstance(block, Sentences):
            parts.append("\n".join(["", block.title, *(f"  {line}" for line in block.lines)]))
    return "\n".join(parts)


def terminal_table(table: Table) -> str:
    """A table as plain lines that are never folded."""
    title = f"{table.title}; {table.note}" if table.note else table.title
    rich = RichTable(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(table.head):
        justify = "left" if number in table.words else "right"
        rich.add_column(Text(name), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows:
        rich.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    console.print(rich)
    assert isinstance(console.file, io.StringIO)
    return "\n" + "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def html_page(page: Page) -> str:
    """One HTML file that asks for nothing; all text is escaped."""
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in page.warnings)
    verdict = f'<p class="verdict">{escape(page.verdict)}</p>{warnings}'
    body = [f"{verdict}<h1>{escape(page.title)}</h1>", *map(_html_block, page.shown())]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(page.title)}</title><style>{css}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _html_block(block: Block) -> str:
    title = f"<h2>{escape(block.title)}</h2>"
    if isinstance(block, Figure):
        return title + block.svg
    if isinstance(block, Sentences):
        return title + "<ul>" + "".join(f"<li>{escape(x)}</li>" for x in block.lines) + "</ul>"
    note = f'<p class="soft">{escape(block.note)}.</p>' if block.note else ""
    head = _html_row("th", block.head, block.words)
    rows = "".join(_html_row("td", row, block.words) for row in block.rows)
    table = f'<div class="scroll"><table>{head}{rows}</table></div>'
    if block.long:
        table = f"<details><summary>{len(block.rows)} rows</summary>{table}</details>"
    return title + note + table


def _html_row(tag: str, cells: Sequence[str], words: Sequence[int]) -> str:
    shown = [
        f'<{tag} class="left">{escape(cell)}</{tag}>'
        if number and number in words
        else f"<{tag}>{escape(cell)}</{tag}>"
        for number, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(shown)}</tr>"


def markdown_page(page: Page) -> str:
    """Markdown: verdict, warnings, tables and sentences; no figures and no long tables."""
    parts = [f"# {markdown(page.title)}", markdown(page.verdict)]
    parts += [f"> {markdown(text)}" for text in page.warnings]
    for block in page.shown():
        if isinstance(block, Table) and not block.long:
            parts.append(_markdown_table(block))
        elif isinstance(block, Sentences):
            lines = "\n".join(f"- {markdown(line)}" for line in block.lines)
            parts.append(f"## {markdown(block.title)}\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    rule = [":--" if number in table.words else "--:" for number in range(len(table.head))]
    rows = [table.head, tuple(rule), *table.rows]
    lines = [
        "| " + " | ".join(cells) + " |" for cells in (tuple(map(markdown, row)) for row in rows)
    ]
    note = f"{markdown(table.note)}.\n\n" if table.note else ""
    return f"## {markdown(table.title)}\n\n{note}" + "\n".join(lines)
