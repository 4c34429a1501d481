"""Candidate layouts from damage tables: each solved exactly, to be compared by measurement."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwright.allocator.choices import (
    Cost,
    Found,
    layer_groups,
    role_groups,
    single_groups,
    solve_groups,
    weighted_cost,
)
from bitwright.allocator.options import OptionSet
from bitwright.allocator.predictions import between, predict
from bitwright.allocator.terms import Terms, name_rule, solve_within, without_foreign
from bitwright.damage.pricing import DamageTable
from bitwright.errors import BudgetError, ConfigError

__all__ = ["CandidateLayout", "between", "is_control", "make_candidate", "predict", "propose"]

MIXED_SHARE = 0.7  # of the target, in the candidate that also looks at the other categories
BASE_EXPONENT = 1.0
ROLE_RULE, UNIFORM, HONEST = "role-rule", "uniform", "honest-name"


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """A layout that fits the budget.

    Attributes:
        types: of all quantizable tensors, fixed ones included.
        size_bytes: of the whole file.
        predicted: category → nats, the sum of its tensors' damages.
        how: how it was found, in a sentence.
        imatrix: the name of the one that it is packed with.
    """

    label: str
    types: Mapping[str, str]
    size_bytes: int
    predicted: Mapping[str, float]
    how: str
    imatrix: str = "task"


def is_control(label: str) -> bool:
    """Measured beside ours: simpler ideas to beat, and what an honest name costs."""
    return label in (UNIFORM, HONEST) or label.startswith(ROLE_RULE)


def propose(
    options: OptionSet,
    tables: Mapping[float, DamageTable],
    budget_bytes: int,
    target: str,
    terms: Terms | None = None,
    name: str | None = None,
    pooled: DamageTable | None = None,
) -> tuple[CandidateLayout, ...]:
    """Layouts worth measuring, ours first; identical ones are given once, under the first label.

    'target' and its variants minimise the target's damage under different exponents of the type
    curve, 'pooled' under the ``pooled`` table (see `damage.pooling`), 'mixed' also looks at the
    other categories; all keep ``terms``. 'honest-name' is the best that may carry the stock name
    ``name``. Controls: 'role-rule' (one type per role), once per way of weighing above, of which
    the one that measures best is the control; and 'uniform' (one type for all). Predictions of
    all come from the table of exponent 1, or the one nearest to it, so that they can be compared.

    Raises:
        BudgetError: no layout fits, or none keeps the terms.
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
    terms = terms or Terms()
    room = budget_bytes - options.fixed_bytes
    found: dict[tuple[tuple[str, str], ...], CandidateLayout] = {}
    weighings = _weighings(options, tables, base, target, pooled)
    variants = [
        _ours(options, tables[base], weighings, room, terms),
        _named(options, tables[base], room, target, terms, name),
        _controls(options, weighings, room),
    ]
    for label, choice, how in (one for variant in variants for one in variant):
        candidate = make_candidate(options, tables[base], label, choice, how)
        key = tuple(candidate.types.items())
        # The price of an honest name is shown even where it is nothing.
        found.setdefault((*key, (HONEST, "")) if label == HONEST else key, candidate)
    return tuple(found.values())


def make_candidate(
    options: OptionSet, table: DamageTable, label: str, types: Mapping[str, str], how: str
) -> CandidateLayout:
    """Completed with the fixed tensors, its exact bytes and its prediction."""
    full = options.complete(types)
    return CandidateLayout(label, full, options.layout_bytes(full), predict(table, full), how)


Variant = tuple[str, Mapping[str, str], str]


def _weighings(
    options: OptionSet,
    tables: Mapping[float, DamageTable],
    base: float,
    target: str,
    pooled: DamageTable | None,
) -> list[tuple[str, Cost, str]]:
    """(label, cost, what is least) of each way to weigh the damages, the plain one first."""
    found = []
    for exponent in sorted(tables, key=lambda e: (e != base, e)):
        label = "target" if exponent == base else f"target-exponent-{exponent:g}"
        cost = weighted_cost(options, tables[exponent], {target: 1.0})
        found.append((label, cost, f"{target} damage, type curve with exponent {exponent:g}"))
    if pooled is not None:
        cost = weighted_cost(options, pooled, {target: 1.0})
        found.append(("pooled", cost, f"{target} damage, pooled over role, depth and categories"))
    mix = _mixed(tables[base].categories, target)
    if len(mix) > 1:
        shares = f"{MIXED_SHARE:.0%} {target}, {1 - MIXED_SHARE:.0%} the mean of the others"
        cost = weighted_cost(options, tables[base], mix)
        found.append(("mixed", cost, f"damage of {shares}"))
    return found


def _ours(
    options: OptionSet,
    table: DamageTable,
    weighings: Sequence[tuple[str, Cost, str]],
    room: int,
    terms: Terms,
) -> Iterator[Variant]:
    groups = single_groups(options, terms.coherent)
    for label, cost, what in weighings:
        found = solve_within(options, groups, cost, room, table, terms)
        yield label, found.types, _with_notes(f"least predicted {what}", found)


def _named(
    options: OptionSet,
    table: DamageTable,
    room: int,
    target: str,
    terms: Terms,
    name: str | None,
) -> Iterator[Variant]:
    """The best layout that keeps the name's promise; nothing where none can."""
    rule = None if name is None else name_rule(options, name)
    if name is None or rule is None:
        return
    allowed = without_foreign(options, name)
    groups = single_groups(allowed, terms.coherent)
    cost = weighted_cost(allowed, table, {target: 1.0})
    try:
        found = solve_within(allowed, groups, cost, room, table, terms, [rule])
    except BudgetError:
        return
    how = f"least predicted {target} damage among files that may be called {name}"
    yield HONEST, found.types, _with_notes(how, found)


def _controls(
    options: OptionSet, weighings: Sequence[tuple[str, Cost, str]], room: int
) -> Iterator[Variant]:
    for number, (label, cost, what) in enumerate(weighings):
        by_role = per_role(options, cost, room)
        if by_role is not None:
            how = f"one type per role, least predicted {what}"
            name = f"{ROLE_RULE}-{label}" if number else ROLE_RULE
            yield name, by_role.types, _with_notes(how, by_role)
    alike = uniform(options, weighings[0][1], room)
    if alike is not None:
        yield UNIFORM, alike[1], f"{alike[0]} for every tensor that can take it"


def _with_notes(how: str, found: Found) -> str:
    """With the solver's gap in the sentence, where it did not close it, and its notes."""
    gap = "" if found.gap is None else f" (within {found.gap:.1e} of the optimum)"
    return "; ".join([how + gap, *found.notes])


def _mixed(categories: Sequence[str], target: str) -> dict[str, float]:
    others = [c for c in categories if c != target]
    return {target: MIXED_SHARE} | {c: (1 - MIXED_SHARE) / len(others) for c in others}


def per_role(options: OptionSet, cost: Cost, room: int) -> Found | None:
    """One ladder type per role; None when that is too coarse for the budget."""
    try:
        return solve_groups(options, role_groups(options), cost, room)
    except BudgetError:
        return None


def per_layer(options: OptionSet, cost: Cost, room: int) -> Found | None:
    """One ladder type per layer; None when that is too coarse for the budget."""
    try:
        return solve_groups(options, layer_groups(options), cost, room)
    except BudgetError:
        return None


def uniform(options: OptionSet, cost: Cost, room: int) -> tuple[str, Mapping[str, str]] | None:
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
