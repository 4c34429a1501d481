"""What a layout must hold to besides the file's bytes: prices elsewhere, names, further budgets.

The off-target price is a promise, so it is kept with its measurement error: the predicted excess
over (1 + ε) times the baseline's damage, plus `SIGMAS` standard errors of it, is at most zero.
Damages of one tensor at two types come from the same probe and err together, so the error of their
difference is taken per tensor, and tensors are independent. It depends on the layout: the margin is
found by solving again with the last layout's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np

from bitwright.allocator.choices import Cost, Found, Group, Rule, solve_groups, weighted_cost
from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.predictions import Prices, predict
from bitwright.allocator.rules import load_rules
from bitwright.damage.pricing import DamageTable
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.engine.upstream import default_type
from bitwright.errors import BudgetError, ConfigError

DEFAULT_PRICE = 0.10
SIGMAS = 1.645  # one side, 95 %
MARGIN_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class SideBudget:
    """At most ``size_bytes`` for the tensors that a glob matches, for example those on a GPU."""

    pattern: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Terms:
    """Everything optional.

    baseline: the layout that prices are relative to. prices: off-target category → ε.
    coherent: sets of roles that take one type in each layer.
    """

    baseline: Mapping[str, str] | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    side_budgets: tuple[SideBudget, ...] = ()
    coherent: tuple[tuple[str, ...], ...] = ()


def off_target_prices(
    declared: Mapping[str, float], categories: Sequence[str], target: str
) -> dict[str, float]:
    """ε of every category but the target: what is declared, else 'default', else 0.10.

    Raises:
        ConfigError: a category that is not there, or the target itself.
    """
    for category in declared:
        if category != "default" and (category not in categories or category == target):
            others = ", ".join(c for c in categories if c != target) or "none"
            raise ConfigError(
                f"the price names {category!r}, which is no off-target category: use {others},"
                " or 'default' for all of them"
            )
    usual = declared.get("default", DEFAULT_PRICE)
    return {c: declared.get(c, usual) for c in categories if c != target}


def side_rules(options: OptionSet, budgets: Sequence[SideBudget]) -> list[Rule]:
    """A rule per further budget, with what fixed tensors take of it already left out.

    Raises:
        ConfigError: a pattern without a tensor.
        BudgetError: fixed tensors alone take more.
    """
    rules = []
    for one in budgets:
        names = {n for n in options.sizes.alignment if fnmatchcase(n, one.pattern)}
        if not names:
            raise ConfigError(
                f"the budget for {one.pattern!r} matches no quantizable tensor of"
                f" {options.model.name}: `bitwright inspect --json` lists them"
            )
        fixed = names - set(options.tensors)
        taken = sum(options.option_bytes(n, options.fixed[n]) for n in fixed if n in options.fixed)
        if taken > one.size_bytes:
            raise BudgetError(
                f"the budget of {one.size_bytes:,} bytes for {one.pattern!r} is under the"
                f" {taken:,} bytes of its fixed tensors: raise it, or remove pins"
            )

        def use(name: str, kind: str, names: set[str] = names) -> float:
            return float(options.option_bytes(name, kind)) if name in names else 0.0

        rules.append(Rule(f"bytes of {one.pattern!r}", use, float(one.size_bytes - taken)))
    return rules


def name_rule(options: OptionSet, ftype: str) -> Rule | None:
    """What the stock name asks for: the least share of body weights in its type.

    None where the ladder does not hold the type, so that no layout can earn the name.
    """
    kind, rules = default_type(ftype), load_rules()
    letter = ftype.rsplit("_", 1)[-1]
    share = getattr(rules.shares, letter if letter in rules.sizes.get(kind, ()) else "whole")
    if kind not in options.ladder:
        return None
    model = options.model
    body = {
        t.name: t.n_elements
        for t in model.tensors
        if is_body(t.name) and is_quantizable(t, model.arch)
    }
    have = sum(n for name, n in body.items() if options.fixed.get(name) == kind)
    needed = share * sum(body.values()) - have

    def use(name: str, type_name: str) -> float:
        return -float(body.get(name, 0)) if type_name == kind else 0.0

    return Rule(f"the share of {kind} that the name {ftype} asks for", use, -needed)


def without_foreign(options: OptionSet, ftype: str) -> OptionSet:
    """The options that a file of that name may hold: no IQ types under a K name."""
    if TYPES[default_type(ftype)].family != "K":
        return options
    offered = {
        n: tuple(t for t in types if TYPES[t].family != "IQ") or types
        for n, types in options.offered.items()
    }
    ladder = tuple(t for t in options.ladder if TYPES[t].family != "IQ")
    return replace(options, offered=offered, ladder=ladder)


def solve_within(
    options: OptionSet,
    groups: Sequence[Group],
    cost: Cost,
    room: int,
    table: DamageTable,
    terms: Terms,
    more: Sequence[Rule] = (),
) -> Found:
    """The best choice that keeps all terms, prices with their measurement error.

    Where the error is too large for any choice to keep a price with it, the price holds for the
    predicted values alone, and a note says so.

    Raises:
        BudgetError: no choice keeps the terms.
    """
    plain = [*side_rules(options, terms.side_budgets), *more]
    priced = _price_rules(options, table, terms)
    margins = [0.0] * len(priced)
    found = solve_groups(options, groups, cost, room, [*plain, *(p.rule for p in priced)])
    for _ in range(MARGIN_ROUNDS if priced else 0):
        full = options.complete(found.types)
        wanted = [SIGMAS * p.error(full) for p in priced]
        excess = [p.excess(full) + w for p, w in zip(priced, wanted, strict=True)]
        if all(e <= 1e-12 for e in excess):
            return found
        margins = [max(m, 1.02 * w) for m, w in zip(margins, wanted, strict=True)]
        tight = [
            replace(p.rule, limit=p.rule.limit - m) for p, m in zip(priced, margins, strict=True)
        ]
        try:
            found = solve_groups(options, groups, cost, room, [*plain, *tight])
        except BudgetError:
            break
    names = ", ".join(p.category for p in priced)
    note = f"the price on {names} holds for predicted values, not with their errors on top"
    return replace(found, notes=(note,)) if priced else found


@dataclass(frozen=True, slots=True)
class _Priced:
    """One category's price: the rule for the solver, and what a layout exceeds it by."""

    category: str
    factor: float
    rule: Rule
    baseline: Mapping[str, str]
    table: DamageTable

    def excess(self, types: Mapping[str, str]) -> float:
        """Predicted damage less (1 + ε) times the baseline's, nats."""
        own, base = (predict(self.table, t)[self.category] for t in (types, self.baseline))
        return own - self.factor * base

    def error(self, types: Mapping[str, str]) -> float:
        """Standard error of `excess`, nats."""
        c = self.table.categories.index(self.category)
        prices = Prices(replace(self.table, nats=self.table.se))
        parts = [
            prices.nats(name, kind)[c]
            - self.factor * prices.nats(name, self.baseline.get(name, kind))[c]
            for name, kind in types.items()
        ]
        return float(np.sqrt(np.square(parts).sum()))


def _price_rules(options: OptionSet, table: DamageTable, terms: Terms) -> list[_Priced]:
    """Rules for the categories whose baseline damage is above its own error."""
    if terms.baseline is None:
        return []
    found = []
    base = options.complete(terms.baseline)
    fixed = predict(table, {n: t for n, t in options.complete({}).items() if n in options.fixed})
    damage = predict(table, base)
    for category, epsilon in terms.prices.items():
        if category not in table.categories:
            continue
        limit = (1.0 + epsilon) * damage[category]
        rule = Rule(
            f"{category} damage (price {epsilon:.0%} over the baseline)",
            weighted_cost(options, table, {category: 1.0}),
            limit - fixed[category],
        )
        one = _Priced(category, 1.0 + epsilon, rule, base, table)
        if damage[category] > SIGMAS * _own_error(table, base, category):
            found.append(one)
    return found


def _own_error(table: DamageTable, types: Mapping[str, str], category: str) -> float:
    prices, c = Prices(replace(table, nats=table.se)), table.categories.index(category)
    return float(np.sqrt(sum(float(prices.nats(n, t)[c]) ** 2 for n, t in types.items())))
