"""Imatrix or layout? The four files of a finished build, on the target's tasks and all others.

(a) stock layout, general imatrix: what everybody uses; (b) stock layout, task imatrix; (c) our
layout, task imatrix; (d) our layout, general imatrix. Each is written as users would run it, scored
item by item, and compared in pairs that differ in one thing. Finished files are not scored again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.allocator.names import nominal_ftype
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.imatrix_file import check_imatrix, read_imatrix
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
from bitwright.engine.session import resolve_threads
from bitwright.engine.upstream import FTYPES
from bitwright.errors import InputError
from bitwright.eval.answer_book import AnswerBook, answers_until_kept
from bitwright.eval.flags import flags_of
from bitwright.eval.outcome import METRICS_VERSION, TaskResult, load_results, save_results
from bitwright.eval.pairing import Difference, by_category, compare_results
from bitwright.eval.run_suite import SuiteOptions, read_alike, run_suite
from bitwright.eval.sandbox import Limits, require_sandbox
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSuite, load_task_suite
from bitwright.report.blocks import terminal_text
from bitwright.report.differences import difference_page
from bitwright.workflows.calibration import calibration_texts
from bitwright.workflows.output import Output
from bitwright.workflows.progress import Reporter
from bitwright.workflows.run_folder import RunFolder, key_of, versions
from bitwright.workflows.single import ModelChoice
from bitwright.workflows.single_suite import SuiteChoice


@dataclass(frozen=True, slots=True)
class Build:
    """What a finished run says of its files."""

    folder: RunFolder
    target: str
    baseline: str
    layouts: Mapping[str, Mapping[str, str]]

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """(a), (b), (c), (d)."""
        stock = f"stock-{self.baseline}"
        return f"{stock}-general", f"{stock}-task", "ours-task", "ours-general"

    @property
    def pairs(self) -> Mapping[str, tuple[str, str]]:
        """Question → (baseline, other): what differs between the two."""
        a, b, c, d = self.labels
        return {
            "imatrix": (a, b),
            "layout": (b, c),
            "layout_general": (a, d),
            "both": (a, c),
        }


def read_build(folder: Path) -> Build:
    """A finished run of a build workflow.

    Raises:
        InputError: the folder holds none.
    """
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        stage = json.loads((folder / "evaluate.json").read_text(encoding="utf-8"))
        baseline = str(result["baseline"]).removeprefix("stock-").removesuffix("-task")
        build = Build(
            RunFolder.open(folder), result["target"], baseline, stage["result"]["layouts"]
        )
        missing = [label for label in build.labels if label not in build.layouts]
    except (OSError, ValueError, KeyError):
        raise InputError(
            f"{folder} is not a finished run of a build workflow: give the folder of"
            " `bitwright run`"
        ) from None
    if missing:
        raise InputError(f"{folder} has no layout {missing[0]!r}: run the workflow again")
    return build


def seed_comparison(
    choice: ModelChoice, folder: Path, suites: Sequence[str], suite: SuiteChoice, output: Output
) -> None:
    """Score (a) to (d) on every suite and compare them; target tasks first."""
    build, model = read_build(folder), choice.open()
    tasks = TaskSuite.model_validate(
        {"schema": 1, "tasks": [task for name in suites for task in load_task_suite(name).tasks]}
    )
    if suite.execute_code:
        require_sandbox()
    reporter = output.reporter()
    try:
        results: dict[str, list[TaskResult]] = {}
        for label in build.labels:
            results[label] = _scored(choice, build, model, label, tasks, suite, reporter)
            alike = read_alike(tasks.tasks, results[build.labels[0]])
            tasks = tasks.model_copy(update={"tasks": alike})
    finally:
        reporter.close()
    pages: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for question, (a, b) in build.pairs.items():
        found = compare_results(results[a], results[b])
        pages[question] = {"a": a, "b": b, **_page(found, build.target)}
        page = difference_page(a, b, found, build.target, ())
        lines += ["", f"{question}: {page.title}", terminal_text(page)]
    flags = sorted({flag for found in results.values() for r in found for flag in flags_of(r)})
    summaries = {label: {r.name: r.summary() for r in found} for label, found in results.items()}
    facts = {"target": build.target, "files": summaries, "comparisons": pages, "flags": flags}
    output.result(facts, "\n".join([*lines, *flags]))


def _page(found: Mapping[str, Difference], target: str) -> dict[str, Any]:
    return {
        side: {name: found[name].as_dict() for name in names}
        for side, names in by_category(found, target).items()
    }


def _scored(
    choice: ModelChoice,
    build: Build,
    model: ModelFile,
    label: str,
    tasks: TaskSuite,
    suite: SuiteChoice,
    reporter: Reporter,
) -> list[TaskResult]:
    """One file's results, from the run folder or by writing and running it."""
    imatrix = read_imatrix(build.folder.path / "imatrix" / f"{label.rpartition('-')[2]}.gguf")
    check_imatrix(imatrix, model)
    layout = build.layouts[label]
    specs = [task.model_dump(mode="json") for task in tasks.tasks]
    key = key_of(
        *(model.sha256(), imatrix.sha256(), dict(layout), specs, suite.limit),
        *(choice.options.gpu_layers, versions()["llama-cpp-python"], METRICS_VERSION),
    )
    out = build.folder.file("seed", label, "results.json").parent
    if (out / "results.json").is_file():
        results, facts = load_results(out)
        if facts.get("key") == key:
            return results
    reporter.stage("seed", f"{label}: {len(tasks.tasks)} tasks")
    path = build.folder.file("seed", f"{label}.gguf")
    threads = resolve_threads(choice.options.threads)
    try:
        with answers_until_kept(out, key) as book:
            write_quantized(
                model,
                layout,
                path,
                packer=Packer(model, imatrix, threads=threads),
                ftype=FTYPES[nominal_ftype(layout, model)],
                provenance=None,
                overwrite=True,
            )
            results = _run(choice, build, path, tasks, suite, reporter, book)
            save_results(results, out, {"label": label, "key": key, "versions": versions()})
    finally:
        path.unlink(missing_ok=True)
    return results


def _run(
    choice: ModelChoice,
    build: Build,
    path: Path,
    tasks: TaskSuite,
    suite: SuiteChoice,
    reporter: Reporter,
    book: AnswerBook,
) -> list[TaskResult]:
    options = DecoderOptions(threads=choice.options.threads, gpu_layers=choice.options.gpu_layers)
    with Scorer(open_model(path, allow_requantize=True), options, book=book) as scorer:
        paths = (*suite.calibration, build.folder.path)
        return run_suite(
            scorer,
            tasks,
            SuiteOptions(suite.data, Limits() if suite.execute_code else None, suite.limit),
            calibration=calibration_texts(paths, scorer.tokenizer),
            allow_overlap=suite.allow_overlap,
            progress=reporter.step,
        )
