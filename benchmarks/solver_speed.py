"""Time of the exact solver, on tables like those of models and on hard random ones.

Run: ``python benchmarks/solver_speed.py [--tensors 1000] [--seeds 3] [--limits 4] [--json]``. One
JSON line goes to stdout. Times are wall and CPU seconds of one ``solve``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bitwright.allocator.solver import Limit, Problem, Solution, solve
from bitwright.errors import BudgetError

BITS = np.array([1.5625, 1.75, 2.0625, 2.3125, 2.625, 3.0625, 3.4375, 4.25, 4.5, 5.5, 6.5625, 8.5])
SHARES = (0.1, 0.4, 0.7)  # of the way from the smallest layout to the largest
BEYOND = 32  # bytes: the padding of a tensor in the file

Doubles = NDArray[np.float64]
Table = tuple[Doubles, NDArray[np.int64]]  # cost, size: (tensors, types)


def geometric(rng: np.random.Generator, tensors: int, shapes: list[int], spread: float) -> Table:
    """Damage falls fourfold per bit; sensitivities are lognormal, as measured maps are."""
    weights = rng.choice(np.array(shapes), tensors)
    sensitivity = rng.lognormal(-6, 1.5, tensors)
    cost: Doubles = sensitivity[:, None] * np.exp2(-2 * (BITS - 2.625))
    cost *= rng.lognormal(0, spread, cost.shape)
    return cost, np.rint(weights[:, None] * BITS / 8 / BEYOND).astype(np.int64) * BEYOND


def model_like(rng: np.random.Generator, tensors: int) -> Table:
    """Three shapes, types that deviate from the curve by 15 %."""
    return geometric(rng, tensors, [2048 * 512, 2048 * 2048, 2048 * 8192], 0.15)


def one_shape(rng: np.random.Generator, tensors: int) -> Table:
    """All tensors alike in size, damage exactly on the curve: what stalls branch and bound."""
    return geometric(rng, tensors, [2048 * 2048], 0.0)


def uncorrelated(rng: np.random.Generator, tensors: int) -> Table:
    """Costs and sizes independent."""
    shape = (tensors, len(BITS))
    return rng.random(shape), rng.integers(1, 10**6, shape) * BEYOND


def weakly_correlated(rng: np.random.Generator, tensors: int) -> Table:
    """Cost falls with size, with a tenth of noise: many near ties."""
    size = np.sort(rng.integers(1, 10**6, (tensors, len(BITS))), axis=1)
    return (1.2e6 - size + rng.integers(0, 10**5, size.shape)).astype(np.float64), size * BEYOND


def strongly_correlated(rng: np.random.Generator, tensors: int) -> Table:
    """Every byte is worth the same: a sum of sizes to be met."""
    size = np.sort(rng.integers(1, 10**6, (tensors, len(BITS))), axis=1)
    return (1.2e6 - size).astype(np.float64), size * BEYOND


INSTANCES: dict[str, Callable[[np.random.Generator, int], Table]] = {
    "model_like": model_like,
    "one_shape": one_shape,
    "uncorrelated": uncorrelated,
    "weakly_correlated": weakly_correlated,
    "strongly_correlated": strongly_correlated,
}


def make_problem(table: Table, share: float) -> Problem:
    """The table with a budget at a share of the way between its extremes."""
    cost, size = table
    tensors, types = cost.shape
    low, high = int(size.min(axis=1).sum()), int(size.max(axis=1).sum())
    return Problem(
        tensors=tuple(f"blk.{i}.weight" for i in range(tensors)),
        owner=np.repeat(np.arange(tensors), types),
        types=tuple(f"type-{y}" for y in range(types)) * tensors,
        cost=cost.ravel().astype(np.float64),
        size_bytes=size.ravel(),
        budget_bytes=low + int(share * (high - low)),
    )


def with_limits(problem: Problem, rng: np.random.Generator, count: int) -> Problem:
    """Off-target categories, correlated with the target, held to the damage of its optimum."""
    chosen = solve(problem).chosen
    limits = []
    for k in range(count):
        use = problem.cost * rng.lognormal(0, 0.4, len(problem.tensors))[problem.owner]
        limits.append(Limit(f"category {k}", use, float(use[chosen].sum()) * 0.99))
    return replace(problem, limits=tuple(limits))


def timed(problem: Problem) -> tuple[Solution, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    solution = solve(problem, time_limit_s=20.0)
    return solution, time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, tensors: int, seeds: int) -> dict[str, object]:
    runs = []
    for seed in range(seeds):
        for share in SHARES:
            table = INSTANCES[name](np.random.default_rng(seed), tensors)
            runs.append(timed(make_problem(table, share)))
    return summary(name, runs)


def measure_limits(tensors: int, seeds: int, count: int) -> dict[str, object]:
    runs = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        problem = make_problem(model_like(rng, tensors), 0.4)
        try:
            runs.append(timed(with_limits(problem, rng, count)))
        except BudgetError as error:  # tight limits on few tensors may contradict each other
            print(f"seed {seed}: {error}", file=sys.stderr)
    return summary(f"model_like, {count} limits that bind (HiGHS)", runs)


def summary(name: str, runs: list[tuple[Solution, float, float]]) -> dict[str, object]:
    return {
        "instance": name,
        "runs": len(runs),
        "median_cpu_s": round(float(np.median([cpu for _, _, cpu in runs])), 4),
        "max_cpu_s": round(max(cpu for _, _, cpu in runs), 4),
        "max_wall_s": round(max(wall for _, wall, _ in runs), 4),
        "proven": sum(solution.proven for solution, _, _ in runs),
        "max_gap": max(solution.gap for solution, _, _ in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limits", type=int, default=0, help="also run with that many limits")
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    args = parser.parse_args()
    rows = [measure(name, args.tensors, args.seeds) for name in INSTANCES]
    if args.limits:
        rows.append(measure_limits(args.tensors, args.seeds, args.limits))
    if not args.json:
        for row in rows:
            print("  ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)
    print(json.dumps({"tensors": args.tensors, "types": len(BITS), "rows": rows}))


if __name__ == "__main__":
    main()
