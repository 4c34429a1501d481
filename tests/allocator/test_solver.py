"""What every solver must hold to, against brute force where that is possible."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.allocator.branching import least_cost_within
from bitwright.allocator.knapsack import Options, least_cost
from bitwright.allocator.solver import RELATIVE_GAP, Limit, Problem, solve
from bitwright.errors import BudgetError

BITS = np.array([2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5])
TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")

Solver = Callable[[Problem], np.ndarray]


def by_dynamic_program(problem: Problem) -> np.ndarray:
    options = Options(problem.owner, problem.cost, problem.size_bytes)
    found = least_cost(options, problem.budget_bytes, RELATIVE_GAP)
    assert found is not None
    return found.chosen


def by_highs(problem: Problem) -> np.ndarray:
    options = Options(problem.owner, problem.cost, problem.size_bytes)
    none = np.empty((0, len(problem.types)))
    found = least_cost_within(
        options, problem.budget_bytes, none, np.empty(0), RELATIVE_GAP, time_limit_s=30.0
    )
    assert found is not None
    return found.chosen


def by_solve(problem: Problem) -> np.ndarray:
    return solve(problem).chosen


SOLVERS: dict[str, Solver] = {"program": by_dynamic_program, "highs": by_highs, "solve": by_solve}


def made(n_tensors: int, seed: int, share: float, *, alike: bool = False) -> Problem:
    """A model-like table: few shapes, damage falling fourfold per bit, spread sensitivities."""
    rng = np.random.default_rng(seed)
    weights = 256 * rng.choice([64, 128, 344], n_tensors) if not alike else np.full(n_tensors, 4096)
    sizes = np.rint(weights[:, None] * BITS / 8 / 32).astype(np.int64) * 32
    costs = rng.lognormal(-6, 1.5, n_tensors)[:, None] * 4.0 ** -(BITS - BITS[0])
    if not alike:
        costs *= rng.lognormal(0, 0.1, costs.shape)
    low, high = sizes.min(axis=1).sum(), sizes.max(axis=1).sum()
    return Problem(
        tensors=tuple(f"blk.{i}.w" for i in range(n_tensors)),
        owner=np.repeat(np.arange(n_tensors), len(BITS)),
        types=TYPES * n_tensors,
        cost=costs.ravel(),
        size_bytes=sizes.ravel(),
        budget_bytes=int(low + share * (high - low)),
    )


def brute_force(problem: Problem) -> float:
    groups = [np.flatnonzero(problem.owner == t) for t in range(len(problem.tensors))]
    best = np.inf
    for choice in itertools.product(*groups):
        j = np.array(choice)
        fits = problem.size_bytes[j].sum() <= problem.budget_bytes
        if fits and all(one.use[j].sum() <= one.limit + 1e-12 for one in problem.limits):
            best = min(best, float(problem.cost[j].sum()))
    return best


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
class TestEverySolver:
    @pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 0.9, 1.0, 1.5])
    def test_keeps_the_budget_and_gives_each_tensor_one_type(
        self, solver: Solver, share: float
    ) -> None:
        problem = made(40, 1, share)
        chosen = solver(problem)
        assert problem.owner[chosen].tolist() == list(range(40))
        assert problem.size_bytes[chosen].sum() <= problem.budget_bytes

    @pytest.mark.parametrize("seed", range(6))
    def test_equals_brute_force(self, solver: Solver, seed: int) -> None:
        problem = made(5, seed, 0.1 + 0.15 * seed)
        cost = problem.cost[solver(problem)].sum()
        assert cost == pytest.approx(brute_force(problem), rel=2 * RELATIVE_GAP, abs=0)

    def test_is_deterministic(self, solver: Solver) -> None:
        problem = made(60, 3, 0.3, alike=True)
        assert (solver(problem) == solver(problem)).all()

    @pytest.mark.parametrize("column", range(len(BITS)))
    def test_is_never_worse_than_uniform(self, solver: Solver, column: int) -> None:
        problem = made(30, 4, 0.0)
        uniform = np.arange(30) * len(BITS) + column
        problem = replace(problem, budget_bytes=int(problem.size_bytes[uniform].sum()))
        assert problem.cost[solver(problem)].sum() <= problem.cost[uniform].sum() * (1 + 1e-9)

    def test_more_budget_never_raises_the_damage(self, solver: Solver) -> None:
        problem = made(25, 5, 0.0)
        room = np.linspace(0, problem.size_bytes.sum() / 3, 25).astype(int)
        budgets = [problem.budget_bytes + int(more) for more in room]
        costs = [
            float(problem.cost[solver(replace(problem, budget_bytes=b))].sum()) for b in budgets
        ]
        assert all(b <= a * (1 + 2 * RELATIVE_GAP) for a, b in itertools.pairwise(costs))

    def test_the_floor_leaves_one_layout(self, solver: Solver) -> None:
        problem = made(20, 6, 0.0)
        assert [TYPES[j % 6] for j in solver(problem)] == ["Q2_K"] * 20

    def test_above_the_maximum_everything_is_largest(self, solver: Solver) -> None:
        problem = made(20, 7, 3.0, alike=True)
        assert [TYPES[j % 6] for j in solver(problem)] == ["Q8_0"] * 20


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    n = sum(counts)
    # Few distinct numbers, zeros and negative ones among them: ties are what goes wrong.
    cost = draw(st.lists(st.integers(-3, 12), min_size=n, max_size=n))
    size = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    owner = np.repeat(np.arange(len(counts)), counts)
    sizes = np.array(size, dtype=np.int64) * draw(st.sampled_from([1, 32]))
    floor = sum(int(sizes[owner == t].min()) for t in range(len(counts)))
    return Problem(
        tensors=tuple(f"t{t}" for t in range(len(counts))),
        owner=owner,
        types=tuple(f"y{j}" for j in range(n)),
        cost=np.array(cost, dtype=np.float64) / 4,
        size_bytes=sizes,
        budget_bytes=floor + draw(st.integers(0, 40)),
    )


@settings(max_examples=300, deadline=None)
@given(problem=small_problems())
def test_any_small_problem_equals_brute_force(problem: Problem) -> None:
    solution = solve(problem)
    assert solution.proven
    assert solution.cost == pytest.approx(brute_force(problem), rel=1e-9, abs=1e-12)
    assert solution.size_bytes + solution.unused_bytes == problem.budget_bytes
    assert solution.unused_bytes >= 0


@settings(max_examples=200, deadline=None)
@given(problem=small_problems(), data=st.data())
def test_costs_and_sizes_of_any_magnitude(problem: Problem, data: st.DataObject) -> None:
    n = len(problem.types)
    powers = data.draw(st.lists(st.integers(-12, 3), min_size=n, max_size=n))
    large = problem.owner * 3_000_000_007  # every tensor far larger than its steps
    scaled = replace(
        problem,
        cost=np.abs(problem.cost) * 10.0 ** np.array(powers),
        size_bytes=problem.size_bytes + large,
        budget_bytes=problem.budget_bytes + 3_000_000_007 * sum(range(len(problem.tensors))),
    )
    solution = solve(scaled)
    assert solution.cost == pytest.approx(brute_force(scaled), rel=1e-9, abs=1e-300)


@settings(max_examples=60, deadline=None)
@given(problem=small_problems(), data=st.data())
def test_any_small_problem_with_a_limit_equals_brute_force(
    problem: Problem, data: st.DataObject
) -> None:
    n = len(problem.types)
    use = np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), dtype=np.float64)
    limited = replace(problem, limits=(Limit("chat", use, float(data.draw(st.integers(0, 45)))),))
    expected = brute_force(limited)
    if np.isinf(expected):
        with pytest.raises(BudgetError, match="chat"):
            solve(limited)
        return
    solution = solve(limited)
    assert solution.cost == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert use[solution.chosen].sum() <= limited.limits[0].limit + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_several_limits_that_bind(seed: int) -> None:
    problem = made(5, seed, 0.6)
    free = solve(problem).chosen
    on_gpu = problem.size_bytes * (problem.owner % 2 == 0) / 1.0
    chat = problem.cost * np.random.default_rng(seed).lognormal(0, 0.5, len(problem.cost))
    gpu = Limit("bytes on the GPU", on_gpu, float(on_gpu[free].sum()) * 0.85)
    usual = chat[solve(replace(problem, limits=(gpu,))).chosen].sum()
    least = solve(replace(problem, cost=chat, limits=(gpu,))).cost
    limits = (gpu, Limit("chat", chat, float(usual + least) / 2))
    bound = replace(problem, limits=limits)
    expected = brute_force(bound)
    assert np.isfinite(expected)
    solution = solve(bound)
    assert solution.proven
    assert solution.cost == pytest.approx(expected, rel=1e-8)
    assert solution.cost > problem.cost[free].sum()  # so they do bind
    for one in limits:
        assert one.use[solution.chosen].sum() <= one.limit * (1 + 1e-9)


def test_a_least_share_as_a_limit() -> None:
    problem = made(30, 12, 0.3)
    is_q3 = np.array([name == "Q3_K" for name in problem.types])
    limit = Limit("share of Q3_K", -problem.size_bytes * is_q3 / 1e3, -400.0)
    solution = solve(replace(problem, limits=(limit,)))
    assert problem.size_bytes[solution.chosen][is_q3[solution.chosen]].sum() >= 400e3
    assert solution.cost > solve(problem).cost
    assert solution.proven


def test_limits_that_do_not_bind_change_nothing() -> None:
    problem = made(50, 13, 0.3)
    free = solve(problem)
    limited = replace(problem, limits=(Limit("chat", problem.cost, free.cost * 1.01),))
    assert (solve(limited).chosen == free.chosen).all()


def test_one_byte_under_the_floor_names_the_floor() -> None:
    problem = made(20, 6, 0.0)
    with pytest.raises(BudgetError, match=f"take {problem.budget_bytes:,}: raise .* by 1 bytes"):
        solve(replace(problem, budget_bytes=problem.budget_bytes - 1))


def test_a_hopeless_limit_names_its_least_value() -> None:
    problem = made(10, 8, 0.5)
    least = problem.cost.reshape(10, -1).min(axis=1).sum()
    with pytest.raises(BudgetError, match=f"chat is limited to .* below {least:.6g}"):
        solve(replace(problem, limits=(Limit("chat", problem.cost, least / 2),)))


def test_limits_that_contradict_the_budget_are_both_named() -> None:
    problem = made(10, 8, 0.0)
    least = float(problem.cost.reshape(10, -1).min(axis=1).sum())
    with pytest.raises(BudgetError, match="bytes and chat at once"):
        solve(replace(problem, limits=(Limit("chat", problem.cost, least * 1.01),)))


def test_equal_costs_take_the_smaller_then_the_first_name() -> None:
    problem = Problem(
        tensors=("a",),
        owner=np.zeros(4, dtype=np.int64),
        types=("Q6_K", "Q5_1", "Q5_0", "Q4_K"),
        cost=np.array([0.5, 0.5, 0.5, 0.9]),
        size_bytes=np.array([90, 70, 70, 60]),
        budget_bytes=100,
    )
    assert problem.types[solve(problem).chosen[0]] == "Q5_0"


def test_measured_zero_takes_the_fewest_bytes() -> None:
    problem = made(8, 9, 5.0)
    zero = replace(problem, cost=np.zeros_like(problem.cost))
    assert [TYPES[j % 6] for j in solve(zero).chosen] == ["Q2_K"] * 8


def test_tensors_alike_get_the_larger_types_in_the_order_of_names() -> None:
    problem = made(12, 0, 0.4, alike=True)
    same = replace(
        problem,
        tensors=tuple(f"t{i}" for i in (5, 3, 9, 1, 0, 8, 7, 2, 6, 4, 11, 10)),
        cost=np.tile(problem.cost[:6], 12),
    )
    sizes = dict(zip(same.tensors, same.size_bytes[solve(same).chosen], strict=True))
    in_order = [sizes[name] for name in sorted(sizes)]
    assert len(set(in_order)) > 1
    assert in_order == sorted(in_order, reverse=True)


def test_the_order_of_the_options_does_not_matter() -> None:
    problem = made(40, 15, 0.35)
    turned = np.concatenate([np.arange(6)[::-1] + 6 * t for t in range(40)])
    other = replace(
        problem,
        types=tuple(problem.types[j] for j in turned),
        cost=problem.cost[turned],
        size_bytes=problem.size_bytes[turned],
    )
    mine, theirs = solve(problem).chosen, solve(other).chosen
    assert [problem.types[j] for j in mine] == [other.types[j] for j in theirs]


@pytest.mark.parametrize("alike", [True, False])
def test_a_thousand_tensors_are_proven(alike: bool) -> None:
    solution = solve(made(1000, 21, 0.3, alike=alike))
    assert solution.proven
    assert solution.gap <= RELATIVE_GAP


def test_sizes_beyond_32_bits_stay_exact() -> None:
    problem = made(30, 22, 0.3)
    large = replace(
        problem,
        size_bytes=problem.size_bytes * 2_000_003,
        budget_bytes=problem.budget_bytes * 2_000_003,
    )
    assert solve(large).size_bytes == solve(problem).size_bytes * 2_000_003


def test_costs_that_are_not_numbers_are_a_bug_of_the_caller() -> None:
    problem = made(4, 1, 0.5)
    with pytest.raises(ValueError, match="finite"):
        solve(replace(problem, cost=np.where(problem.cost > 0, np.nan, 0.0)))
    with pytest.raises(ValueError, match="at least one option"):
        solve(replace(problem, tensors=(*problem.tensors, "more")))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    problem = made(30, 30, 0.3)
    limit = Limit("chat", problem.cost[::-1].copy(), float(problem.cost.sum() / 8))
    by_highs(problem)
    solve(replace(problem, limits=(limit,)))
    assert capfd.readouterr() == ("", "")
