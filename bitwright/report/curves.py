"""One figure for many sizes of a model: a quantity of each category over bits per weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2a8a7b", "#b5532c", "#5a5fc0", "#a3841c", "#8a3f7d", "#4f7d2a")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
LEFT, TOP, WIDTH, HEIGHT = 60, 30, 560, 280
APART = 5.0  # pixels between the categories of one file
CLOSE = 90.0  # names nearer than this go to another line
STEPS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a curve: bits per weight, value, what a pointer over it says, and its interval."""

    bpw: float
    value: float
    title: str
    ends: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where values stand in the figure."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    log: bool

    def x(self, bpw: float) -> float:
        return LEFT + WIDTH * _part(bpw, self.x_low, self.x_high)

    def y(self, value: float) -> float:
        return TOP + HEIGHT * (1.0 - _part(_scaled(value, self.log), self.y_low, self.y_high))


def curves(
    series: Mapping[str, Sequence[Mark]],
    y_name: str,
    *,
    log: bool = False,
    share: bool = False,
    names: Mapping[str, float] | None = None,
) -> str:
    """An SVG figure, one colour per category; an empty text without points.

    ``share``: values are parts of a whole, shown as per cent. ``names``: files and their bits per
    weight; they are named above the points, which then are not joined by lines.
    """
    points = [m for marks in series.values() for m in marks if not log or m.value > 0]
    if not points:
        return ""
    values = [_scaled(v, log) for m in points for v in (m.value, *(m.ends or ()))]
    bpw = [m.bpw for m in points]
    margin = 0.0 if names is None else 0.06 * (max(bpw) - min(bpw))
    axes = _Axes(min(bpw) - margin, max(bpw) + margin, min(values), max(values), log)
    parts = _frame(axes, y_name, share)
    for k, (category, marks) in enumerate(series.items()):
        shown = sorted((m for m in marks if not log or m.value > 0), key=lambda m: m.bpw)
        shift = 0.0 if names is None else APART * (k - (len(series) - 1) / 2)
        parts += _series(axes, shown, COLORS[k % len(COLORS)], shift, joined=names is None)
        parts.append(_text(LEFT + WIDTH + 12, TOP + 14 + 18 * k, category, COLORS[k % len(COLORS)]))
    parts += _names(axes, names or {})
    size = f'width="{LEFT + WIDTH + 150}" height="{TOP + HEIGHT + 50}"'
    svg = f'<svg {size} {FONT} role="img" aria-label="{escape(y_name)}">{"".join(parts)}</svg>'
    return f'<div class="fig">{svg}</div>'


def _frame(axes: _Axes, y_name: str, share: bool) -> list[str]:
    """The box, its ticks and what they measure."""
    box = f'x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<rect {box} fill="none" stroke="currentColor" stroke-opacity="0.3"/>']
    for tick in _ticks(axes.x_low, axes.x_high):
        parts.append(_text(axes.x(tick), TOP + HEIGHT + 18, f"{tick:g}", anchor="middle"))
    for value, where in ((axes.y_low, TOP + HEIGHT), (axes.y_high, TOP + 10)):
        number = 10.0**value if axes.log else value
        text = f"{number:.0%}" if share else f"{number:.2g}"
        parts.append(_text(LEFT - 6, where, text, anchor="end"))
    if not axes.log and axes.y_low < 0.0 < axes.y_high:
        line = f'x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{axes.y(0.0):.1f}" y2="{axes.y(0.0):.1f}"'
        parts.append(f'<line {line} stroke="currentColor" stroke-opacity="0.3"/>')
        parts.append(_text(LEFT - 6, axes.y(0.0) + 4, "0", anchor="end"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "bits per weight", anchor="middle"))
    parts.append(_text(LEFT + 6, TOP + HEIGHT - 6, y_name))
    return parts


def _series(
    axes: _Axes, marks: Sequence[Mark], color: str, shift: float, *, joined: bool
) -> list[str]:
    """One category: its line, intervals and points."""
    places = [(axes.x(m.bpw) + shift, axes.y(m.value), m) for m in marks]
    parts = []
    if joined:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    for x, y, mark in places:
        if mark.ends is not None:
            low, high = (axes.y(end) for end in mark.ends)
            path = f"M{x:.1f},{low:.1f}V{high:.1f}"
            parts.append(f'<path d="{path}" stroke="{color}" stroke-opacity="0.45"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}">'
            f"<title>{escape(mark.title)}</title></circle>"
        )
    return parts


def _names(axes: _Axes, names: Mapping[str, float]) -> list[str]:
    """Files above their points; of two that are close, one goes a line higher."""
    parts, last, high = [], -math.inf, False
    for name, bpw in sorted(names.items(), key=lambda pair: pair[1]):
        x = axes.x(bpw)
        high = x - last < CLOSE and not high
        last = x
        parts.append(_text(x, TOP - (18 if high else 4), name, anchor="middle"))
    return parts


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _part(value: float, low: float, high: float) -> float:
    return 0.5 if high <= low else (value - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers of bits inside the range, two or more; or its ends where there are none."""
    for step in STEPS:
        ticks = [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(ticks) > 1:
            return [round(tick, 2) for tick in ticks]
    return [low, high] if high > low else [low]


def _text(x: float, y: float, text: str, color: str = "", *, anchor: str = "start") -> str:
    fill = color or "currentColor"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}>{escape(text)}</text>"
