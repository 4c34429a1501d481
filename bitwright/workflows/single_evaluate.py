"""Scores of files: distance from the reference on a corpus, tasks of a suite, comparisons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.corpora.leaks import corpus_texts
from bitwright.corpora.records import SPLITS
from bitwright.corpora.store import load_corpus
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.session import Session
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import ConfigError, InputError
from bitwright.eval.files import score_file
from bitwright.eval.flags import failures_of, flags_of
from bitwright.eval.outcome import TaskResult, load_results, save_results
from bitwright.eval.pairing import Difference, compare_results
from bitwright.eval.run_suite import SuiteOptions, run_suite
from bitwright.eval.sandbox import Limits, doctor, require_sandbox
from bitwright.eval.scorer import Scorer
from bitwright.eval.scores import scores_of
from bitwright.eval.suite import load_suite
from bitwright.eval.task_suite import TaskSuite, load_task_suite
from bitwright.report.wording import kld_text, share_text
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import METRICS_VERSION, RunFolder, key_of, versions
from bitwright.workflows.single import ModelChoice, fitting, matching_corpora, tell


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
    rows, text = [], []
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
                scores = scores_of(table, label, suite)
                rows.append({"label": label, "size_bytes": other.size_bytes, "scores": scores})
                text += [_score_line(label, c, s) for c, s in scores.items()]
    finally:
        reporter.close()
    facts = {"reference": model.path.name, "split": split, "files": rows}
    tell(output, model, facts, "\n".join(text))


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
            results = _run(choice, model, tasks, suite, reporter.step)
            facts = suite_facts(suite.name, results)
            flags = [flag for result in results for flag in flags_of(result)]
            if out is not None:
                folder = out if len(models) == 1 else out / model.path.stem
                _save(folder, model, facts, results, flags)
            shown[model.path.name] = facts
            lines += [f"{model.path.name}, suite {suite.name}", *_lines(results), *flags]
            for flag in flags if output.json else ():
                reporter.note(flag)
    finally:
        reporter.close()
    single = next(iter(shown.values()))
    data = single if len(shown) == 1 else {"suite": suite.name, "models": shown}
    output.result(data, "\n".join(lines))


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
    step: Callable[[int, int, str], None],
) -> list[TaskResult]:
    options = DecoderOptions(threads=choice.options.threads, gpu_layers=choice.options.gpu_layers)
    with Scorer(model, options) as scorer:
        calibration = calibration_texts(suite.calibration, scorer.tokenizer)
        return run_suite(
            scorer,
            tasks,
            SuiteOptions(suite.data, Limits() if suite.execute_code else None, suite.limit),
            calibration=calibration,
            allow_overlap=suite.allow_overlap,
            progress=step,
        )


def calibration_texts(paths: Sequence[Path], tokenizer: Tokenizer) -> dict[str, str]:
    """Name → text of what a file was calibrated on: text files, corpus folders, run folders.

    Raises:
        InputError: a path that holds none of these.
    """
    texts: dict[str, str] = {}
    for path in paths:
        if path.is_file():
            texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
            continue
        folders = [folder for folder in (path / "corpus", path) if folder.is_dir()]
        found = [folder for folder in folders if (folder / "corpus.json").is_file()]
        if not found:
            raise InputError(
                f"{path} is neither a text file nor a folder of `bitwright corpus`: give the text "
                "that the file was calibrated on"
            )
        for category, corpus in load_corpus(found[0]).items():
            # The report split is for scoring; everything else has shaped the file.
            used = tuple(chunk for chunk in corpus.chunks if chunk.split != "report")
            for name, text in corpus_texts(replace(corpus, chunks=used), tokenizer).items():
                texts[f"{category}/{name}"] = text
    return texts


def _save(
    folder: Path,
    model: ModelFile,
    facts: Mapping[str, object],
    results: Sequence[TaskResult],
    flags: Sequence[str],
) -> None:
    opened = RunFolder.open(folder).path
    record = {
        **facts,
        "model": model.path.name,
        "model_sha256": model.sha256(),
        "size_bytes": model.size_bytes,
        "versions": versions(),
        "flags": list(flags),
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


def compare(folders: Sequence[Path], output: Output) -> None:
    """Result folders against the first one, paired item by item."""
    if len(folders) < 2:
        raise ConfigError("compare needs two result folders or more; the first is the baseline")
    first, *others = [load_results(folder) for folder in folders]
    pages: list[dict[str, object]] = []
    lines: list[str] = []
    for folder, other in zip(folders[1:], others, strict=True):
        found = compare_results(first[0], other[0])
        pages.append(
            {
                "a": first[1].get("model", folders[0].name),
                "b": other[1].get("model", folder.name),
                "tasks": {name: d.as_dict() for name, d in found.items()},
            }
        )
        lines += [f"{pages[-1]['b']} against {pages[-1]['a']} (b - a):", *difference_lines(found)]
    data = pages[0] if len(pages) == 1 else {"comparisons": pages}
    output.result(data, "\n".join(lines))


def difference_lines(found: Mapping[str, Difference]) -> list[str]:
    """One line per task for a person to read."""
    return [
        f"  {name:<16} {d.category:<13} {d.difference:+.4f} [{d.low:+.4f}, {d.high:+.4f}]  "
        f"p {d.p:.3f}, Holm {d.p_holm:.3f}  n {d.n}  {d.verdict} (smallest visible "
        f"{d.smallest_visible:.4f})"
        for name, d in found.items()
    ]


def show_doctor(output: Output) -> None:
    """What executing code needs, and whether it is here."""
    checks = doctor()
    lines = [
        f"{'ok     ' if check.ok else 'missing'}  {check.what}"
        + ("" if check.ok else f": {check.advice}")
        for check in checks
    ]
    ready = all(check.ok for check in checks)
    lines.append("code can be executed" if ready else "code cannot be executed here")
    facts = [{"what": c.what, "ok": c.ok, "advice": "" if c.ok else c.advice} for c in checks]
    output.result({"ready": ready, "checks": facts}, "\n".join(lines))
