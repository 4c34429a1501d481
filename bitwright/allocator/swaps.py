"""Neighbours of a layout at constant bytes: one tensor a type up, another down.

The table says which exchanges may pay; measuring says which do. Candidates come in the order of
what they may gain: the predicted change less one standard error of it, since a change that is
predicted badly is worth a look too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.predictions import Prices
from bitwright.damage.pricing import DamageTable, Doubles
from bitwright.engine.ggml_types import TYPES

MOST_MOVES = 150  # of each direction, those that promise most
MODEL_ERROR = 0.3  # of a predicted change: what additive tables are off by


@dataclass(frozen=True, slots=True)
class Swap:
    """A neighbour: ``types`` of the tensors that change, and what it is predicted to change."""

    types: Mapping[str, str]
    nats: float
    se: float


@dataclass(frozen=True, slots=True)
class _Move:
    name: str
    type: str
    size_bytes: int
    nats: float
    se: float


def swaps(
    options: OptionSet,
    table: DamageTable,
    types: Mapping[str, str],
    budget_bytes: int,
    weights: Mapping[str, float],
) -> Iterator[Swap]:
    """Single steps up and pairs (up, down) that fit the budget, the most promising first."""
    moves = _moves(options, table, types, weights)
    room = budget_bytes - options.layout_bytes(types)
    ups = sorted((m for m in moves if m.size_bytes > 0), key=lambda m: (m.nats - m.se, m.name))
    downs = sorted((m for m in moves if m.size_bytes <= 0), key=lambda m: (m.nats - m.se, m.name))
    ups, downs = ups[:MOST_MOVES], _cheapest(downs)[:MOST_MOVES]
    found = [Swap({m.name: m.type}, m.nats, m.se) for m in ups if m.size_bytes <= room]
    found += [
        Swap({u.name: u.type, d.name: d.type}, u.nats + d.nats, float(np.hypot(u.se, d.se)))
        for u in ups
        for d in downs
        if u.name != d.name and u.size_bytes + d.size_bytes <= room
    ]
    hopeful = (s for s in found if s.nats - s.se < 0)
    yield from sorted(hopeful, key=lambda s: (s.nats - s.se, sorted(s.types.items())))


def _cheapest(downs: Sequence[_Move]) -> list[_Move]:
    """By damage per byte given back."""
    return sorted(downs, key=lambda m: ((m.nats - m.se) / max(1, -m.size_bytes), m.name, m.type))


def _moves(
    options: OptionSet,
    table: DamageTable,
    types: Mapping[str, str],
    weights: Mapping[str, float],
) -> list[_Move]:
    """Each free tensor to the next type up and the next one down."""
    prices = Prices(table)
    by_category: Doubles = np.array([weights.get(c, 0.0) for c in table.categories])
    errors = Prices(replace(table, nats=table.se))
    found = []
    for name in options.tensors:
        offered, own = options.offered[name], types[name]
        if own not in offered or name not in prices.rows:
            continue
        at = offered.index(own)
        for kind in (*offered[max(0, at - 1) : at], *offered[at + 1 : at + 2]):
            nats = float((prices.nats(name, kind) - prices.nats(name, own)) @ by_category)
            spread = np.abs(errors.nats(name, kind) - errors.nats(name, own)) * by_category
            se = float(np.hypot(np.sqrt(np.square(spread).sum()), MODEL_ERROR * abs(nats)))
            size = options.option_bytes(name, kind) - options.option_bytes(name, own)
            if size != 0 and (size > 0) == (TYPES[kind].bpw > TYPES[own].bpw):
                found.append(_Move(name, kind, size, nats, se))
    return found
