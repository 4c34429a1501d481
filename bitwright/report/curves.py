"""One figure for many sizes of a model: a quantity of each category over bits per weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2a8a7b", "#b5532c", "#5a5fc0", "#a3841c", "#8a3f7d", "#4f7d2a")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
LEFT, TOP, WIDTH, HEIGHT = 60, 16, 560, 280


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a curve: bits per weight, value, what a pointer over it says, and its interval."""

    bpw: float
    value: float
    title: str
    ends: tuple[float, float] | None = None


def curves(
    series: Mapping[str, Sequence[Mark]], y_name: str, *, log: bool = False, joined: bool = True
) -> str:
    """An SVG figure, one colour per category; an empty text without points.

    ``joined``: lines between the points of a category.
    """
    points = [m for marks in series.values() for m in marks if not log or m.value > 0]
    if not points:
        return ""
    x_low, x_high = min(m.bpw for m in points), max(m.bpw for m in points)
    values = [_scaled(v, log) for m in points for v in (m.value, *(m.ends or ()))]
    y_low, y_high = min(values), max(values)

    def x(bpw: float) -> float:
        return LEFT + WIDTH * _part(bpw, x_low, x_high)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1.0 - _part(_scaled(value, log), y_low, y_high))

    frame = f'x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [f'<rect {frame} fill="none" stroke="currentColor" stroke-opacity="0.3"/>']
    for k, (category, marks) in enumerate(series.items()):
        shown = sorted((m for m in marks if not log or m.value > 0), key=lambda m: m.bpw)
        color = COLORS[k % len(COLORS)]
        line = " ".join(f"{x(m.bpw):.1f},{y(m.value):.1f}" for m in shown)
        if joined:
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            )
        parts += [
            f'<path d="M{x(m.bpw):.1f},{y(m.ends[0]):.1f}V{y(m.ends[1]):.1f}" stroke="{color}" '
            'stroke-opacity="0.45"/>'
            for m in shown
            if m.ends is not None
        ]
        parts += [
            f'<circle cx="{x(m.bpw):.1f}" cy="{y(m.value):.1f}" r="4" fill="{color}">'
            f"<title>{escape(m.title)}</title></circle>"
            for m in shown
        ]
        parts.append(_text(LEFT + WIDTH + 12, TOP + 14 + 18 * k, category, color))
    for tick in _ticks(x_low, x_high):
        parts.append(_text(x(tick), TOP + HEIGHT + 18, f"{tick:g}", anchor="middle"))
    for value, where in ((y_low, TOP + HEIGHT), (y_high, TOP + 10)):
        number = 10.0**value if log else value
        parts.append(_text(LEFT - 6, where, f"{number:.2g}", anchor="end"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "bits per weight", anchor="middle"))
    parts.append(_text(LEFT + 6, TOP + 14, y_name))
    size = f'width="{LEFT + WIDTH + 150}" height="{TOP + HEIGHT + 50}"'
    svg = f'<svg {size} {FONT} role="img" aria-label="{escape(y_name)}">{"".join(parts)}</svg>'
    return f'<div class="fig">{svg}</div>'


def _scaled(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _part(value: float, low: float, high: float) -> float:
    return 0.5 if high <= low else (value - low) / (high - low)


def _ticks(low: float, high: float) -> list[float]:
    """Whole bits inside the range, or its ends where there are none."""
    whole = [float(n) for n in range(math.ceil(low), math.floor(high) + 1)]
    return whole or [low, high]


def _text(x: float, y: float, text: str, color: str = "", *, anchor: str = "start") -> str:
    fill = color or "currentColor"
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"'
    return f"<text {place}>{escape(text)}</text>"
