"""What a comparison leaves so that any of its numbers can be opened: the page, and its items.

`comparison.json` is the page. `items.jsonl` and `items.parquet` have one row per item of a task
(prompt hash, both answers, both verdicts), or per document of a category. For per-token scores,
`tokens.parquet` has every scored token too.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bitwright.corpora.records import SPAN_KINDS
from bitwright.engine.atomic import write_atomic
from bitwright.eval.outcome import TaskResult
from bitwright.eval.statistics import document_sums
from bitwright.eval.suite import DivergenceSuite
from bitwright.eval.tokens import TokenTable

Rows = list[dict[str, Any]]


def item_rows(a: Sequence[TaskResult], b: Sequence[TaskResult]) -> Rows:
    """One row per item that both results hold; `difference` is b's value minus a's."""
    others = {result.name: result for result in b}
    rows: Rows = []
    for result in a:
        other = others.get(result.name)
        for left, right in zip(result.outcomes, other.outcomes if other else (), strict=False):
            rows.append(
                {
                    "task": result.name,
                    "item": left.item,
                    "prompt_sha256": left.prompt_sha256,
                    "expected": left.expected,
                    "output_a": left.output,
                    "output_b": right.output,
                    "verdict_a": left.verdict,
                    "verdict_b": right.verdict,
                    "value_a": left.value,
                    "value_b": right.value,
                    "difference": right.value - left.value,
                    "weight": left.weight,
                }
            )
    return rows


def document_rows(
    a: Mapping[str, TokenTable], b: Mapping[str, TokenTable], suite: DivergenceSuite
) -> Rows:
    """One row per scored document: means of both files on the spans that count."""
    rows: Rows = []
    for category, table in a.items():
        codes = suite.category(category).codes()
        left, right = table.select(codes), b[category].select(codes)
        gained = right.same_top1 & ~left.same_top1
        lost = left.same_top1 & ~right.same_top1
        columns = (left.kld, right.kld, left.nll, right.nll, gained, lost, np.ones(left.n_tokens))
        sums = document_sums(left.document, np.stack(columns, 1))
        for document, row in zip(np.unique(left.document), sums.tolist(), strict=True):
            *means, up, down, n = row
            kld_a, kld_b, nll_a, nll_b = (value / n for value in means)
            rows.append(
                {
                    "category": category,
                    "document": left.documents[document],
                    "n_tokens": int(n),
                    "kld_a": kld_a,
                    "kld_b": kld_b,
                    "nll_a": nll_a,
                    "nll_b": nll_b,
                    "top1_gained": int(up),
                    "top1_lost": int(down),
                }
            )
    return rows


def token_columns(a: TokenTable, b: TokenTable, ids: NDArray[np.int32] | None) -> pa.Table:
    """Every scored token of a category; `token` is its id where the corpus is known."""
    known = ids is not None and len(ids) == a.n_tokens
    columns: dict[str, Any] = {
        "category": pa.array([a.category] * a.n_tokens, pa.string()),
        "document": pa.array([a.documents[i] for i in a.document], pa.string()),
        "token": pa.array(ids if known else [None] * a.n_tokens, pa.int32()),
        "kind": pa.array([SPAN_KINDS[i] for i in a.kind], pa.string()),
    }
    for side, table in (("a", a), ("b", b)):
        columns[f"kld_{side}"] = table.kld
        columns[f"nll_{side}"] = table.nll
        columns[f"same_top1_{side}"] = table.same_top1
    return pa.table(columns)


def save_comparison(
    folder: Path, page: Mapping[str, object], rows: Rows, tokens: Sequence[pa.Table] = ()
) -> list[Path]:
    """Write the page and its rows; each file is whole or not there."""
    written = {
        "comparison.json": json.dumps(page, indent=1, allow_nan=False).encode(),
        "items.jsonl": b"".join(
            json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n" for row in rows
        ),
        "items.parquet": _parquet(pa.Table.from_pylist(rows)),
    }
    if tokens:
        written["tokens.parquet"] = _parquet(pa.concat_tables(tokens))
    for name, data in written.items():
        write_atomic(folder / name, data)
    return [folder / name for name in written]


def _parquet(table: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
