"""Racing on synthetic damage with a known truth."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bitwright.allocator.racing import (
    Decisions,
    RaceLimits,
    RaceResult,
    Standing,
    byte_price,
    decide,
    open_by_curve,
    race,
    worth_measuring,
)
from bitwright.allocator.solver import Problem, solve
from bitwright.damage.intervals import Blocks, estimate, interval
from tests.damage.synthetic import made_sums

BITS = np.array([2.625, 3.4375, 4.5, 5.5, 6.5625, 8.5])
ERRORS = np.array([1.0, 0.32, 0.072, 0.018, 0.005, 0.0004])
TENSORS, BLOCKS, ROWS, ROUNDS = 40, 8, 16, 16
TOLERANCE = 0.02


def problem_of(nats: np.ndarray, weights: np.ndarray, budget_bytes: int) -> Problem:
    n, types = len(nats), len(BITS)
    return Problem(
        tensors=tuple(f"t{i}" for i in range(n)),
        owner=np.repeat(np.arange(n), types),
        types=tuple(f"type{j}" for j in range(types)) * n,
        cost=np.outer(nats, ERRORS).ravel(),
        size_bytes=np.outer(weights, BITS / 8).astype(np.int64).ravel(),
        budget_bytes=budget_bytes,
    )


class Run:
    """One synthetic race: what was decided against what is true."""

    def __init__(self, seed: int, limits: RaceLimits | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.truth, self.sums = made_sums(rng, TENSORS, ROUNDS * BLOCKS, ROWS)
        self.weights = rng.choice([100_000, 400_000, 1_000_000], TENSORS)
        self.budget = int((self.weights * 3.5 / 8).sum())
        self.seen = np.zeros(self.sums.shape, bool)
        self.names = [f"t{i}" for i in range(TENSORS)]
        self.measured: list[list[str]] = []
        costs = [BLOCKS * ROWS] * ROUNDS
        chosen = limits or RaceLimits(TOLERANCE)
        self.result: RaceResult = race(
            self.names, costs, self.measure, self.standing, chosen, clock=lambda: 0.0
        )

    def measure(self, number: int, names: Sequence[str]) -> None:
        self.measured.append(list(names))
        rows = [int(name[1:]) for name in names]
        self.seen[rows, number * BLOCKS : (number + 1) * BLOCKS] = True

    def standing(self) -> Standing:
        used = self.seen.any(axis=0)
        sums = np.where(self.seen, self.sums, np.nan)[:, used]
        found = estimate(Blocks(sums, np.full(int(used.sum()), float(ROWS))))
        ends = interval(found.nats, found.paired_se, found.n_blocks, 0.9)
        problem = problem_of(found.nats, self.weights, self.budget)
        return Standing(problem, ends.low / found.nats, ends.high / found.nats)

    def excess(self) -> float:
        """True damage of the race's layout over that of the best, minus 1."""
        true = problem_of(self.truth, self.weights, self.budget)
        mine = solve(self.standing().problem).chosen
        return float(true.cost[mine].sum()) / solve(true).cost - 1

    def decided_right(self) -> np.ndarray:
        ones = np.ones(TENSORS)
        true = decide(Standing(problem_of(self.truth, self.weights, self.budget), ones, ones))
        mine = decide(self.standing())
        return (mine.chosen == true.chosen)[~mine.open]


def test_decisions_are_right_and_tokens_saved(
    record_property: Callable[[str, object], None],
) -> None:
    runs = [Run(seed) for seed in range(200)]
    excess = np.array([run.excess() for run in runs])
    right = np.concatenate([run.decided_right() for run in runs])
    used = float(np.mean([run.result.tokens / run.result.tokens_all for run in runs]))
    record_property("tokens_used", used)
    record_property("decided_right", float(right.mean()))
    assert (excess <= TOLERANCE).mean() >= 0.95
    assert right.mean() >= 0.95
    assert used < 0.25
    assert np.mean([run.result.stable for run in runs]) > 0.9


def test_later_rounds_measure_few_tensors_and_report_the_rest() -> None:
    run = Run(3, RaceLimits(0.002))
    assert len(run.measured[0]) == TENSORS
    assert len(run.measured) > 1
    assert all(len(names) < TENSORS / 2 for names in run.measured[1:])
    result = run.result
    losses = [loss for _, loss in result.undecided]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) == pytest.approx(result.possible_loss)
    assert result.tokens == sum(len(names) * BLOCKS * ROWS for names in run.measured)


