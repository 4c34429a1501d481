"""Candidate layouts from damage tables: each solved exactly, to be compared by measurement."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.allocator.options import OptionSet
from bitwright.allocator.solver import Problem, solve
from bitwright.damage.pricing import DamageTable, Doubles
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.tensors import role
from bitwright.errors import BudgetError, ConfigError

MIXED_SHARE = 0.7  # of the target, in the candidate that also looks at the other categories
BASE_EXPONENT = 1.0
ROLE_RULE, UNIFORM = "role-rule", "uniform"

Cost = Callable[[str, str], float]  # tensor, type → what the solver minimises
Weights = Mapping[str, float]  # category → weight


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """A layout that fits the budget.

    Attributes:
        types: of all quantizable tensors, fixed ones included.
        size_bytes: of the whole file.
        predicted: category → nats, the sum of its tensors' damages.
        how: how it was found, in a sentence.
    """

    label: str
    types: Mapping[str, str]
    size_bytes: int
    predicted: Mapping[str, float]
    how: str


@dataclass(frozen=True, slots=True)
class _Found:
    """A choice, and how far it may be from the optimum (a part of the cost); None if proven."""

    types: Mapping[str, str]
    gap: float | None = None


def propose(
    options: OptionSet,
    tables: Mapping[float, DamageTable],
    budget_bytes: int,
    target: str,
) -> tuple[CandidateLayout, ...]:
    """Layouts worth measuring, ours first; identical ones are given once, under the first label.

    'target' and its variants minimise the target's damage under different exponents of the type
    curve, 'mixed' also looks at the other categories. Controls: 'role-rule' (one type per role)
    and 'uniform' (one type for all). Predictions of all come from the table of exponent 1, or
    the one nearest to it, so that they can be compared.

    Raises:
        BudgetError: no layout fits.
        ConfigError: the tables do not hold the target.
    """
    options.require_feasible(budget_bytes)
    if not tables:
        raise ConfigError("there is no damage table to allocate from: measure the damage first")
    base = min(tables, key=lambda e: (abs(e - BASE_EXPONENT), e))
    if target not in tables[base].categories:
        raise ConfigError(
            f"the damage map has no category {target!r}: it was measured for"
            f" {', '.join(tables[base].categories)}"
        )
    found: dict[tuple[tuple[str, str], ...], CandidateLayout] = {}
    for label, choice, how in _variants(options, tables, base, budget_bytes, target):
        full = options.complete(choice)
        candidate = CandidateLayout(
            label, full, options.layout_bytes(full), predict(tables[base], full), how
        )
        found.setdefault(tuple(full.items()), candidate)
    return tuple(found.values())


def _variants(
    options: OptionSet,
    tables: Mapping[float, DamageTable],
    base: float,
    budget_bytes: int,
    target: str,
) -> Iterator[tuple[str, Mapping[str, str], str]]:
    room = budget_bytes - options.fixed_bytes
    only = {target: 1.0}
    for exponent in sorted(tables, key=lambda e: (e != base, e)):
        label = "target" if exponent == base else f"target-exponent-{exponent:g}"
        cost = _cost(options, tables[exponent], only)
        how = f"least predicted {target} damage, type curve with exponent {exponent:g}"
        yield _solved(label, how, _per_tensor(options, cost, room))
    cost = _cost(options, tables[base], only)
    mix = _mixed(tables[base].categories, target)
    if len(mix) > 1:
        mixed = _cost(options, tables[base], mix)
        shares = f"{MIXED_SHARE:.0%} {target}, {1 - MIXED_SHARE:.0%} the mean of the others"
        how = f"least predicted damage of {shares}"
        yield _solved("mixed", how, _per_tensor(options, mixed, room))
    by_role = _per_role(options, cost, room)
    if by_role is not None:
        yield _solved(ROLE_RULE, f"one type per role, least predicted {target} damage", by_role)
    alike = _uniform(options, cost, room)
    if alike is not None:
        yield UNIFORM, alike[1], f"{alike[0]} for every tensor that can take it"


def _solved(label: str, how: str, found: _Found) -> tuple[str, Mapping[str, str], str]:
    """With the solver's gap in the sentence, in the rare case that it could not close it."""
    return label, found.types, how if found.gap is None else f"{how} (within {found.gap:.1e})"


