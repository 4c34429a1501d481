"""From records to figures: what is drawn, on which scale, with which words on each cell."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from bitwright.engine.ggml_types import tensor_type
from bitwright.report.extras import Prediction
from bitwright.report.svg import Cell, Span, grid, intervals, ramp_color, scatter
from bitwright.report.wording import categories_of, ratio_text, ratio_verdict

OUTSIDE = "–"  # the column of tensors that belong to no block


def damage_heat_map(
    damage_map: pd.DataFrame, category: str, noise_nats: float | None = None
) -> str:
    """Role × layer, coloured by the logarithm of the damage; an empty text without rows.

    Damage below twice the noise floor is drawn empty: it cannot be told from nothing.
    """
    rows = damage_rows(damage_map, category)
    if rows.empty:
        return ""
    floor = 2.0 * (noise_nats or 0.0)
    values = rows["kld_nats"].astype(float)
    seen = values[values > floor]
    low, high = (float(seen.min()), float(seen.max())) if len(seen) else (1.0, 1.0)
    roles, layers = _axes(rows)
    cells = []
    for record in rows.to_dict("records"):
        nats = float(record["kld_nats"])
        level = _log_level(nats, low, high) if nats > floor else None
        error = float(record.get("se", math.nan))
        spread = "" if math.isnan(error) else f" ± {error:.2g}"
        shown = f"{nats:.3g}{spread} nats" if nats > floor else "not measurable"
        title = f"{record['tensor']} at {record['type']}: {shown}"
        place = (roles.index(str(record["role"])), layers.index(_layer_name(record["layer"])))
        cells.append(Cell(*place, level, _short_nats(nats) if level is not None else "", title))
    figure = grid(roles, layers, cells, f"damage on {category} by role and layer")
    return figure + _legend([(0.0, f"{low:.2g} nats"), (1.0, f"{high:.2g} nats")])


def damage_rows(damage_map: pd.DataFrame, category: str) -> pd.DataFrame:
    """The category's rows of the scored span (of all tokens where there is no such span).

    One row a tensor: at the probe type, which most have, where some were measured at others too.
    """
    rows = damage_map[damage_map["category"] == category]
    if "span" in rows.columns:
        wanted = "scored" if (rows["span"] == "scored").any() else "overall"
        rows = rows[rows["span"] == wanted]
    rows = rows.dropna(subset=["kld_nats"])
    if rows.empty:
        return rows
    probe = rows["type"].mode().iloc[0]
    first: pd.DataFrame = rows.iloc[(rows["type"] != probe).argsort(kind="stable")]
    return first.drop_duplicates("tensor").sort_index()


def layout_by_depth(layout: Mapping[str, str], tensors: pd.DataFrame) -> str:
    """Role × layer with each tensor's type, coloured by bits per weight."""
    known = tensors[tensors["tensor"].isin(list(layout))]
    if known.empty:
        return ""
    bits = {t: tensor_type(t).bpw for t in set(layout.values())}
    low, high = min(2.0, *bits.values()), max(8.5, *bits.values())
    levels = {t: _log_level(b, low, high) for t, b in bits.items()}
    roles, layers = _axes(known)
    cells = []
    for record in known.to_dict("records"):
        name = layout[str(record["tensor"])]
        place = (roles.index(str(record["role"])), layers.index(_layer_name(record["layer"])))
        title = f"{record['tensor']}: {name}, {bits[name]:.4g} bpw"
        cells.append(Cell(*place, levels[name], name, title))
    legend = [(levels[t], f"{t} {bits[t]:.4g}") for t in sorted(bits, key=lambda t: bits[t])]
    return grid(roles, layers, cells, "type of each tensor by role and layer") + _legend(legend)


def shares_by_type(
    layout: Mapping[str, str], tensors: pd.DataFrame
) -> list[tuple[str, int, float]]:
    """(type, tensors, share of the weights), most weights first."""
    known = tensors[tensors["tensor"].isin(list(layout))]
    if known.empty:
        return []
    types = known["tensor"].map(layout)
    weights: Counter[str] = Counter()
    for name, n_elements in zip(types, known["n_elements"], strict=True):
        weights[str(name)] += int(n_elements)
    counts, total = Counter(map(str, types)), weights.total()
    return [(name, counts[name], n / total) for name, n in weights.most_common()]


def ratio_figure(result: Mapping[str, Any]) -> str:
    """KLD ratio of the chosen file to the baseline on every category, with intervals."""
    ratios = {result["target"]: result["target_kld_ratio"], **result["off_target_kld_ratio"]}
    spans = [
        Span(
            label=category + (" (target)" if category == result["target"] else ""),
            value=ratio["value"],
            low=ratio.get("low"),
            high=ratio.get("high"),
            note=f"{ratio_text(ratio)} {ratio_verdict(ratio)}",
        )
        for category in categories_of(result)
        if (ratio := ratios.get(category)) is not None and ratio.get("value") is not None
    ]
    return intervals(spans, "KLD ratio by category") if spans else ""


def prediction_figure(predictions: Sequence[Prediction]) -> str:
    """Predicted against measured KLD; predictions that are not positive cannot be drawn."""
    points = [
        (
            f"{p.label}, {p.category}: predicted {p.predicted_nats:.3g}, "
            f"measured {p.measured_nats:.3g} nats",
            p.predicted_nats,
            p.measured_nats,
        )
        for p in predictions
        if p.predicted_nats > 0 and p.measured_nats > 0
    ]
    if not points:
        return ""
    return scatter(points, ("predicted KLD, nats", "measured KLD, nats"), "predicted and measured")


def _axes(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Roles by name and layers by number; what belongs to no block comes first in both."""
    outside = {str(r) for r, n in zip(rows["role"], rows["layer"], strict=True) if pd.isna(n)}
    roles = sorted(set(map(str, rows["role"])), key=lambda role: (role not in outside, role))
    names = {_layer_name(layer) for layer in rows["layer"]}
    layers = sorted(names, key=lambda name: -1 if name == OUTSIDE else int(name))
    return roles, layers


def _layer_name(layer: object) -> str:
    # A column with holes comes back from Parquet as floats with NaN.
    return OUTSIDE if pd.isna(layer) else str(int(layer))  # type: ignore[call-overload]


def _log_level(value: float, low: float, high: float) -> float:
    if high <= low:
        return 0.5
    return math.log(max(value, low) / low) / math.log(high / low)


def _short_nats(nats: float) -> str:
    """``.031``, ``1.2``, ``3e-4``: what fits a small cell."""
    if nats >= 0.00095:
        return f"{nats:.3f}".lstrip("0") if nats < 1 else f"{nats:.1f}"
    return f"{nats:.0e}".replace("e-0", "e-")


def _legend(entries: Sequence[tuple[float, str]]) -> str:
    items = []
    for level, text in entries:
        color = "rgb({},{},{})".format(*ramp_color(level))
        style = f"display:inline-block;width:.9em;height:.9em;margin:0 .3em;background:{color}"
        items.append(f'<span><i style="{style}"></i>{escape(text)}</span> ')
    return f'<p class="legend">{"".join(items)}</p>'
