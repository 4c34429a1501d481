"""From tensors, rules and damages to the exact solver's problem, and back to types."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.predictions import Prices
from bitwright.allocator.solver import Limit, Problem, solve
from bitwright.damage.pricing import DamageTable
from bitwright.engine.tensors import layer, role
from bitwright.errors import ConfigError

Cost = Callable[[str, str], float]  # tensor, type → a number to add up


@dataclass(frozen=True, slots=True)
class Found:
    """A choice for the free tensors; ``gap``: how far it may be from the optimum, None if proven.

    ``notes``: what a limit could not promise.
    """

    types: Mapping[str, str]
    gap: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Σ ``use`` over the free tensors is at most ``limit``."""

    label: str
    use: Cost
    limit: float


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are decided together, and what each choice gives every one of them."""

    name: str
    choices: tuple[Mapping[str, str], ...]


def weighted_cost(options: OptionSet, table: DamageTable, weights: Mapping[str, float]) -> Cost:
    """Σ weight · damage; a tensor that keeps its own type costs nothing."""
    prices = Prices(table)
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


def single_groups(options: OptionSet, coherent: Sequence[Sequence[str]] = ()) -> list[Group]:
    """Every tensor for itself, but those of one layer whose roles stand together in ``coherent``.

    Members of such a group take the same ladder type, or what replaces it for their rows.
    """
    fused = {one: k for k, roles in enumerate(coherent) for one in roles}
    members: dict[tuple[object, ...], list[str]] = {}
    for name in options.tensors:
        key: tuple[object, ...] = (name,)
        if role(name) in fused and layer(name) is not None:
            key = (layer(name), fused[role(name)])
        members.setdefault(key, []).append(name)
    return [
        Group(names[0], tuple({names[0]: t} for t in options.offered[names[0]]))
        if len(names) == 1
        else _alike("+".join(names), names, options)
        for names in members.values()
    ]


def role_groups(options: OptionSet) -> list[Group]:
    """One ladder type per role."""
    return _grouped(options, role)


def layer_groups(options: OptionSet) -> list[Group]:
    """One ladder type per layer; tensors outside the layers by role."""
    return _grouped(options, lambda n: role(n) if layer(n) is None else f"layer {layer(n)}")


def _grouped(options: OptionSet, key: Callable[[str], str]) -> list[Group]:
    members: dict[str, list[str]] = {}
    for name in options.tensors:
        members.setdefault(key(name), []).append(name)
    return [_alike(one, names, options) for one, names in members.items()]


def _alike(label: str, names: Sequence[str], options: OptionSet) -> Group:
    choices = ({n: options.nearest(n, t) for n in names} for t in options.ladder)
    unique = {tuple(choice.items()): choice for choice in choices}
    return Group(label, tuple(unique.values()))


def solve_groups(
    options: OptionSet, groups: Sequence[Group], cost: Cost, room: int, rules: Sequence[Rule] = ()
) -> Found:
    """The choice of least Σ cost within ``room`` bytes and all rules.

    Raises:
        BudgetError: there is none; the message says which rule, and its nearest feasible value.
    """
    if not groups:
        return Found({})
    choices = [choice for group in groups for choice in group.choices]

    def summed(one: Cost) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([sum(one(*item) for item in choice.items()) for choice in choices])

    problem = Problem(
        tensors=tuple(group.name for group in groups),
        owner=np.repeat(np.arange(len(groups)), [len(group.choices) for group in groups]),
        types=tuple("+".join(dict.fromkeys(choice.values())) for choice in choices),
        cost=summed(cost),
        size_bytes=np.array(
            [sum(options.option_bytes(*item) for item in choice.items()) for choice in choices],
            dtype=np.int64,
        ),
        budget_bytes=room,
        limits=tuple(Limit(rule.label, summed(rule.use), rule.limit) for rule in rules),
    )
    solution = solve(problem)
    types = {name: kind for j in solution.chosen for name, kind in choices[int(j)].items()}
    exact = solution.gap <= 1e-8
    return Found(types, None if exact else solution.gap)
