"""Small inline SVG figures: a grid of coloured cells, intervals on a log axis, a scatter plot.

They hold no scripts and ask for nothing. Attributes give the looks that they have anywhere, such as
in a notebook; a page's style sheet may override them by class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Points of a perceptually ordered ramp, dark violet to yellow; readable on dark and light pages.
RAMP = ((49, 24, 82), (80, 60, 140), (52, 110, 150), (40, 150, 135), (110, 195, 90), (240, 225, 60))

RULE = 'class="rule" stroke="currentColor" stroke-dasharray="4 4"'
BAR = 'class="bar" stroke="#2a8a7b" stroke-width="3"'
DOT = 'class="dot" fill="#2a8a7b"'
FRAME = 'class="frame" fill="none" stroke="currentColor" stroke-opacity="0.3"'
EMPTY = FRAME.replace("frame", "empty")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a grid: where, how bright (0..1, None: empty), what is written and explained."""

    row: int
    column: int
    level: float | None
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Span:
    """One line of an interval plot; None bounds draw the point alone."""

    label: str
    value: float
    low: float | None
    high: float | None
    note: str


def grid(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Cell], label: str) -> str:
    """A grid with row and column names; wide grids keep their cells and scroll."""
    width, height, left, top = max(14, min(58, 900 // max(1, len(columns)))), 26, 130, 24
    every = max(1, math.ceil(26 / width))
    parts = [
        _text(left - 8, top + height * i + 17, name, anchor="end") for i, name in enumerate(rows)
    ]
    parts += [
        _text(left + width * (j + 0.5), top - 8, name, anchor="middle")
        for j, name in enumerate(columns)
        if j % every == 0
    ]
    parts += [_grid_cell(cell, left, top, width, height) for cell in cells]
    return _figure(left + width * len(columns) + 4, top + height * len(rows) + 4, parts, label)


def intervals(spans: Sequence[Span], label: str) -> str:
    """Ratios with their intervals on a logarithmic axis with a line at 1."""
    numbers = [x for s in spans for x in (s.value, s.low, s.high) if x is not None and x > 0]
    low, high = min([*numbers, 0.9]) / 1.08, max([*numbers, 1.1]) * 1.08
    left, width, step = 150, 420, 30
    height = 34 + step * len(spans)

    def x(value: float) -> float:
        # An interval may reach down to zero, which no logarithmic axis shows.
        return left + width * math.log(max(value, low) / low) / math.log(high / low)

    parts = [f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="22" y2="{height - 8}" {RULE}/>']
    parts += [_text(x(tick), 14, f"×{tick:g}", anchor="middle") for tick in _ticks(low, high)]
    for i, span in enumerate(spans):
        y = 40 + step * i
        parts.append(_text(left - 10, y + 4, span.label, anchor="end"))
        if span.low is not None and span.high is not None:
            ends = f'x1="{x(span.low):.1f}" x2="{x(span.high):.1f}"'
            parts.append(f'<line {ends} y1="{y}" y2="{y}" {BAR}/>')
        parts.append(f'<circle cx="{x(span.value):.1f}" cy="{y}" r="5" {DOT}/>')
        parts.append(_text(left + width + 14, y + 4, span.note))
    return _figure(left + width + 340, height, parts, label)


def scatter(points: Sequence[tuple[str, float, float]], names: tuple[str, str], label: str) -> str:
    """(title, x, y) points on equal logarithmic axes with the diagonal; values must be > 0."""
    values = [v for _, x, y in points for v in (x, y)]
    low, high = min(values) / 1.3, max(values) * 1.3
    left, top, side = 70, 12, 330

    def at(value: float) -> float:
        return side * math.log(value / low) / math.log(high / low)

    box = f'<rect x="{left}" y="{top}" width="{side}" height="{side}" {FRAME}/>'
    corner = f'x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}"'
    parts = [box, f"<line {corner} {RULE}/>"]
    for tick in _ticks(low, high):
        parts.append(_text(left + at(tick), top + side + 18, f"{tick:g}", anchor="middle"))
        parts.append(_text(left - 8, top + side - at(tick) + 4, f"{tick:g}", anchor="end"))
    for title, x, y in points:
        where = f'cx="{left + at(x):.1f}" cy="{top + side - at(y):.1f}"'
        parts.append(f'<circle {where} r="5" {DOT}><title>{escape(title)}</title></circle>')
    parts.append(_text(left + side / 2, top + side + 40, names[0], anchor="middle"))
    turned = f'transform="rotate(-90 14 {top + side / 2:.0f})"'
    parts.append(_text(14, top + side / 2, names[1], anchor="middle", more=turned))
    return _figure(left + side + 40, top + side + 52, parts, label)


def ramp_color(level: float) -> tuple[int, int, int]:
    """Red, green and blue of a level between 0 and 1."""
    place = min(1.0, max(0.0, level)) * (len(RAMP) - 1)
    index = min(int(place), len(RAMP) - 2)
    part = place - index
    first, second = RAMP[index], RAMP[index + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return red, green, blue


def _grid_cell(cell: Cell, left: float, top: float, width: float, height: float) -> str:
    x, y = left + width * cell.column, top + height * cell.row
    rect = f'x="{x:.1f}" y="{y}" width="{width - 1.5:.1f}" height="{height - 1.5}" rx="2"'
    title = f"<title>{escape(cell.title)}</title>"
    if cell.level is None:
        return f"<g>{title}<rect {rect} {EMPTY}/></g>"
    red, green, blue = ramp_color(cell.level)
    ink = "#111" if 0.3 * red + 0.59 * green + 0.11 * blue > 115 else "#fff"
    inside = ""
    if cell.text and width >= 6.2 * len(cell.text) + 4:
        place = f'x="{x + width / 2:.1f}" y="{y + 16.5}"'
        inside = f'<text {place} text-anchor="middle" fill="{ink}">{escape(cell.text)}</text>'
    return f'<g>{title}<rect {rect} fill="rgb({red},{green},{blue})"/>{inside}</g>'


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between low and high, at least an eighth of the logarithmic axis apart."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    # Coarse numbers take their places first; finer ones fill what is left.
    for digits in ((1,), (2, 5), (3, 7), (1.2, 1.5, 2.5, 4, 6, 8), (1.1, 1.3, 1.7, 9)):
        for tick in (d * 10.0**p for p in powers for d in digits):
            apart = min((abs(math.log(tick / t)) for t in ticks), default=math.inf)
            if low <= tick <= high and apart >= math.log(high / low) / 8:
                ticks.append(tick)
    return sorted(ticks)


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}'.rstrip()
    return f'<text {place} class="ink" fill="currentColor">{escape(text)}</text>'


def _figure(width: float, height: float, parts: Sequence[str], label: str) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg {size} {FONT} role="img" aria-label="{escape(label)}">'
    return f'<div class="fig">{head}{"".join(parts)}</svg></div>'
