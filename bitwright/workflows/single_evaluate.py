"""Scores of files: distance from the reference on a corpus, tasks of a suite, comparisons."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.corpora.records import SPLITS
from bitwright.engine.atomic import write_atomic
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.session import Session, SessionOptions
from bitwright.errors import ConfigError
from bitwright.eval.answer_book import AnswerBook, answers_until_kept
from bitwright.eval.divergence import Chunks, ScoreTable, document_ids
from bitwright.eval.files import score_file
from bitwright.eval.flags import failures_of, flags_of
from bitwright.eval.harness_needs import data_checks, harness_checks
from bitwright.eval.outcome import TaskResult, save_results
from bitwright.eval.run_suite import SuiteOptions, run_suite
from bitwright.eval.sandbox import Limits, doctor, require_sandbox
from bitwright.eval.scorer import Scorer
from bitwright.eval.scores import scores_of
from bitwright.eval.suite import load_suite
from bitwright.eval.task_suite import TaskSuite, load_task_suite
from bitwright.eval.tokens import save_tables
from bitwright.report.wording import kld_text, share_text
from bitwright.workflows.calibration import calibration_texts, own_run
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import (
    METRICS_VERSION,
    RunFolder,
    chunks_sha256,
    key_of,
    versions,
)
from bitwright.workflows.run_scores import save_texts
from bitwright.workflows.single import ModelChoice, fitting, matching_corpora, tell

DOCTOR_PARTS = {
    "code": "To run code that a model writes (suite code):",
    "lm_eval": "For tasks of lm-eval (suites chat and math):",
    "data": "Data that packages bring; --data FOLDER does it too:",
}


@dataclass(frozen=True, slots=True)
class SuiteChoice:
    """What the command line says about a suite."""

    name: str
    data: Path | None = None
    limit: int = 0
    execute_code: bool = False
    calibration: tuple[Path, ...] = ()
    allow_overlap: bool = False


def evaluate(
    choice: ModelChoice,
    files: Sequence[Path],
    corpus_folder: Path,
    split: str,
    out: Path | None,
    output: Output,
) -> None:
    """Quantized files against the model, on one split of a corpus: KLD, top-1, perplexity."""
    if split not in SPLITS:
        raise ConfigError(f"--split {split} is not one of {', '.join(SPLITS)}")
    _distinct_names(files)
    if out is not None:
        _not_a_run(out)
    model = choice.open()
    corpora = matching_corpora(corpus_folder, model)
    others = [open_model(path, allow_requantize=True) for path in files]
    chunks = {category: c.split(split) for category, c in corpora.items()}
    suite = load_suite("divergence")
    store = RunFolder.open(out).file("tokens", "x").parent if out else None
    options = replace(fitting(choice.options, corpora), working_type="file")
    key = key_of(model.sha256(), "file", options.n_ctx, METRICS_VERSION)
    reporter = output.reporter()
    reporter.stage("evaluate", ", ".join(other.name for other in others))
    rows, text, tables = [], [], []
    try:
        with Session(model, options) as session:
            for path, other in zip(files, others, strict=True):
                label = path.name
                table = score_file(
                    session,
                    other,
                    chunks,
                    label=label,
                    options=options,
                    store=store,
                    key=key,
                    progress=reporter.step,
                )
                tables.append(table)
                scores = scores_of(table, label, suite)
                rows.append({"label": label, "size_bytes": other.size_bytes, "scores": scores})
                text += [_score_line(label, c, s) for c, s in scores.items()]
    finally:
        reporter.close()
    facts = {"reference": model.path.name, "split": split, "files": rows}
    if out is not None:
        _keep_tables(RunFolder.open(out), model, options, chunks, tables, facts)
    tell(output, model, facts, "\n".join(text))


def _distinct_names(files: Sequence[Path]) -> None:
    names = [path.name for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two files are called {twice}, and results are told apart by name: evaluate them one "
            "at a time, or rename one"
        )


def _not_a_run(out: Path) -> None:
    """Scores of files are kept where a run would keep its own, so never in a run's folder."""
    try:
        found = json.loads((out / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not isinstance(found, dict) or found.get("kind") != "divergence":
        raise ConfigError(f"{out} is the folder of a run: give another one with --out")


def _keep_tables(
    folder: RunFolder,
    model: ModelFile,
    options: SessionOptions,
    chunks: Chunks,
    tables: Sequence[ScoreTable],
    facts: Mapping[str, object],
) -> None:
    """What `bitwright compare` reads, in the form that a run leaves."""
    engine = {"n_ctx": options.n_ctx, "gpu_layers": options.gpu_layers, "working_type": "file"}
    hashes = {category: chunks_sha256(found) for category, found in chunks.items()}
    labels = [label for table in tables for label in table.labels]
    inputs = {
        "model": model.sha256(),
        "engine": engine,
        "metrics": METRICS_VERSION,
        "chunks": hashes,
        "layouts": dict.fromkeys(labels, ""),
    }
    key = key_of("evaluate", inputs, versions()["llama-cpp-python"], facts)

    def compute() -> tuple[dict[str, object], list[Path]]:
        paths = [save_texts(folder, {c: document_ids(found) for c, found in chunks.items()})]
        for number, table in enumerate(tables):
            path = folder.file("report", "scores", f"{number}.npz")
            (label,) = table.labels
            save_tables([table.table(label, c) for c in table.categories], path, key)
            paths.append(path)
        return {}, paths

    folder.stage("report-scores", key, compute, inputs=inputs)
    result = {"schema": 1, "kind": "divergence", **facts}
    write_atomic(folder.file("result.json"), json.dumps(result, indent=1, allow_nan=False).encode())


def _score_line(label: str, category: str, scores: Mapping[str, Any]) -> str:
    return (
        f"{label}  {category:<14} KLD {kld_text(scores['kld_nats'], scores['se'])} nats, "
        f"top-1 {share_text(scores['top1'])}, {scores['n_tokens']} tokens"
    )


def evaluate_suite(
    choice: ModelChoice, files: Sequence[Path], suite: SuiteChoice, out: Path | None, output: Output
) -> None:
    """Tasks of a suite on the files, or on the model itself when no files are given.

    One model prints the suite's result; several print one result per file name.
    """
    specs: list[str | Path] = [*files] or [choice.spec]
    if not specs[0]:
        raise ConfigError("nothing to evaluate: give --model, or quantized files")
    _distinct_names(files)
    tasks = load_task_suite(suite.name)
    if suite.execute_code:
        require_sandbox()
    models = [open_model(spec, allow_requantize=True) for spec in specs]
    shown: dict[str, dict[str, object]] = {}
    lines: list[str] = []
    reporter = output.reporter()
    try:
        for model in models:
            reporter.stage("evaluate", f"{model.path.name}, suite {suite.name}")
            folder = out if out is None or len(models) == 1 else out / model.path.stem
            with _book(folder, model, choice) as book:
                results = _run(choice, model, tasks, suite, book, reporter.step)
                flags = [flag for result in results for flag in flags_of(result)]
                facts = {**suite_facts(suite.name, results), "flags": flags}
                if folder is not None:
                    _save(folder, model, facts, results)
            shown[model.path.name] = facts
            lines += [f"{model.path.name}, suite {suite.name}", *_lines(results), *flags]
            for flag in flags if output.json else ():
                reporter.note(flag)
    finally:
        reporter.close()
    single = next(iter(shown.values()))
    data = single if len(shown) == 1 else {"suite": suite.name, "models": shown}
    output.result(data, "\n".join(lines))


def _book(
    folder: Path | None, model: ModelFile, choice: ModelChoice
) -> AbstractContextManager[AnswerBook | None]:
    """Where a killed run's answers are found again; nothing is kept without a folder."""
    if folder is None:
        return nullcontext()
    key = key_of(model.sha256(), versions()["llama-cpp-python"], choice.options.gpu_layers)
    return answers_until_kept(RunFolder.open(folder).path, key)


def suite_facts(name: str, results: Sequence[TaskResult]) -> dict[str, object]:
    """The JSON result of one model on one suite."""
    tools = any(result.category == "tool_calling" for result in results)
    return {
        "suite": name,
        "tasks": {result.name: result.summary() for result in results},
        "failures": {"tool_calling": failures_of(results)} if tools else {},
    }


def _run(
    choice: ModelChoice,
    model: ModelFile,
    tasks: TaskSuite,
    suite: SuiteChoice,
    book: AnswerBook | None,
    step: Callable[[int, int, str], None],
) -> list[TaskResult]:
    options = DecoderOptions(threads=choice.options.threads, gpu_layers=choice.options.gpu_layers)
    with Scorer(model, options, book=book) as scorer:
        paths = (*suite.calibration, *own_run(model))
        calibration = calibration_texts(paths, scorer.tokenizer)
        return run_suite(
            scorer,
            tasks,
            SuiteOptions(suite.data, Limits() if suite.execute_code else None, suite.limit),
            calibration=calibration,
            allow_overlap=suite.allow_overlap,
            progress=step,
        )


def _save(
    folder: Path,
    model: ModelFile,
    facts: Mapping[str, object],
    results: Sequence[TaskResult],
) -> None:
    opened = RunFolder.open(folder).path
    target = model.meta("bitwright.target")
    record = {
        **facts,
        "model": model.path.name,
        "model_sha256": model.sha256(),
        "size_bytes": model.size_bytes,
        "versions": versions(),
        **({} if target is None else {"target": str(target)}),
    }
    save_results(results, opened, record)


def _lines(results: Sequence[TaskResult]) -> list[str]:
    out = []
    for result in results:
        found = result.summary()
        value, se = found["value"], found["se"]
        number = "no data" if value is None else f"{value:.4f}"
        error = "" if se is None else f" ± {se:.4f}"
        chance = "" if result.chance is None else f", chance {result.chance:.3f}"
        notes = "".join(
            f", {name.replace('_', ' ')} {note:.3g}"
            for name, note in result.notes.items()
            if isinstance(note, float)
        )
        out.append(
            f"  {result.name:<16} {result.category:<13} {result.metric:<16} {number}{error}"
            f"  n {len(result.outcomes)}{chance}{notes}"
        )
    return out


def show_doctor(output: Output) -> None:
    """What executing code and lm-eval's tasks need, and whether it is here."""
    found = {"code": doctor(), "lm_eval": harness_checks(), "data": data_checks()}
    ready = all(check.ok for check in found["code"])
    lines = []
    for part, title in DOCTOR_PARTS.items():
        lines.append(title)
        lines += [
            f"  {'ok     ' if check.ok else 'missing'}  {check.what}"
            + ("" if check.ok else f": {check.advice}")
            for check in found[part]
        ]
    lines.append("code can be executed" if ready else "code cannot be executed here")
    facts = {
        part: [{"what": c.what, "ok": c.ok, "advice": "" if c.ok else c.advice} for c in checks]
        for part, checks in found.items()
    }
    output.result({"ready": ready, "checks": facts.pop("code"), **facts}, "\n".join(lines))
