"""Items of a sweep: refused where they stand in its calibration text; depth and breadth."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bitwright.engine.model_file import open_model
from bitwright.engine.tokenizer import Tokenizer
from bitwright.eval.outcome import load_results
from bitwright.workflows.calibration import calibration_texts
from bitwright.workflows.context import RunContext
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.stage_items import suite_tasks
from tests.eval.hub_rows import ARC, write_lines
from tests.workflows.support import bitwright
from tests.workflows.test_sizes import write_sizes

SUITE = """
schema = 1
[[tasks]]
name = "arc"
category = "code"
method = "lm_eval"
source = "lm_eval:arc/arc_easy.yaml"
file = "rows.jsonl"
metric = "acc"
chance = 0.25
"""


@pytest.mark.filterwarnings("default")
def test_items_of_the_runs_own_text_are_named_before_the_first_size_is_scored(
    tmp_path: Path, tiny_model: Path
) -> None:
    pytest.importorskip("lm_eval")
    workflow, run = write_sizes(tmp_path, "sweep"), tmp_path / "run"
    (tmp_path / "suite.toml").write_text(SUITE)
    text = workflow.read_text().replace("items = 5", f'items = 5\ndata = "{tmp_path / "rows"}"')
    workflow.write_text(text)
    (tmp_path / "rows").mkdir()
    line = ("run", workflow, "--model", tiny_model, "--out", run)
    assert "holds no rows.jsonl" in bitwright(*line).refusal()  # before anything is computed
    write_lines(tmp_path / "rows" / "rows.jsonl", ARC)
    ran = bitwright(*line)
    assert ran.code == 0, ran.err
    assert "arc" in ran.err  # a model of random weights is at chance, and that is said
    page = (run / "report.html").read_text()
    assert "Warnings of single tasks" in page
    assert "reference: arc: " in page
    results, facts = load_results(run / "items" / "reference")
    assert len(results[0].outcomes) == 2
    assert any("no better than chance" in flag for flag in facts["flags"])

    # Its sizes can be compared token by token, and their items one by one.
    tokens = bitwright("compare", f"{run}:stock-Q8_0", f"{run}:stock-Q2_K", "--json").json
    assert tokens["tasks"]["code/kld"]["difference"] > 0
    assert "several files and none is its own choice" in bitwright("compare", run, run).refusal()
    items = bitwright("compare", run / "items" / "stock-Q8_0", run / "items" / "stock-Q2_K")
    assert items.code == 0, items.err

    with Tokenizer(open_model(tiny_model)) as tokenizer:
        texts = calibration_texts((run,), tokenizer)
    name, long = max(texts.items(), key=lambda pair: len(pair[1]))
    leaked = {**ARC[0], "question": " ".join(long.split()[:120])}
    write_lines(tmp_path / "rows" / "rows.jsonl", [ARC[1], leaked, ARC[0]])
    ran = bitwright(*line)
    assert ran.code == 1
    assert f"1 of 3 evaluation items stand in the calibration text (arc/1 in {name}" in ran.err
    workflow.write_text(text.replace("items = 5", "items = 5\nallow_overlap = true"))
    assert bitwright(*line).code == 0


def test_the_target_is_asked_in_depth_and_the_others_in_breadth() -> None:
    spec, _ = load_workflow("tool-calling-threshold")
    ctx = cast(RunContext, SimpleNamespace(spec=spec))
    wide = spec.scores.model_copy(update={"off_target_items": 30})
    limits = {task.name: task.limit for task in suite_tasks(ctx, wide)}
    assert (limits["tool_exact"], limits["math"], limits["chat"]) == (200, 30, 30)
    assert limits["tool_nats"] == spec.scores.likelihood_items
    even = {task.name: task.limit for task in suite_tasks(ctx, spec.scores)}
    assert even["math"] == even["tool_exact"] == 200
