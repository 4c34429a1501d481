"""Files on the tasks of a suite, item by item, and what those tasks need of this machine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.errors import ConfigError
from bitwright.eval.answer_book import AnswerBook, answers_until_kept
from bitwright.eval.flags import failures_of, flags_of
from bitwright.eval.harness_needs import data_checks, harness_checks
from bitwright.eval.outcome import TaskResult, save_results
from bitwright.eval.run_suite import SuiteOptions, run_suite
from bitwright.eval.sandbox import Limits, doctor, require_sandbox
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSuite, load_task_suite
from bitwright.eval.together import GENERATED
from bitwright.eval.tool_formats import FORMS
from bitwright.workflows.calibration import calibration_texts, own_run
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import (
    RunFolder,
    key_of,
    versions,
)
from bitwright.workflows.single import ModelChoice
from bitwright.workflows.single_evaluate import distinct_names

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
    call_form: str = ""


def evaluate_suite(
    choice: ModelChoice, files: Sequence[Path], suite: SuiteChoice, out: Path | None, output: Output
) -> None:
    """Tasks of a suite on the files, or on the model itself when no files are given.

    One model prints the suite's result; several print one result per file name.
    """
    specs: list[str | Path] = [*files] or [choice.spec]
    if not specs[0]:
        raise ConfigError("nothing to evaluate: give --model, or quantized files")
    distinct_names(files)
    tasks = _read_as(load_task_suite(suite.name), suite.call_form)
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


def _read_as(suite: TaskSuite, form: str) -> TaskSuite:
    """The suite with the given form of tool calls, if one is given."""
    if not form:
        return suite
    if form not in FORMS:
        raise ConfigError(f"--call-form {form} is not known: give one of {', '.join(FORMS)}")
    tasks = [
        t.model_copy(update={"form": form}) if t.method in GENERATED else t for t in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tuple(tasks)})


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
