"""A damage map as text: the tidy table as CSV, and a plot for the terminal."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from bitwright.damage.damage_map import DamageMap
from bitwright.engine.atomic import write_atomic

TIDY = ("tensor", "role", "layer", "type", "category", "kld_nats", "se", "n_tokens", "flips")
BARS = " ▁▂▃▄▅▆▇█"
UNDER_FLOOR, NOT_MEASURED = "·", " "
CSV = "damage_map.csv"


def tidy_table(damage_map: DamageMap, span: str = "scored") -> pd.DataFrame:
    """One row per (tensor, type, category) with the columns of `TIDY`, in the map's order."""
    rows = damage_map.rows[damage_map.rows["span"] == span]
    return rows[list(TIDY)].reset_index(drop=True)


def export_table(damage_map: DamageMap, path: Path) -> Path:
    """Write the tidy table as CSV, or as Parquet if the name ends so."""
    table = tidy_table(damage_map)
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        write_atomic(path, table.to_csv(index=False).encode())
    return path


def floor_of(damage_map: DamageMap, category: str) -> float:
    """The highest floor that values of a category are to be read against, nats."""
    own = damage_map.noise_floor.get(category, 0.0)
    return max([own, *damage_map.floors.values()])


def plot_map(damage_map: DamageMap, category: str, *, worst: int = 10) -> str:
    """Roles by depth as bars of the logarithm of the damage, and the worst tensors.

    A dot stands for a value under the noise floor of some setting, a blank for none.
    """
    rows = damage_map.probe_rows
    rows = rows[(rows["span"] == "scored") & (rows["category"] == category)]
    floor = floor_of(damage_map, category)
    shown = rows["kld_nats"][rows["kld_nats"] > floor]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (1.0, 1.0)
    layers = sorted({int(one) for one in rows["layer"].dropna()})
    width = max((len(str(one)) for one in rows["role"]), default=0)
    lines = [f"damage on {category}, {low:.2g} to {high:.2g} nats, by layer ({len(layers)})"]
    for name in dict.fromkeys(rows["role"]):
        mine = rows[rows["role"] == name]
        values = {
            None if pd.isna(layer) else int(layer): float(nats)
            for layer, nats in zip(mine["layer"], mine["kld_nats"], strict=True)
        }
        keys: Sequence[int | None] = layers if set(values) - {None} else [None]
        bars = "".join(
            NOT_MEASURED if key not in values else _bar(values[key], low, high, floor)
            for key in keys
        )
        lines.append(f"{name!s:<{width}} {bars}  {_range(list(values.values()))}")
    lines += ["", "the worst:", *_worst(rows, floor, worst)]
    return "\n".join(lines)


def _bar(nats: float, low: float, high: float, floor: float) -> str:
    if math.isnan(nats) or nats <= floor:
        return UNDER_FLOOR
    part = math.log(nats / low) / math.log(high / low) if high > low else 1.0
    return BARS[1 + round(part * (len(BARS) - 2))]


def _range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{min(values):.2g} to {max(values):.2g}"


def _worst(rows: pd.DataFrame, floor: float, worst: int) -> list[str]:
    lines = []
    top = rows.sort_values("kld_nats", ascending=False).head(worst)
    for record in top.to_dict("records"):
        nats, se = float(record["kld_nats"]), float(record["se"])
        mark = "" if nats > floor else "  under the noise floor"
        lines.append(f"{record['tensor']:<32} {record['type']:<6} {nats:.5f} ± {se:.5f} nats{mark}")
    return lines


def floor_lines(damage_map: DamageMap) -> list[str]:
    """What the reference itself loses under other settings, one line each."""
    return [f"noise floor, {label}: {nats:.2g} nats" for label, nats in damage_map.floors.items()]
