"""Bedrock, Tightrope and Gambit: from ladders of weight groups to three whole layouts.

Bedrock has every group at its lowest type that is shown safe alone; where the groups are not safe
together, it backs off to the least bytes whose predicted joint damage stays under the threshold,
the prediction being corrected by what the last layout measured. Gambit is one step past Bedrock in
every group. Tightrope is the solver's best between the two, at a size or at the curve's knee.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.solver import Limit, Problem, solve
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.tensors import layer, role
from bitwright.errors import BudgetError, ConfigError

StepState = Literal["safe", "over", "mixed"]
Nats = Mapping[str, float]  # category → nats of KLD

# A step above the highest measured one: the error of a weight falls by 6 dB a bit, and KLD with
# its square. Only a proposal: the joint measurement decides.
PER_BIT = 4.0
SLACK = 0.95  # of the threshold, a power of it in later rounds: few rounds, and no edge cases
LEAST_NATS = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Tensors that walk down together.

    ``steps``: ladder types from many to few bits, each giving a different layout; ``layouts`` and
    ``size_bytes`` by step.
    """

    name: str
    tensors: tuple[str, ...]
    steps: tuple[str, ...]
    layouts: Mapping[str, Mapping[str, str]]
    size_bytes: Mapping[str, int]


def make_groups(options: OptionSet, by: str, bands: int) -> tuple[Group, ...]:
    """The free tensors in groups; experts are roles of their own, so they are groups of their own.

    Args:
        by: 'role', 'role-band' (a role in each of ``bands`` bands of equal depth) or 'tensor'.
    """
    layers = [n for n in map(layer, options.tensors) if n is not None]
    n_layers = max(layers, default=-1) + 1
    members: dict[str, list[str]] = {}
    for name in options.tensors:
        members.setdefault(_group_name(name, by, bands, n_layers), []).append(name)
    return tuple(_group(options, name, tuple(tensors)) for name, tensors in members.items())