def test_tokens_and_minutes_end_a_race() -> None:
    tokens = TENSORS * BLOCKS * ROWS + 10
    run = Run(0, RaceLimits(1e-9, tokens=tokens))
    assert run.result.rounds == 1
    assert not run.result.stable
    assert "tokens is spent" in run.result.reason
    times = iter([0.0, 61.0, 62.0, 63.0])
    late = race(
        run.names,
        [1] * ROUNDS,
        run.measure,
        run.standing,
        RaceLimits(1e-9, minutes=1),
        clock=lambda: next(times),
    )
    assert "1 minutes is spent" in late.reason
    assert late.rounds == 1


def test_all_text_ends_a_race_that_cannot_decide() -> None:
    result = Run(0, RaceLimits(1e-12)).result
    assert result.rounds == ROUNDS
    assert result.reason == "all text is used"


def test_the_price_of_a_byte_fills_the_budget() -> None:
    truth, _ = made_sums(np.random.default_rng(0), TENSORS, 1, 1)
    weights = np.full(TENSORS, 100_000)
    problem = problem_of(truth, weights, int(weights.sum() * 3.5 / 8))
    chosen = decide(Standing(problem, np.ones(TENSORS), np.ones(TENSORS))).chosen
    used = int(problem.size_bytes[chosen].sum())
    biggest_step = int(weights[0] * 2 / 8)
    assert problem.budget_bytes - biggest_step < used <= problem.budget_bytes
    assert byte_price(problem_of(truth, weights, 10**12)) == 0.0


def test_regret_is_what_the_wrong_type_costs() -> None:
    """Two tensors of one size: exactly one can have the larger type."""
    problem = Problem(
        tensors=("a", "b"),
        owner=np.array([0, 0, 1, 1]),
        types=("low", "high") * 2,
        cost=np.array([1.0, 0.0, 0.9, 0.0]),
        size_bytes=np.array([10, 20, 10, 20]),
        budget_bytes=30,
    )
    found = decide(Standing(problem, np.array([0.5, 1.0]), np.array([1.0, 1.0])))
    assert list(found.chosen) == [1, 2]
    assert 10 * found.price == pytest.approx(0.9)
    assert list(found.open) == [True, False]
    assert found.regret[0] == pytest.approx(10 * found.price - 0.5)
    assert found.regret[1] == 0.0


def test_only_what_matters_is_measured_on() -> None:
    regret = np.array([1e-6, 0.5, 1e-6, 0.3])
    decisions = Decisions(np.zeros(4, np.int64), np.ones(4, bool), regret, 1.0, 0.1)
    assert list(worth_measuring(decisions, 0.02)) == [False, True, False, True]


def test_what_the_type_curve_leaves_open_is_named_with_its_loss() -> None:
    problem = problem_of(np.array([1.0, 1.0, 8.0]), np.array([10_000] * 3), 15_000)
    ones = np.ones(3)
    decisions = decide(Standing(problem, ones, ones))
    exact = np.zeros(len(problem.types))
    assert open_by_curve(problem, decisions, exact) == ()
    # Only the third tensor's prices are doubtful, and widely so.
    doubtful = np.where(problem.owner == 2, 1.5, 0.0)
    doubtful[problem.owner == 2] *= problem.cost[problem.owner == 2] < 8.0  # its probe is measured
    found = open_by_curve(problem, decisions, doubtful)
    assert [name for name, _ in found] == ["t2"]
    # The loss: the chosen type as bad as its interval allows against the best other as good.
    mine = problem.owner == 2
    far = np.exp(1.64 * doubtful[mine])
    price = decisions.price * problem.size_bytes[mine]
    chosen = decisions.chosen[2] - np.flatnonzero(mine)[0]
    other = np.delete(problem.cost[mine] / far + price, chosen).min()
    assert found[0][1] == pytest.approx((problem.cost[mine] * far + price)[chosen] - other)
    # A little doubt on every price opens fewer decisions than a lot.
    little, lot = (open_by_curve(problem, decisions, np.full(18, s)) for s in (0.01, 1.5))
    assert len(little) <= len(lot) == 3
