"""Paired differences as one page: what the target gained, what it cost elsewhere."""

from collections import Counter
from collections.abc import Iterable, Mapping

from bitwright.eval.pairing import Difference, Verdict, by_category
from bitwright.report.blocks import Page, Sentences, Table

HEAD = (
    *("task", "metric", "a", "b", "b - a", "95 % interval", "p", "p, Holm", "n"),
    *("gained", "lost", "smallest visible", "verdict"),
)
READING = (
    "a is the baseline, b the other; nats, bits and KLD are better where they are lower",
    "the verdict goes by p after Holm's correction over everything that was compared here",
    "smallest visible: the difference that so many items or documents would have found 4 times in "
    "5; no difference shown is not the same as no difference",
)


def difference_page(
    a: str, b: str, found: Mapping[str, Difference], target: str | None, notes: tuple[str, ...]
) -> Page:
    """The target's tasks first, then all others; one table where no target is known."""
    sides = by_category(found, target) if target else {"target": [], "off_target": list(found)}
    other = "Elsewhere" if target else "Tasks"
    return Page(
        f"{b} against {a}",
        verdict_text(found, target),
        notes,
        (
            difference_table(f"Target: {target}", found, sides["target"]),
            difference_table(other, found, sides["off_target"]),
            span_table(found),
            Sentences("How to read this", READING),
        ),
    )


def verdict_text(found: Mapping[str, Difference], target: str | None) -> str:
    """``code (the target): better on kld, top1. Elsewhere: no difference shown.``"""
    if target is None:
        return f"b against a: {_tally(found.values())}."
    on, off = (
        [d for d in found.values() if (d.category == target) is wanted] for wanted in (True, False)
    )
    said = [f"{target} (the target): {_tally(on)}."] if on else []
    return " ".join([*said, *([f"Elsewhere: {_tally(off)}."] if off else [])])


def _tally(differences: Iterable[Difference]) -> str:
    counts = Counter(d.verdict for d in differences)
    total = sum(counts.values())
    if counts["no difference shown"] == total:
        return "no difference shown"
    kinds: tuple[Verdict, ...] = ("better", "worse", "no difference shown")
    return ", ".join(f"{kind} on {counts[kind]}" for kind in kinds if counts[kind]) + f" of {total}"


def difference_table(title: str, found: Mapping[str, Difference], names: Iterable[str]) -> Table:
    """One row per task."""
    rows = tuple(_row(name, found[name]) for name in names)
    return Table(title, HEAD, rows, words=(0, 1))


def span_table(found: Mapping[str, Difference]) -> Table:
    """KLD and top-1 flips on other spans, such as the tool calls by themselves."""
    rows = []
    for d in found.values():
        spans = d.details.get("spans", {})
        assert isinstance(spans, Mapping)
        for name, span in spans.items():
            value, low, high = (span[key] for key in ("difference", "low", "high"))
            bounds = "not known" if low is None or high is None else f"[{low:+.4f}, {high:+.4f}]"
            flips = (str(span["top1_gained"]), str(span["top1_lost"]))
            rows.append((d.category, name, f"{value:+.4f}", bounds, f"{span['n']:,}", *flips))
    head = ("category", "span", "KLD, b - a", "95 % interval", "n", "top-1 gained", "top-1 lost")
    return Table("On other spans, not part of the verdicts", head, tuple(rows), words=(0, 1))


def _row(name: str, d: Difference) -> tuple[str, ...]:
    return (
        *(name, d.metric, f"{d.a:.4f}", f"{d.b:.4f}", f"{d.difference:+.4f}"),
        "not known" if d.low is None or d.high is None else f"[{d.low:+.4f}, {d.high:+.4f}]",
        *(_p_text(d.p), _p_text(d.p_holm), f"{d.n:,}"),
        *(str(d.details.get(key, "")) for key in ("gained", "lost")),
        "not known" if d.smallest_visible is None else f"{d.smallest_visible:.4f}",
        d.verdict,
    )


def _p_text(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
