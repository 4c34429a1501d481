"""A finished sweep as a page: where each category breaks, which breaks first, and how."""

from collections.abc import Mapping
from typing import Any

from bitwright.report.blocks import Page, Sentences, Table
from bitwright.report.size_blocks import (
    metric_name,
    place_text,
    scores,
    size_table,
    sweep_figures,
    warning_lines,
)
from bitwright.report.wording import NO_DATA, SYNTHETIC, size_text


def sweep_page(result: Mapping[str, Any]) -> Page:
    """The page of a sweep's result.json."""
    sizes = result["sizes"]
    rows = [*_reference(result), *sizes]
    return Page(
        f"{result['model']}: {result['workflow']}",
        " ".join([target_text(result), first_text(result)]),
        (SYNTHETIC,) if result["synthetic_reference"] else (),
        (
            threshold_table({result["model"]: result}),
            family_table(result),
            *sweep_figures(sizes),
            size_table("Every size", rows, result["max_loss"]),
            task_table(result),
            failure_table(result),
            Sentences("What breaks", tuple(break_lines(result))),
            Sentences("Warnings of single tasks", warning_lines(result.get("flags", ()))),
            Sentences("How to read this", tuple(_reading(result))),
        ),
    )


def _reference(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = result.get("reference")
    return [] if found is None else [found]


def target_text(result: Mapping[str, Any]) -> str:
    """Where the target breaks, as a sentence."""
    target = result.get("target")
    one = result["thresholds"].get(target)
    if one is None:
        return ""
    unharmed = place_text(one["last_unharmed_bpw"], one.get("last_unharmed_bytes"))
    harmed = place_text(one["first_harmed_bpw"], one.get("first_harmed_bytes"))
    if one["last_unharmed_bpw"] is None and one["first_harmed_bpw"] is None:
        return f"Where {target} breaks is not established on {one['n_items']} items."
    if one["first_harmed_bpw"] is None:
        return f"{target} is shown unharmed down to {unharmed}, and harmed at no size."
    if one["last_unharmed_bpw"] is None:
        return f"{target} is shown harmed at {harmed}, and unharmed at no size above it."
    return f"{target} breaks between {unharmed} and {harmed}."


def first_text(result: Mapping[str, Any]) -> str:
    """Which category breaks first, in a sentence."""
    first = result["first_to_break"]
    if first["category"] is not None:
        return f"First to break: {first['category']} ({first['probability']:.0%} of the resamples)."
    if first.get("leader") is None:
        return "First to break: undecided."
    return (
        f"First to break: undecided ({first['leader']} in {first['probability']:.0%} of the "
        "resamples)."
    )


def threshold_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Thresholds of one or more runs side by side, category by category."""
    categories = dict.fromkeys(c for run in runs.values() for c in run["thresholds"])
    several = len(runs) > 1
    rows = []
    for category in categories:
        for name, run in runs.items():
            one = run["thresholds"].get(category)
            if one is not None:
                cells = _threshold_cells(one)
                rows.append((category, name, *cells) if several else (category, *cells))
    names = ("category", "run") if several else ("category",)
    head = (*names, "shown unharmed down to", "shown harmed at", "items", "scored by", "remarks")
    words = (0, len(head) - 2, len(head) - 1)
    return Table(
        "Where each category breaks", head, tuple(rows), words=(0, 1, *words) if several else words
    )


def family_table(result: Mapping[str, Any]) -> Table:
    """The same among stock files alone and among ours alone, where there are both."""
    rows = []
    for category, one in result["thresholds"].items():
        families = one.get("by_family", {})
        for family, ends in families.items() if len(families) > 1 else ():
            low, high = ends["last_unharmed_bpw"], ends["first_harmed_bpw"]
            name = {"stock": "stock files", "ours": "our layouts"}.get(family, family)
            rows.append((category, name, place_text(low, None), place_text(high, None)))
    head = ("category", "among", "shown unharmed down to", "shown harmed at")
    return Table("Stock files alone, our layouts alone", head, tuple(rows), words=(0, 1))


def run_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """What the runs differ in: model, items, imatrix, versions."""
    rows = []
    for name, run in runs.items():
        mix = ", ".join(f"{share:g} {c}" for c, share in (run.get("imatrix") or {}).items())
        versions = run.get("versions") or {}
        version = ", ".join(
            f"{k} {versions[k]}" for k in ("bitwright", "llama-cpp-python") if k in versions
        )
        model = f"{run.get('model')} {run.get('reference_type') or ''}".strip()
        suites = ", ".join(run.get("suites") or ())
        rows.append((name, model, suites, mix, version, str(run.get("seed", ""))))
    head = ("run", "model", "items of", "imatrix (shares)", "made with", "seed")
    return Table("The runs", head, tuple(rows), words=tuple(range(5)))


def _threshold_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    remarks = []
    if one.get("more_items"):
        remarks.append(f"about {one['more_items']:,} more items would narrow it")
    if not one.get("executed", True):
        remarks.append("a likelihood: takes no part in what breaks first")
    cliff = one.get("cliff")
    if cliff is not None:
        remarks.append(cliff_text(cliff))
    return (
        place_text(one["last_unharmed_bpw"], one.get("last_unharmed_bytes")),
        place_text(one["first_harmed_bpw"], one.get("first_harmed_bytes")),
        str(one["n_items"]),
        metric_name(one.get("metric", "")) or NO_DATA,
        "; ".join(remarks),
    )


def cliff_text(cliff: Mapping[str, Any]) -> str:
    """Whether log KLD bends, and where."""
    if not cliff["found"]:
        return f"KLD: {cliff['reason']}"
    return f"KLD: cliff at {cliff['bpw']:.2f} bpw [{cliff['low']:.2f}, {cliff['high']:.2f}]"


def task_table(result: Mapping[str, Any]) -> Table:
    """Every measurement of the target category at each size."""
    target = result.get("target", "")
    rows = [*_reference(result), *result["sizes"]]
    tasks = dict.fromkeys(t for one in rows for t in scores(one, target).get("tasks", {}))
    spans = dict.fromkeys(s for one in rows for s in scores(one, target).get("spans", {}))
    metric = {t: scores(rows[0], target)["tasks"][t]["metric"] for t in tasks}
    head = ("file", "bpw", *(f"{t}: {metric_name(metric[t])}" for t in tasks))
    cells = []
    for one in rows:
        found = scores(one, target)
        values = [_value(found.get("tasks", {}).get(t, {})) for t in tasks]
        klds = [_kld(found.get("spans", {}).get(s, {})) for s in spans]
        cells.append((one["label"], f"{one['bpw']:.2f}", *values, *klds))
    head = (*head, *(f"KLD on {s} tokens" for s in spans))
    note = (
        "± one standard error; on all items, also on requests that no offered tool serves, which "
        "the tables above leave out"
    )
    return Table(f"Everything measured on {target}", head, tuple(cells), note)


def _value(task: Mapping[str, Any]) -> str:
    if task.get("value") is None:
        return NO_DATA
    se = "" if task.get("se") is None else f" ± {task['se']:.3f}"
    return f"{task['value']:.3f}{se}"


def _kld(span: Mapping[str, Any]) -> str:
    value = span.get("kld_nats")
    return "" if value is None else f"{value:.3g}"


def failure_table(result: Mapping[str, Any]) -> Table:
    """What goes wrong on items of the target that the original has right, at each size."""
    target = result.get("target", "")
    found = {s["label"]: scores(s, target).get("new_failures", {}) for s in result["sizes"]}
    kinds = list(dict.fromkeys(kind for kinds in found.values() for kind in kinds))
    rows = tuple(
        (one["label"], f"{one['bpw']:.2f}", *(str(found[one["label"]].get(k, 0)) for k in kinds))
        for one in result["sizes"]
    )
    head = ("file", "bpw", *(kind.replace("_", " ") for kind in kinds))
    title = f"New failures on {target}, by kind"
    return Table(title, head, rows if kinds else (), "of items that the original has right")


def break_lines(result: Mapping[str, Any]) -> list[str]:
    """First to break with its rivals, the first kind of failure, and the weights behind it."""
    lines = []
    first = result["first_to_break"]
    if first.get("probabilities"):
        chances = ", ".join(f"{c} {p:.0%}" for c, p in first["probabilities"].items())
        lines.append(
            f"Share of the resamples of the items in which each category loses "
            f"{result['max_loss']:.0%} first: {chances}."
        )
    failure = result.get("first_failure")
    if failure and failure["kind"]:
        counts = ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in failure["kinds"].items())
        lines.append(
            f"{failure['category']} fails first by {failure['kind'].replace('_', ' ')}: at "
            f"{failure['label']}, the first size shown harmed, {counts}."
        )
    found = result.get("explained_by")
    if found:
        shares = ", ".join(f"{one['group']} {one['share']:.0%}" for one in found["groups"])
        lines.append(
            f"Of the damage on {found['category']} at {found['label']}, each kind of weight alone "
            f"does: {shares}."
        )
    return lines


def _reading(result: Mapping[str, Any]) -> list[str]:
    smallest = result["sizes"][-1]
    return [
        f"Unharmed: the score is shown to have lost less than {result['max_loss']:.0%} of the "
        "original's on the same items (95 % interval). Harmed: it is shown to be lower (paired "
        "test, corrected over the sizes). All between is not decided by these items.",
        f"The smallest size looked at is {smallest['label']} with "
        f"{size_text(smallest['size_bytes'])}; nothing is said about smaller ones.",
    ]
