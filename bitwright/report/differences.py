"""Paired differences as lines for a person to read."""

from collections.abc import Mapping

from bitwright.eval.pairing import Difference


def difference_lines(found: Mapping[str, Difference]) -> list[str]:
    """One line per task for a person to read."""
    width = max((len(name) for name in found), default=0)
    return [_difference_line(name.ljust(max(width, 16)), d) for name, d in found.items()]


def _difference_line(name: str, d: Difference) -> str:
    bounds = f"[{_signed(d.low)}, {_signed(d.high)}]" if d.low is not None else "[not known]"
    seen = "not known" if d.smallest_visible is None else f"{d.smallest_visible:.4f}"
    changed = ""
    if "gained" in d.details:
        changed = f", gained {d.details['gained']}, lost {d.details['lost']}"
    return (
        f"  {name} {d.metric:<14} {d.a:.4f} → {d.b:.4f}  {_signed(d.difference)} {bounds}  "
        f"p {_small(d.p)}, Holm {_small(d.p_holm)}  n {d.n}{changed}  {d.verdict} "
        f"(smallest visible {seen})"
    )


def _small(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _signed(value: float | None) -> str:
    return "?" if value is None else f"{value:+.4f}"