def _mixed(categories: Sequence[str], target: str) -> dict[str, float]:
    others = [c for c in categories if c != target]
    return {target: MIXED_SHARE} | {c: (1 - MIXED_SHARE) / len(others) for c in others}


def predict(table: DamageTable, types: Mapping[str, str]) -> dict[str, float]:
    """Category → nats: the sum of the damages of a layout's tensors.

    Tensors that the table does not hold add nothing: they were not measured. A type that it does
    not price for a tensor is priced between the two listed types next to it in bits per weight,
    on a logarithmic scale; beyond the listed ones damage changes fourfold per bit.
    """
    prices = _Prices(table)
    total = np.zeros(len(table.categories))
    for name, type_name in types.items():
        total += prices.nats(name, type_name)
    return dict(zip(table.categories, map(float, total), strict=True))


class _Prices:
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


def _cost(options: OptionSet, table: DamageTable, weights: Weights) -> Cost:
    """Weighted damage; a tensor that keeps its own type costs nothing."""
    prices = _Prices(table)
    by_category = np.array([weights.get(c, 0.0) for c in table.categories])
    used = np.flatnonzero(by_category)

    def cost(name: str, type_name: str) -> float:
        if type_name == options.model.tensor(name).type:
            return 0.0
        if name not in prices.rows:
            raise ConfigError(
                f"the damage table has no row for {name}, which is to be chosen for: measure it,"
                " or pin it"
            )
        nats: float = prices.nats(name, type_name)[used].dot(by_category[used]).item()
        return nats

    return cost


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors that are decided together, and what each choice gives every one of them."""

    name: str
    choices: tuple[Mapping[str, str], ...]


def _per_tensor(options: OptionSet, cost: Cost, room: int) -> _Found:
    groups = [_Group(n, tuple({n: t} for t in options.offered[n])) for n in options.tensors]
    return _solve(options, groups, cost, room)


def _per_role(options: OptionSet, cost: Cost, room: int) -> _Found | None:
    """One ladder type per role; None when that is too coarse for the budget."""
    members: dict[str, list[str]] = {}
    for name in options.tensors:
        members.setdefault(role(name), []).append(name)
    groups = [
        _Group(one, tuple({n: options.nearest(n, t) for n in names} for t in options.ladder))
        for one, names in members.items()
    ]
    try:
        return _solve(options, groups, cost, room)
    except BudgetError:
        return None


def _uniform(options: OptionSet, cost: Cost, room: int) -> tuple[str, Mapping[str, str]] | None:
    """The ladder type that does least damage among those that fit, and its layout."""
    fitting = []
    for kind in options.ladder:
        types = {name: options.nearest(name, kind) for name in options.tensors}
        if sum(options.option_bytes(*item) for item in types.items()) <= room:
            fitting.append((sum(cost(*item) for item in types.items()), kind, types))
    if not fitting:
        return None
    _, kind, types = min(fitting, key=lambda one: one[:2])
    return kind, types


def _solve(options: OptionSet, groups: Sequence[_Group], cost: Cost, room: int) -> _Found:
    if not groups:
        return _Found({})
    choices = [choice for group in groups for choice in group.choices]
    problem = Problem(
        tensors=tuple(group.name for group in groups),
        owner=np.repeat(np.arange(len(groups)), [len(group.choices) for group in groups]),
        types=tuple("+".join(dict.fromkeys(choice.values())) for choice in choices),
        cost=np.array([sum(cost(*item) for item in choice.items()) for choice in choices]),
        size_bytes=np.array(
            [sum(options.option_bytes(*item) for item in choice.items()) for choice in choices],
            dtype=np.int64,
        ),
        budget_bytes=room,
    )
    solution = solve(problem)
    types = {name: kind for j in solution.chosen for name, kind in choices[int(j)].items()}
    return _Found(types, None if solution.proven else solution.gap)
