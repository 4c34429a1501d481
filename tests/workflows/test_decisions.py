"""What is written, under which verdict and name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bitwright.allocator.names import nominal_ftype
from bitwright.engine.model_file import open_model
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.engine.upstream import FTYPES, default_type, upstream_layout
from bitwright.eval.scores import Comparison
from bitwright.eval.statistics import Interval
from bitwright.workflows.pipeline import OURS, decide

STOCK = "stock-Q3_K_S-task"
BETTER, OPEN, WORSE = (Interval(v, v - 0.1, v + 0.1, 9) for v in (0.8, 1.0, 1.2))


def decided(
    *,
    report: Interval,
    verdict: str,
    own: dict[str, float],
    keep_stock: bool,
    prices: dict[str, float] | None = None,
    stock_bytes: int = 90,
) -> tuple[str, str]:
    measured = {"target": own, STOCK: {"code": 1.0, "general": 1.0}}
    plan = SimpleNamespace(stock_bytes={"Q3_K_S": stock_bytes}, budget_bytes=100)
    spec = SimpleNamespace(target="code", baseline="Q3_K_S")
    allocation = SimpleNamespace(
        keep_stock=keep_stock, ours="target", measured=measured, prices=prices or {}
    )
    comparison = Comparison(OURS, STOCK, report, {}, cast(Any, verdict))
    return decide(cast(Any, plan), cast(Any, spec), cast(Any, allocation), comparison)


def test_ours_is_written_when_nothing_speaks_against_it():
    found = decided(report=BETTER, verdict="better", own={"code": 0.5}, keep_stock=False)
    assert found == (OURS, "better")
    found = decided(report=OPEN, verdict="no difference shown", own={"code": 0.9}, keep_stock=False)
    assert found == (OURS, "no difference shown")


@pytest.mark.parametrize("keep_stock", [True, False])
def test_stock_is_written_when_the_report_shows_that_ours_is_worse(keep_stock: bool):
    found = decided(report=WORSE, verdict="worse", own={"code": 0.9}, keep_stock=keep_stock)
    assert found == (STOCK, "worse, baseline written")


def test_stock_kept_for_lack_of_proof_is_not_called_better():
    found = decided(report=BETTER, verdict="better", own={"code": 0.9}, keep_stock=True)
    assert found == (STOCK, "no difference shown")


def test_a_broken_price_is_worse():
    found = decided(
        report=BETTER,
        verdict="better",
        own={"code": 0.9, "general": 1.3},
        keep_stock=True,
        prices={"general": 0.1},
    )
    assert found == (STOCK, "worse, baseline written")


def test_a_baseline_above_the_budget_is_never_written():
    found = decided(
        report=WORSE, verdict="worse", own={"code": 1.5}, keep_stock=True, stock_bytes=101
    )
    assert found[0] == OURS
    assert found[1].startswith("worse")


@pytest.mark.parametrize("name", ["Q3_K_S", "Q4_K_M", "Q5_K_S", "Q6_K", "Q8_0", "IQ3_S", "IQ4_XS"])
def test_the_file_type_of_a_stock_layout_is_of_its_own_kind(tiny_model: Path, name: str):
    model = open_model(tiny_model)
    layout = upstream_layout(model, name, has_imatrix=True)
    shown = nominal_ftype(layout, model)
    assert shown in FTYPES
    assert default_type(shown) == default_type(name)


def test_the_file_type_of_a_mixed_layout_is_that_of_most_weights(tiny_model: Path):
    model = open_model(tiny_model)
    body = [t.name for t in model.tensors if is_quantizable(t, model.arch) and is_body(t.name)]
    assert nominal_ftype(dict.fromkeys(body, "Q3_K"), model) == "Q3_K_S"
    mixed = {n: "Q2_K" if "ffn" in n else "Q6_K" for n in body}
    assert nominal_ftype(mixed, model) == "Q2_K"
    assert nominal_ftype({}, model) == "F16"  # nothing was quantized