def _group_name(name: str, by: str, bands: int, n_layers: int) -> str:
    depth = layer(name)
    if by == "tensor":
        return name
    if by not in ("role", "role-band"):
        raise ConfigError(f"groups {by!r} are none of role, role-band, tensor")
    if by == "role" or depth is None or bands == 1:
        return role(name)
    count = min(bands, n_layers)
    band = depth * count // n_layers
    first, last = -(-band * n_layers // count), -(-(band + 1) * n_layers // count) - 1
    return f"{role(name)}.{first}-{last}"


def _group(options: OptionSet, name: str, tensors: tuple[str, ...]) -> Group:
    layouts: dict[str, dict[str, str]] = {}
    for step in reversed(options.ladder):
        layout = {tensor: options.nearest(tensor, step) for tensor in tensors}
        if layout not in layouts.values():
            layouts[step] = layout
    sizes = {
        step: sum(options.option_bytes(*item) for item in layout.items())
        for step, layout in layouts.items()
    }
    steps = tuple(sorted(layouts, key=lambda step: (-sizes[step], -TYPES[step].bpw)))
    return Group(name, tensors, steps, layouts, sizes)


def next_step(
    steps: Sequence[str], states: Mapping[str, StepState], start_bpw: float
) -> str | None:
    """Which step of a ladder has to be measured next; None when the question is answered.

    The walk begins at the highest step of at most ``start_bpw``, goes up while its top is not
    safe, and down until a step is over for every category.
    """
    if not states:
        below = [step for step in steps if TYPES[step].bpw <= start_bpw]
        return below[0] if below else steps[-1]
    known = [i for i, step in enumerate(steps) if step in states]
    top, bottom = known[0], known[-1]
    if states[steps[top]] != "safe" and top > 0:
        return steps[top - 1]
    if states[steps[bottom]] != "over" and bottom + 1 < len(steps):
        return steps[bottom + 1]
    return None


def assembled(groups: Sequence[Group], chosen: Mapping[str, str]) -> dict[str, str]:
    """Tensor → type of the chosen steps."""
    return {t: kind for g in groups for t, kind in g.layouts[chosen[g.name]].items()}


def one_past(group: Group, step: str) -> str:
    """The next lower step; the lowest stays."""
    index = group.steps.index(step)
    return group.steps[min(index + 1, len(group.steps) - 1)]


def priced(group: Group, measured: Mapping[str, Nats]) -> dict[str, dict[str, float]]:
    """Step → category → nats, for every step at or above the lowest measured one.

    A step that was not measured has the next measured one's damage, less what its further bits
    take off.
    """
    found: dict[str, dict[str, float]] = {}
    below: str | None = None
    for step in reversed(group.steps):
        if step in measured:
            found[step] = {c: max(nats, 0.0) for c, nats in measured[step].items()}
            below = step
        elif below is not None:
            bits = TYPES[step].bpw - TYPES[below].bpw
            found[step] = {c: nats / PER_BIT**bits for c, nats in found[below].items()}
            below = step
    return found


def predicted(
    groups: Sequence[Group], prices: Mapping[str, Mapping[str, Nats]], chosen: Mapping[str, str]
) -> dict[str, float]:
    """Category → sum of the chosen steps' damages."""
    total: dict[str, float] = {}
    for group in groups:
        for category, nats in prices[group.name][chosen[group.name]].items():
            total[category] = total.get(category, 0.0) + nats
    return total


def back_off(
    groups: Sequence[Group],
    prices: Mapping[str, Mapping[str, Nats]],
    lowest: Mapping[str, str],
    thresholds_nats: Nats,
    correction: Nats,
    round_number: int = 1,
) -> dict[str, str]:
    """The least bytes at which corrected sums of damages are under the thresholds.

    No group goes under its ``lowest`` step. ``correction``: category → measured (upper end) over
    predicted of the layouts so far.

    Raises:
        BudgetError: not even the highest steps are under every threshold.
    """
    allowed = {g.name: g.steps[: g.steps.index(lowest[g.name]) + 1] for g in groups}
    slack = SLACK**round_number
    limits = {c: slack * nats / correction.get(c, 1.0) for c, nats in thresholds_nats.items()}
    problem = _problem(groups, allowed, prices, limits, budget_bytes=None)
    return _choice(groups, problem)


def between(
    groups: Sequence[Group],
    prices: Mapping[str, Mapping[str, Nats]],
    high: Mapping[str, str],
    low: Mapping[str, str],
    thresholds_nats: Nats,
    budget_bytes: int,
) -> dict[str, str]:
    """Least damage, as a part of the thresholds, within bytes of the groups' tensors.

    Each group may take the steps from ``high`` down to ``low``.

    Raises:
        BudgetError: the bytes are fewer than the lowest steps take.
    """
    allowed = {
        g.name: g.steps[g.steps.index(high[g.name]) : g.steps.index(low[g.name]) + 1]
        for g in groups
    }
    problem = _problem(groups, allowed, prices, thresholds_nats, budget_bytes=budget_bytes)
    return _choice(groups, problem)


def _problem(
    groups: Sequence[Group],
    allowed: Mapping[str, Sequence[str]],
    prices: Mapping[str, Mapping[str, Nats]],
    thresholds_nats: Nats,
    budget_bytes: int | None,
) -> Problem:
    """Least damage within bytes, or least bytes within the thresholds (``budget_bytes`` None)."""
    flat = [(i, g, step) for i, g in enumerate(groups) for step in allowed[g.name]]
    owner = np.array([i for i, _, _ in flat], dtype=np.int64)
    size = np.array([g.size_bytes[step] for _, g, step in flat], dtype=np.int64)
    use = {
        c: np.array([prices[g.name][step].get(c, 0.0) for _, g, step in flat], dtype=np.float64)
        for c in thresholds_nats
    }
    if budget_bytes is None:
        cost: NDArray[np.float64] = size.astype(np.float64)
        limits = tuple(Limit(f"damage on {c}", use[c], t) for c, t in thresholds_nats.items())
        budget_bytes = int(sum(max(g.size_bytes.values()) for g in groups))
    else:
        cost = np.zeros(len(flat))
        for c, nats in thresholds_nats.items():
            cost = cost + use[c] / max(nats, LEAST_NATS)
        limits = ()
    return Problem(
        tuple(g.name for g in groups),
        owner,
        tuple(step for _, _, step in flat),
        cost,
        size,
        budget_bytes,
        limits,
    )


def _choice(groups: Sequence[Group], problem: Problem) -> dict[str, str]:
    found = solve(problem)
    return {g.name: problem.types[int(j)] for g, j in zip(groups, found.chosen, strict=True)}


def curve_budgets(high_bytes: int, low_bytes: int, n: int) -> list[int]:
    """``n`` sizes between the two, evenly spread, ends left out, from many to few."""
    if high_bytes - low_bytes < 2:
        return []
    inner = np.linspace(high_bytes, low_bytes, n + 2)[1:-1]
    return list(dict.fromkeys(int(size) for size in inner))


def knee(size_bytes: Sequence[int], damage: Sequence[float]) -> tuple[int, bool]:
    """(index, found): the point farthest under the chord of log damage over bytes.

    The first and last point are the ends. Where no point lies under the chord there is no knee:
    then the one in the middle of the sizes is given.
    """
    x = np.asarray(size_bytes, dtype=np.float64)
    y = np.log(np.maximum(np.asarray(damage, dtype=np.float64), LEAST_NATS))
    span_x, span_y = x[-1] - x[0], y[-1] - y[0]
    inner = range(1, len(x) - 1)
    if not inner or span_x == 0.0:
        return 0, False
    chord = y[0] + (x - x[0]) / span_x * span_y
    depth = (chord - y) / abs(span_y) if span_y else chord - y
    best = max(inner, key=lambda i: float(depth[i]))
    if depth[best] > 0.0:
        return best, True
    middle = (x[0] + x[-1]) / 2.0
    return min(inner, key=lambda i: abs(float(x[i]) - middle)), False


def check_size(size_bytes: int, low_bytes: int, high_bytes: int) -> None:
    """Refuse a size for Tightrope outside its two neighbours.

    Raises:
        BudgetError: with the two sizes.
    """
    if not low_bytes <= size_bytes <= high_bytes:
        raise BudgetError(
            f"Tightrope lies between Gambit ({low_bytes:,} bytes) and Bedrock ({high_bytes:,} "
            f"bytes), and {size_bytes:,} bytes are not: give a size between, or none for the knee"
        )


def next_correction(correction: Nats, sums: Nats, measured_high: Nats) -> dict[str, float]:
    """Measured over predicted of the last layout; never less than before, so that rounds end."""
    found = {}
    for category, high in measured_high.items():
        ratio = high / max(sums.get(category, 0.0), LEAST_NATS)
        found[category] = max(ratio, correction.get(category, 0.0))
    return found


def nearer_correction(local: Nats, safe_with: Nats, unsafe_with: Nats | None) -> dict[str, float]:
    """A smaller correction to try: the safe layout's own, between the two that are known.

    ``safe_with`` led to a layout that was safe, ``unsafe_with`` (None: none yet) to one that was
    not; where the safe layout's own ratio would be under their middle, the middle is taken.
    """
    found = {}
    for category, safe in safe_with.items():
        least = 0.0 if unsafe_with is None else math.sqrt(unsafe_with[category] * safe)
        found[category] = min(safe, max(local[category], least))
    return found


def steps_bytes(groups: Sequence[Group], chosen: Mapping[str, str]) -> int:
    """Bytes of the groups' tensors at the chosen steps."""
    return sum(g.size_bytes[chosen[g.name]] for g in groups)


def damage_share(nats: Nats, thresholds_nats: Nats) -> float:
    """Mean over categories of damage as a part of the threshold."""
    parts = [
        nats[c] / max(t, LEAST_NATS) for c, t in thresholds_nats.items() if math.isfinite(nats[c])
    ]
    return sum(parts) / len(parts) if parts else 0.0
