"""The report as one HTML file that asks for nothing: verdict first, then what stands behind it."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bitwright.report.extras import ReportExtras
from bitwright.report.figures import (
    damage_heat_map,
    damage_rows,
    layout_by_depth,
    prediction_figure,
    ratio_figure,
    shares_by_type,
)
from bitwright.report.wording import (
    NO_DATA,
    categories_of,
    compared_name,
    file_name,
    file_of,
    flat_items,
    kld_text,
    model_name,
    number_text,
    ratio_text,
    ratio_verdict,
    share_text,
    size_text,
    verdict_sentence,
    warnings_of,
)

Cells = Sequence[str]


def html_report(result: Mapping[str, Any], extras: ReportExtras) -> str:
    """The whole page. All text that comes from outside is escaped."""
    sections = (
        _head(result),
        _results(result, extras),
        _two_by_two(result),
        _price(result),
        _damage(result, extras),
        _layouts(result, extras),
        _predictions(result, extras),
        _corpora(extras),
        _noise(extras),
        _making(result, extras),
    )
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = f"{model_name(result)} for {result['target']}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{css}</style></head>\n<body>"
        + "\n".join(s for s in sections if s)
        + "</body></html>\n"
    )


def _head(result: Mapping[str, Any]) -> str:
    warning = "".join(f'<p class="warn">{escape(one)}</p>' for one in warnings_of(result))
    budget = size_text(result["budget_bytes"])
    about = f"Model {model_name(result)} · target {result['target']} · budget {budget}"
    verdict = f'<p class="verdict">{escape(verdict_sentence(result))}</p>'
    return f"{verdict}{warning}<h1>{escape(about)}</h1>"


def _results(result: Mapping[str, Any], extras: ReportExtras) -> str:
    target, files, categories = result["target"], result["files"], categories_of(result)
    marks = [entry["label"] == result["chosen"] for entry in files]
    head = ["file", "size", "bpw", "KLD", f"KLD / {result['baseline']}", "p99", "top-1"]
    rows = [_target_cells(result, entry, extras) for entry in files]
    every = [
        [escape(entry["label"]), *(_kld_cell(entry["scores"].get(c, {})) for c in categories)]
        for entry in files
    ]
    scored = file_of(result, result["chosen"])["scores"]
    tokens = ", ".join(f"{c} {scored.get(c, {}).get('n_tokens', 0):,}" for c in categories)
    return (
        f"<h2>Results on {escape(target)}, on text that was never tuned on</h2>"
        + _table([*head, "PPL ratio"], rows, marks)
        + '<p class="soft">KLD in nats per token from the reference, mean ± standard error '
        "(bootstrap over documents). Ratios use the same tokens for both files; the interval is in "
        "brackets.</p><h3>Every category</h3>"
        + _table(["file", *categories], every, marks)
        + f'<p class="soft">Tokens scored: {escape(tokens)}.</p>'
    )


def _target_cells(
    result: Mapping[str, Any], entry: Mapping[str, Any], extras: ReportExtras
) -> list[str]:
    label = entry["label"]
    scores = entry["scores"].get(result["target"], {})
    ratio = scores.get("ratio")
    if ratio is None and label == result["chosen"]:
        ratio = result["target_kld_ratio"]
    shown = "1" if label == result["baseline"] else ratio_text(ratio) if ratio else "–"
    bpw = entry.get("bpw")
    tags = [extras.names.get(label, ""), file_name(entry)]
    return [
        escape(label) + "".join(f'<br><span class="tag">{escape(t)}</span>' for t in tags if t),
        escape(size_text(entry["size_bytes"])),
        "–" if bpw is None else f"{bpw:.3f}",
        _kld_cell(scores),
        shown,
        number_text(scores.get("kld_p99"), 3),
        share_text(scores.get("top1")),
        number_text(scores.get("ppl_ratio")),
    ]


def _kld_cell(score: Mapping[str, Any]) -> str:
    return kld_text(score.get("kld_nats"), score.get("se"))


def _two_by_two(result: Mapping[str, Any]) -> str:
    """General or task imatrix × stock or our layout, where at least three of the four exist."""
    stock = file_of(result, result["baseline"])["layout"]
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in result["files"]:
        if entry["layout"] in ("ours", stock):
            cells.setdefault((entry["layout"], entry["imatrix"]), entry)
    sides = ((stock, "general"), (stock, "task"), ("ours", "general"), ("ours", "task"))
    if sum(side in cells for side in sides) < 3:
        return ""
    rows = []
    for layout in (stock, "ours"):
        row = [escape("our layout" if layout == "ours" else f"stock {layout}")]
        for imatrix in ("general", "task"):
            entry = cells.get((layout, imatrix), {"scores": {}})
            row.append(_kld_cell(entry["scores"].get(result["target"], {})))
        rows.append(row)
    target = escape(result["target"])
    return f"<h2>What imatrix and layout each bought on {target}</h2>" + _table(
        ["", "general imatrix", "task imatrix"], rows
    )


def _price(result: Mapping[str, Any]) -> str:
    figure = ratio_figure(result)
    if not figure:
        return ""
    shown: dict[str, list[str]] = {}
    for category, ratio in result["off_target_kld_ratio"].items():
        shown.setdefault(ratio_verdict(ratio), []).append(category)
    sentences = [
        f"{words} {', '.join(shown[kind])}."
        for kind, words in (
            ("higher", "Off the target it costs: KLD is higher on"),
            ("lower", "KLD is lower on"),
            ("no difference shown", "No difference is shown on"),
        )
        if kind in shown
    ]
    text = " ".join(sentences)
    return (
        f"<h2>The price elsewhere</h2><p>{escape(text)}</p>{figure}"
        f'<p class="soft">KLD of {escape(compared_name(result))} over KLD of '
        f"{escape(result['baseline'])}, with paired intervals (95 % unless the suite says "
        "otherwise). Left of the dashed line is closer to the reference.</p>"
    )


def _damage(result: Mapping[str, Any], extras: ReportExtras) -> str:
    if extras.damage_map is None or extras.damage_map.empty:
        return ""
    parts = []
    for category in categories_of(result):
        figure = damage_heat_map(extras.damage_map, category, extras.noise_nats.get(category))
        if figure:
            is_open = " open" if category == result["target"] else ""
            name = escape(category)
            parts.append(f"<details{is_open}><summary>{name}</summary>{figure}</details>")
    probes = sorted({str(t) for t in damage_rows(extras.damage_map, result["target"])["type"]})
    return (
        "<h2>Damage map</h2><p>KLD that one tensor alone costs when it is packed at the probe "
        f"type ({escape(', '.join(probes))}) and everything else stays as it was. Brighter is "
        f"worse; the scale is logarithmic.</p>{''.join(parts)}"
    )


def _layouts(result: Mapping[str, Any], extras: ReportExtras) -> str:
    if extras.tensors is None or not extras.layouts:
        return ""
    order = dict.fromkeys([result["chosen"], result["baseline"], *extras.layouts])
    parts = []
    for label in order:
        layout = extras.layouts.get(label)
        figure = layout_by_depth(layout, extras.tensors) if layout else ""
        if layout and figure:
            shares = ", ".join(
                f"{t} {100 * share:.1f} % of the weights in {n} tensors"
                for t, n, share in shares_by_type(layout, extras.tensors)
            )
            is_open = " open" if label in (result["chosen"], result["baseline"]) else ""
            parts.append(
                f"<details{is_open}><summary>{escape(label)}</summary>{figure}"
                f'<p class="soft">{escape(shares)}</p></details>'
            )
    return "<h2>Layout by depth</h2>" + "".join(parts) if parts else ""


def _predictions(result: Mapping[str, Any], extras: ReportExtras) -> str:
    figure = prediction_figure(extras.predictions)
    if not figure:
        return ""
    ratio = result.get("predicted_over_measured")
    text = f"For the chosen file predicted over measured is {number_text(ratio, 3)}. "
    rows = [
        [
            escape(p.label),
            escape(p.category),
            f"{p.predicted_nats:.4g}",
            f"{p.measured_nats:.4g}",
            f"{p.predicted_nats / p.measured_nats:.3f}" if p.measured_nats > 0 else NO_DATA,
        ]
        for p in extras.predictions
    ]
    head = ["layout", "category", "predicted nats", "measured nats", "predicted / measured"]
    return (
        f"<h2>Predicted and measured</h2><p>{escape(text)}The sum of single damages proposes "
        f"layouts; the measured KLD of the whole layout decides.</p>{figure}"
        f"<details><summary>All values</summary>{_table(head, rows)}</details>"
    )


def _corpora(extras: ReportExtras) -> str:
    if not extras.corpora:
        return ""
    names = dict.fromkeys(
        key
        for splits in extras.corpora.values()
        for statistics in splits.values()
        for key, value in statistics.items()
        if isinstance(value, int | float | str)
    )
    rows = [
        [escape(category), escape(split), *(_plain(statistics.get(n)) for n in names)]
        for category, splits in extras.corpora.items()
        for split, statistics in splits.items()
    ]
    return (
        "<h2>Corpora</h2><p>Every document is in one split only: calibrate makes the imatrix, "
        "probe the damage map, select chooses between layouts, report gives the numbers above.</p>"
        + _table(["category", "split", *names], rows)
    )


def _noise(extras: ReportExtras) -> str:
    known = {c: v for c, v in extras.noise_nats.items() if v is not None}
    lines = [f"<li>{escape(note)}</li>" for note in extras.notes]
    if known:
        floors = ", ".join(f"{category} {value:.1e}" for category, value in known.items())
        lines.insert(
            0,
            "<li>Noise floor, the reference decoded twice and compared with itself, in nats: "
            f"{escape(floors)}. Differences below twice that are not measurable.</li>",
        )
    return f"<h2>Noise and remarks</h2><ul>{''.join(lines)}</ul>" if lines else ""


def _making(result: Mapping[str, Any], extras: ReportExtras) -> str:
    labels = {key: result[key] for key in ("chosen", "baseline")}
    items: dict[str, object] = {**labels, **extras.recipe}
    rows = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in flat_items(items)
    )
    command = f"<pre>{escape(extras.command)}</pre>" if extras.command else ""
    return f"<h2>How it was made</h2>{command}<dl>{rows}</dl>"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else escape(str("–" if value is None else value))


def _table(head: Cells, rows: Sequence[Cells], chosen: Sequence[bool] = ()) -> str:
    """A table; cells are HTML already, heads are text."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for index, row in enumerate(rows):
        kind = ' class="chosen"' if index < len(chosen) and chosen[index] else ""
        body.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
