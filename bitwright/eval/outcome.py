"""What came out for each item of a task, and the files in which any number can be opened."""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bitwright.engine.atomic import write_atomic
from bitwright.errors import InputError

CORRECT = "correct"
METRICS_VERSION = 2  # 2026-11-30: JSON calls without their fence are read too
LOWER_IS_BETTER = frozenset({"nats_per_token", "bits_per_byte", "kld_nats"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """One item: a task's value is sum(value) / sum(weight) over its items.

    `verdict` is 'correct', a kind of failure, or 'measured' where nothing is right or wrong.
    `prompt_sha256` is of the token ids sent; two runs are compared only where it is the same.
    """

    task: str
    item: str
    prompt_sha256: str
    prompt: str
    output: str
    expected: str
    verdict: str
    value: float
    weight: float = 1.0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task's outcomes with what is needed to read them; `chance` None where there is none.

    `settings`: how it was asked (token limit, stop strings, examples), the same for two files that
    are compared.
    """

    name: str
    category: str
    metric: str
    outcomes: tuple[Outcome, ...]
    chance: float | None = None
    notes: Mapping[str, float | str] = field(default_factory=dict)
    first_ids: tuple[int, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    def summary(self) -> dict[str, object]:
        """The fields of the result: category, metric, value, se, n, chance."""
        value, se = ratio_and_error(*self.arrays())
        return {
            "category": self.category,
            "metric": self.metric,
            "value": value,
            "se": se,
            "n": len(self.outcomes),
            "chance": self.chance,
        }

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(values, weights), each (n,)."""
        values = np.array([o.value for o in self.outcomes], np.float64)
        return values, np.array([o.weight for o in self.outcomes], np.float64)


def ratio_and_error(
    values: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """(sum of values / sum of weights, its standard error over items); None without data.

    The error is the linearised one of a ratio (Cochran, "Sampling Techniques", 1977, §2.11): for
    weights of 1 the usual error of a mean.
    """
    n, total = len(values), float(weights.sum())
    if n == 0 or total <= 0:
        return None, None
    value = float(values.sum() / total)
    if n < 2:
        return value, None
    residual = values - value * weights
    return value, math.sqrt(n / (n - 1) * float(residual @ residual)) / total


def ids_sha256(ids: NDArray[np.int32]) -> str:
    """SHA-256 of token ids: the same prompt for the same tokenizer."""
    return hashlib.sha256(np.ascontiguousarray(ids, np.int32).tobytes()).hexdigest()


def save_results(results: Sequence[TaskResult], folder: Path, facts: Mapping[str, object]) -> None:
    """`results.json` (facts, tasks, flags) and `items.parquet`, one row an item; atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(outcome) for result in results for outcome in result.outcomes]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    write_atomic(folder / "items.parquet", buffer.getvalue())
    tasks = [
        {
            "name": r.name,
            **r.summary(),
            "notes": dict(r.notes),
            "first_prompt_ids": list(r.first_ids),
            "settings": dict(r.settings),
        }
        for r in results
    ]
    record = {"schema": 1, "metrics_version": METRICS_VERSION, **facts, "results": tasks}
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(folder / "results.json", text.encode())
    lines = [json.dumps(row, allow_nan=False, ensure_ascii=False) for row in rows]
    write_atomic(folder / "items.jsonl", ("\n".join(lines) + "\n").encode())


def load_results(folder: Path) -> tuple[list[TaskResult], dict[str, Any]]:
    """What `save_results` wrote.

    Raises:
        InputError: the folder holds no results, or files that cannot be read.
    """
    try:
        record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        rows = pq.read_table(folder / "items.parquet").to_pylist()
        results = []
        for task in record["results"]:
            outcomes = tuple(Outcome(**row) for row in rows if row["task"] == task["name"])
            results.append(
                TaskResult(
                    task["name"],
                    task["category"],
                    task["metric"],
                    outcomes,
                    task["chance"],
                    task["notes"],
                    tuple(task["first_prompt_ids"]),
                    task.get("settings", {}),
                )
            )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise InputError(
            f"{folder} holds no results of `bitwright evaluate --out` that can be read ({error}); "
            "give a folder that it wrote"
        ) from None
    return results, record


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("task", "item", "prompt_sha256", "prompt", "output")),
        ("expected", pa.string()),
        ("verdict", pa.string()),
        ("value", pa.float64()),
        ("weight", pa.float64()),
        ("truncated", pa.bool_()),
    ]
)
