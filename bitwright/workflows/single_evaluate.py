"""Files against their model on a corpus: KLD, top-1, perplexity, token by token."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitwright.corpora.records import SPLITS
from bitwright.engine.atomic import write_atomic
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.session import Session, SessionOptions
from bitwright.errors import ConfigError
from bitwright.eval.divergence import Chunks, ScoreTable, document_ids
from bitwright.eval.files import score_file
from bitwright.eval.scores import scores_of
from bitwright.eval.suite import load_suite
from bitwright.eval.tokens import save_tables
from bitwright.report.wording import kld_text, share_text
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
    distinct_names(files)
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


def distinct_names(files: Sequence[Path]) -> None:
    """Raise ConfigError where two files could not be told apart by name."""
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
