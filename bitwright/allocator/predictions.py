"""What the additive table says of a layout, types that it does not price included."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from bitwright.damage.pricing import DamageTable, Doubles
from bitwright.engine.ggml_types import TYPES


def predict(table: DamageTable, types: Mapping[str, str]) -> dict[str, float]:
    """Category → nats: the sum of the damages of a layout's tensors.

    Tensors that the table does not hold add nothing: they were not measured. A type that it does
    not price for a tensor is priced between the two listed types next to it in bits per weight,
    on a logarithmic scale; beyond the listed ones damage changes fourfold per bit.
    """
    prices = Prices(table)
    total = np.zeros(len(table.categories))
    for name, type_name in types.items():
        total += prices.nats(name, type_name)
    return dict(zip(table.categories, map(float, total), strict=True))


class Prices:
    """Looks up damages, and fills in those of types that were not priced."""

    def __init__(self, table: DamageTable) -> None:
        self.table = table
        self.rows = {name: t for t, name in enumerate(table.tensors)}
        self.columns = {name: y for y, name in enumerate(table.types)}

    def nats(self, name: str, type_name: str) -> Doubles:
        """Damage in each category (C,); zeros for a tensor without a measure, and for floats."""
        categories = len(self.table.categories)
        row = self.rows.get(name)
        if row is None or TYPES[type_name].family == "float":
            return np.zeros(categories)
        priced = self.table.nats[row]
        column = self.columns.get(type_name)
        found = np.full(categories, np.nan) if column is None else priced[column].copy()
        for c in np.flatnonzero(np.isnan(found)):
            known = [
                (TYPES[t].bpw, float(nats))
                for t, nats in zip(self.table.types, priced[:, c], strict=True)
                if not np.isnan(nats)
            ]
            found[c] = between(known, TYPES[type_name].bpw)
        return found


def between(known: Iterable[tuple[float, float]], bpw: float) -> float:
    """Damage at ``bpw`` from (bpw, damage) pairs; nan if there are none.

    Between two neighbours: linear in the logarithm (linear where one is not above zero). Beyond
    the ends: fourfold per bit, as squared error of a uniform quantizer (6.02 dB per bit).
    """
    points = sorted(known)
    if not points:
        return math.nan
    below = [p for p in points if p[0] <= bpw]
    above = [p for p in points if p[0] >= bpw]
    if not below or not above:
        end_bpw, damage = points[0] if not below else points[-1]
        return damage * math.pow(4.0, end_bpw - bpw)
    (low, at_low), (high, at_high) = below[-1], above[0]
    part = 0.0 if high == low else (bpw - low) / (high - low)
    if at_low > 0 and at_high > 0:
        return math.exp((1 - part) * math.log(at_low) + part * math.log(at_high))
    return (1 - part) * at_low + part * at_high
