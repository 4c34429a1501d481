"""Sweeps and variants on a tiny model: their contracts, their files, and going on after a stop."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from bitwright.corpora.leaks import Overlap
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError, EngineError, InputError
from bitwright.eval import scorer
from bitwright.eval.outcome import load_results
from bitwright.eval.task_suite import TaskSpec
from bitwright.eval.tokens import TokenTable
from bitwright.workflows import item_leaks, stage_items
from bitwright.workflows.progress import Silent
from bitwright.workflows.single_thresholds import failures_of, load_thresholds, parse_fail_if
from bitwright.workflows.sizes import uniform_layout
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.stage_ladders import batches, joined
from tests.workflows.support import Ran, bitwright, listing, write_workflow

SUITE = """
schema = 1
[[tasks]]
name = "calls"
category = "tool_calling"
method = "tool_exact"
source = "builtin:tool_calling"
max_tokens = 4
[[tasks]]
name = "bits"
category = "code"
method = "bits_per_byte"
source = "builtin:code"
"""
EXTRA = """
[scores]
suites = ["{suite}"]
items = 5
likelihood_items = 3

[sweep]
stock = ["Q8_0", "Q2_K"]
uniform = ["Q2_K"]

[variants]
groups = "role"
threshold_nats = {threshold}
start = "Q3_K"
first_chunks = 1
curve_points = 1
back_off_rounds = 3
"""


def write_sizes(folder: Path, kind: str, threshold: str = "0.02") -> Path:
    """A workflow of that kind over the two categories of the other tests."""
    suite = folder / "suite.toml"
    suite.write_text(SUITE)
    path = write_workflow(folder, name=f"{kind}.toml")
    lines = [
        line
        for line in path.read_text().splitlines()
        if not line.startswith(("budget", "baseline", "rivals"))
    ]
    text = "\n".join(lines).replace("schema = 1", f'schema = 1\nkind = "{kind}"')
    text = text.replace("[search]\nrounds = 1\n", "")
    path.write_text(text + EXTRA.format(suite=suite, threshold=threshold))
    return path


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Ran, Path]:
    folder = tmp_path_factory.mktemp("sweep")
    workflow = write_sizes(folder, "sweep")
    ran = bitwright("run", workflow, "--model", tiny_model, "--out", folder / "run", "--json")
    assert ran.code == 0, ran.err
    return folder / "run", ran, workflow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, Ran, Path]:
    folder = tmp_path_factory.mktemp("variants")
    workflow = write_sizes(folder, "variants")
    ran = bitwright("run", workflow, "--model", tiny_model, "--out", folder / "run", "--json")
    assert ran.code == 0, ran.err
    return folder / "run", ran, workflow


# Sweeps


def test_the_contract_of_a_sweep(swept: tuple[Path, Ran, Path]) -> None:
    result = swept[1].json
    labels = [size["label"] for size in result["sizes"]]
    assert set(labels) == {"stock-Q8_0", "stock-Q2_K", "uniform-Q2_K"}
    bytes_ = [size["size_bytes"] for size in result["sizes"]]
    assert bytes_ == sorted(bytes_, reverse=True)
    assert set(result["thresholds"]) == {"tool_calling", "code"}
    for one in result["thresholds"].values():
        assert {"last_unharmed_bpw", "first_harmed_bpw", "n_items"} <= one.keys()
    assert {"category", "probability"} <= result["first_to_break"].keys()
    assert result["first_to_break"]["compared"] == ["tool_calling"]
    scores = result["sizes"][0]["scores"]["code"]
    assert scores["kld_nats"] >= 0.0
    assert scores["metric"] == "bits_per_byte"


def test_a_random_model_breaks_nowhere_that_could_be_shown(swept: tuple[Path, Ran, Path]) -> None:
    """It has no call right, so nothing is lost, and nothing can be shown unharmed either."""
    one = swept[1].json["thresholds"]["tool_calling"]
    assert one["first_harmed_bpw"] is None
    assert one["last_unharmed_bpw"] is None
    assert one["verdict"] == "not established"


def test_scored_files_are_removed_and_our_layouts_kept(swept: tuple[Path, Ran, Path]) -> None:
    assert not list(swept[0].rglob("*.gguf.tmp"))
    assert not list(swept[0].glob("*/files/*.gguf"))
    assert (swept[0] / "layouts" / "uniform-Q2_K.txt").is_file()


def test_a_second_run_computes_nothing(swept: tuple[Path, Ran, Path], tiny_model: Path) -> None:
    folder, ran, workflow = swept
    before = listing(folder)
    with patch.object(stage_items, "run_tasks", side_effect=AssertionError("scored again")):
        again = bitwright("run", workflow, "--model", tiny_model, "--out", folder, "--json")
    assert again.json == ran.json
    changed = {name for name, facts in listing(folder).items() if before.get(name) != facts}
    assert changed <= {"result.json", "report.html", "README.md", "layouts/uniform-Q2_K.txt"}


def test_a_stopped_sweep_goes_on_where_it_was(
    swept: tuple[Path, Ran, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """Within a file too: what was answered of it is not asked again."""
    _, ran, workflow = swept
    scored: list[str] = []
    real, real_generate = stage_items.run_tasks, scorer.generate

    def stop_within_third(ctx, model, asked, book, step):  # type: ignore[no-untyped-def]
        def stop(done, total, name):  # type: ignore[no-untyped-def]
            step(done, total, name)
            if name == "bits" and len(scored) == 3:
                raise EngineError("stopped")

        scored.append(model.name)
        return real(ctx, model, asked, book, stop)

    arguments = ("run", workflow, "--model", tiny_model, "--out", tmp_path / "run", "--json")
    with patch.object(stage_items, "run_tasks", stop_within_third):
        assert bitwright(*arguments).code == 1
    assert not list(tmp_path.rglob("files/*.gguf"))
    again: dict[str, int] = {}

    def count(ctx, model, asked, book, step):  # type: ignore[no-untyped-def]
        again[model.name] = 0
        return real(ctx, model, asked, book, step)

    def count_asked(decoder, prompts, **options):  # type: ignore[no-untyped-def]
        again[list(again)[-1]] += len(prompts)
        return real_generate(decoder, prompts, **options)

    with (
        patch.object(stage_items, "run_tasks", count),
        patch.object(scorer, "generate", count_asked),
    ):
        resumed = bitwright(*arguments)
    assert resumed.json == ran.json
    assert next(iter(again)) == scored[2]  # of the reference and three sizes, two were done
    assert list(again.values()) == [0, 5]
    assert not list(tmp_path.rglob(".asked*"))


def test_the_report_can_be_written_anew(swept: tuple[Path, Ran, Path]) -> None:
    page = swept[0] / "report.html"
    before = page.read_text()
    page.unlink()
    again = bitwright("report", swept[0], "--json")
    assert again.json == swept[1].json
    assert page.read_text() == before


def test_a_dry_run_of_a_sweep_lists_its_sizes(
    swept: tuple[Path, Ran, Path], tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "none"
    ran = bitwright("run", swept[2], "--model", tiny_model, "--out", out, "--dry-run", "--json")
    sizes = {one["label"]: one["size_bytes"] for one in ran.json["sizes"]}
    assert sizes == {one["label"]: one["size_bytes"] for one in swept[1].json["sizes"]}
    assert not out.exists()


def test_solved_sizes_fit_and_are_measured(tmp_path: Path, tiny_model: Path) -> None:
    workflow = write_sizes(tmp_path, "sweep")
    text = workflow.read_text().replace('uniform = ["Q2_K"]', 'solved = ["5 bpw"]')
    workflow.write_text(text.replace('"Q8_0", "Q2_K"', '"Q8_0"'))
    out = tmp_path / "run"
    ran = bitwright("run", workflow, "--model", tiny_model, "--out", out, "--json")
    assert ran.code == 0, ran.err
    ours = ran.json["sizes"][1]
    assert ours["label"] == "ours-5bpw"
    assert 4.0 < ours["bpw"] <= 5.0
    assert (out / "layouts" / "ours-5bpw.txt").is_file()


def test_a_budget_for_a_sweep_is_refused(
    swept: tuple[Path, Ran, Path], tiny_model: Path, tmp_path: Path
) -> None:
    ran = bitwright(
        "run", swept[2], "--model", tiny_model, "--out", tmp_path / "x", "--budget", "3 bpw"
    )
    assert "--budget" in ran.refusal()


def test_the_built_in_workflows_load() -> None:
    for name in ("tool-calling-threshold", "tool-calling-bfcl"):
        assert load_workflow(name)[0].kind == "sweep"
    assert load_workflow("bedrock-tightrope-gambit")[0].kind == "variants"
    assert load_workflow("coding-q3_k_s")[0].kind == "build"


def test_a_build_still_needs_its_budget(tmp_path: Path) -> None:
    path = write_workflow(tmp_path)
    path.write_text(path.read_text().replace("budget", "# budget"))
    with pytest.raises(ConfigError, match="budget is missing"):
        load_workflow(path)


def test_uniform_layouts_keep_embeddings_at_their_least_type(tiny_model: Path) -> None:
    model = open_model(tiny_model)
    low = uniform_layout(model, "IQ1_S", "Q2_K", None)
    assert low["token_embd.weight"] == "Q2_K"
    assert low["blk.0.attn_q.weight"] == "IQ1_S"
    assert uniform_layout(model, "Q6_K", "Q2_K", None)["token_embd.weight"] == "Q6_K"


def test_generated_items_that_resemble_the_calibration_text_are_left_out(
    swept: tuple[Path, Ran, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """One item is made to stand in the text: it is asked of no file, and the run goes on."""
    (leaked, *_), _ = load_results(swept[0] / "items" / "reference")
    name = f"calls/{leaked.outcomes[0].item}"
    overlaps = (Overlap(name, "code/x", 0.9),)
    workflow = write_sizes(tmp_path, "sweep")
    out = tmp_path / "run"
    with patch.object(item_leaks, "overlap", lambda documents, texts: overlaps):
        ran = bitwright("run", workflow, "--model", tiny_model, "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert f"1 of 8 generated items resemble the calibration text and are left out: {name}" in (
        " ".join(ran.err.split())
    )
    for label in ("reference", "stock-Q2_K"):
        results, _ = load_results(out / "items" / label)
        assert [len(r.outcomes) for r in results] == [4, 3]
        assert leaked.outcomes[0].item not in {o.item for o in results[0].outcomes}


# Variants


def test_the_contract_of_the_variants(built: tuple[Path, Ran, Path]) -> None:
    result = built[1].json
    assert [one["name"] for one in result["variants"]] == ["Bedrock", "Tightrope", "Gambit"]
    sizes = [one["size_bytes"] for one in result["variants"]]
    assert sizes == sorted(sizes, reverse=True)
    for one in result["variants"]:
        path = Path(one["path"])
        assert path.stat().st_size == one["size_bytes"]
        assert Path(one["layout"]).read_text().count("=") > 0
        assert one["scores"]["code"]["kld_nats"] >= 0.0
        assert one["honest_name"]
    assert set(result["nearest_stock"]) == {"Bedrock", "Tightrope", "Gambit"}
    pairs = {(c["a"], c["b"]) for c in result["comparisons"]}
    assert ("Bedrock", "Gambit") in pairs
    assert any(b.startswith("stock-") for _, b in pairs)


def test_bedrock_is_shown_under_the_threshold_or_says_that_it_is_not(
    built: tuple[Path, Ran, Path],
) -> None:
    (kept,) = [one for one in built[1].json["back_off"] if one["kept"]]
    for category, (_, _, high) in kept["measured_nats"].items():
        shown = high is not None and high < 0.02
        assert shown == (category not in kept["not_shown_safe"])


def test_a_second_run_of_the_variants_gives_the_same(
    built: tuple[Path, Ran, Path], tiny_model: Path
) -> None:
    folder, ran, workflow = built
    before = {n: f for n, f in listing(folder).items() if n.endswith(".gguf")}
    again = bitwright("run", workflow, "--model", tiny_model, "--out", folder, "--json")
    assert again.json == ran.json
    assert {n: f for n, f in listing(folder).items() if n.endswith(".gguf")} == before


# Parts


def test_batches_double() -> None:
    chunks = {"a": list(range(7)), "b": list(range(2))}
    found = batches(chunks, 1)  # type: ignore[arg-type]
    assert [list(part["a"]) for part in found] == [[0], [1], [2, 3], [4, 5, 6]]
    assert [list(part["b"]) for part in found] == [[0], [1], [], []]


def table(values: list[float], document: list[int], documents: tuple[str, ...]) -> TokenTable:
    n = len(values)
    zeros = np.zeros(n)
    return TokenTable(
        "x",
        "code",
        np.array(values),
        np.ones(n, np.bool_),
        zeros,
        zeros,
        np.full(n, 2, np.uint8),
        np.array(document, np.int32),
        documents,
    )


def test_joined_tables_share_their_documents() -> None:
    found = joined(table([1.0, 2.0], [0, 1], ("a", "b")), table([3.0, 4.0], [0, 1], ("b", "c")))
    assert found.documents == ("a", "b", "c")
    assert found.document.tolist() == [0, 1, 1, 2]
    assert found.kld.tolist() == [1.0, 2.0, 3.0, 4.0]


# thresholds


def fake_run(folder: Path, harmed: float | None, unharmed: float | None) -> Path:
    one = {"last_unharmed_bpw": unharmed, "first_harmed_bpw": harmed, "n_items": 100}
    result = {
        "model": folder.name,
        "thresholds": {"tool_calling": one},
        "first_to_break": {"category": None, "probability": 0.5},
    }
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_ci_fails_when_a_category_breaks_above_the_size(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", harmed=4.2, unharmed=4.9)
    failed = bitwright("thresholds", run, "--fail-if", "tool_calling.breaks_above=3.9bpw", "--json")
    assert failed.code == 1
    assert failed.json["passed"] is False
    assert "4.20 bpw" in failed.json["failures"][0]
    passed = bitwright("thresholds", run, "--fail-if", "tool_calling.breaks_above=4.5bpw", "--json")
    assert passed.code == 0
    assert passed.json["passed"] is True


def test_what_is_not_established_is_no_break_but_no_proof(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "a", harmed=None, unharmed=None)
    passed = bitwright("thresholds", run, "--fail-if", "tool_calling.breaks_above=3.9")
    assert passed.code == 0
    assert "not shown unharmed there either" in passed.out
    assert passed.out.splitlines()[-1] == "passed"
    failed = bitwright("thresholds", run, "--fail-if", "tool_calling.unproven_above=3.9")
    assert failed.code == 1
    assert "shown unharmed at no size, not at 3.9 bpw or less" in failed.out
    proven = fake_run(tmp_path / "b", harmed=2.5, unharmed=3.4)
    passed = bitwright("thresholds", proven, "--fail-if", "tool_calling.breaks_above=3.9", "--json")
    assert passed.json["unproven"] == []


def test_several_runs_stand_side_by_side_and_can_be_kept(tmp_path: Path) -> None:
    a = fake_run(tmp_path / "a", harmed=2.5, unharmed=3.4)
    b = fake_run(tmp_path / "b", harmed=3.4, unharmed=4.9)
    kept = tmp_path / "thresholds.json"
    ran = bitwright("thresholds", a, b, "--out", kept, "--json")
    assert set(ran.json["runs"]) == {"a", "b"}
    again = bitwright("thresholds", kept, "--fail-if", "tool_calling.breaks_above=3bpw", "--json")
    assert again.code == 1
    assert [m.split(":")[0] for m in again.json["failures"]] == ["b"]


@pytest.mark.parametrize("text", ["tool_calling=3", "x.breaks_above=much", "x.breaks=3bpw", ""])
def test_conditions_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="breaks_above"):
        parse_fail_if(text)


def test_a_category_that_no_run_has_is_refused(tmp_path: Path) -> None:
    runs = load_thresholds(fake_run(tmp_path / "a", harmed=2.5, unharmed=3.4))
    with pytest.raises(ConfigError, match="no category 'chat'"):
        failures_of(parse_fail_if("chat.breaks_above=3bpw"), runs)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"thresholds": 3}', '{"thresholds": {"a": 1}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match="thresholds"):
        load_thresholds(path)


def test_all_files_of_a_sweep_are_read_as_the_original(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of random weights calls nothing, so the original's form is put in by hand."""
    workflow = write_sizes(tmp_path, "sweep")
    asked: list[str] = []
    real = stage_items.run_suite

    def fenced_first(scorer, suite, options, **more):  # type: ignore[no-untyped-def]
        asked.append(next(task.form for task in suite.tasks if task.name == "calls"))
        results = real(scorer, suite, options, **more)
        if len(asked) > 1:
            return results
        return [
            dataclasses.replace(r, settings={**r.settings, "form": "fenced"})
            if r.name == "calls"
            else r
            for r in results
        ]

    monkeypatch.setattr(stage_items, "run_suite", fenced_first)
    out = tmp_path / "run"
    ran = bitwright("run", workflow, "--model", tiny_model, "--out", out, "--json")
    assert ran.code == 0, ran.err
    assert asked == ["", "fenced", "fenced", "fenced"]
    results, _ = load_results(out / "items" / "stock-Q2_K")
    assert next(r for r in results if r.name == "calls").settings["form"] == "fenced"


def test_progress_within_a_file_only_grows_and_ends_at_the_next_file() -> None:
    seen: list[tuple[float, int, str]] = []

    class Record(Silent):
        def step(self, done: float, total: int, label: str) -> None:
            seen.append((done, total, label))

    def task(name: str, method: str, limit: int) -> TaskSpec:
        return TaskSpec(name=name, category="c", method=method, source="builtin:x", limit=limit)

    tasks = [
        task("nats", "tool_nats", 10),
        task("exact", "tool_exact", 10),
        task("sum", "number", 20),
    ]
    step = stage_items._steps(Record(), "Q2_K", 2, 5, tasks)
    for done, total, name in (
        *((5, 10, stage_items.TOGETHER), (10, 10, stage_items.TOGETHER)),
        *((0, 1, "nats"), (10, 10, "nats"), (10, 10, "exact"), (10, 20, "sum"), (20, 20, "sum")),
    ):
        step(done, total, name)
    parts = [done for done, _, _ in seen]
    assert parts == [2.25, 2.5, 2.5, 2.5, 2.5, 2.75, 3.0]
    assert seen[-1] == (3.0, 5, "Q2_K, sum 20/20")
