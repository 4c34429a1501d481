"""Tasks of lm-eval on our model: from the hub, or offline from local files with the same rows."""

import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ConfigError, InputError
from bitwright.eval.harness_needs import check_needs, make_repeatable
from bitwright.eval.items import halved, spread
from bitwright.eval.outcome import CORRECT, Outcome, TaskResult, ids_sha256
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import BY_DATA, TaskSpec

FEWSHOT_SEED = 1234  # lm-eval's own default
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class HarnessTask:
    """A task of lm-eval with its rows; ``task`` None where the given file has none.

    ``chosen``: which rows are asked, spread evenly over all of them.
    """

    spec: TaskSpec
    name: str
    task: Any
    chosen: tuple[int, ...]

    def texts(self) -> dict[str, str]:
        """Item → all texts of its row, for the overlap check."""
        if self.task is None:
            return {}
        docs = self.task.eval_docs
        return {str(i): "\n".join(_strings(docs[i])) for i in self.chosen}


def load_harness_task(spec: TaskSpec, data: Path | None = None, limit: int = 0) -> HarnessTask:
    """The task and its rows; nothing is asked yet.

    `data`/FILE holds the evaluated split's rows; FILE with '.train' before the ending, if it is
    there, the rows that few-shot examples come from.

    Raises:
        ConfigError: lm-eval is not installed, has no such task file, or the task needs more.
        InputError: no data, or rows that lm-eval cannot read.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{spec.name} needs lm-eval: pip install 'bitwright[eval]'")
    name = f"bitwright_{spec.name}"
    config = _wrapper(spec, name, data)
    if data is not None and not _has_rows(data / spec.file):
        return HarnessTask(spec, name, None, ())
    with _quiet(), tempfile.TemporaryDirectory(prefix="bitwright-") as folder:
        from datasets.exceptions import DatasetsError
        from jinja2 import TemplateError
        from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

        Path(folder, f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")
        try:
            manager = TaskManager(include_path=folder, include_defaults=False)
            task = manager.load([name])["tasks"][name]
            docs = task.eval_docs
            n = len(docs)
            _check_row(task, docs[0])
        except ImportError as error:
            raise ConfigError(
                f"{spec.name}: this task of lm-eval needs the package {error.name}: pip install "
                f"'lm-eval[{spec.source_parts[1].partition('/')[0]}]'"
            ) from None
        except (*_UNREADABLE, DatasetsError, TemplateError) as error:
            raise InputError(_unreadable(spec, data, error)) from None
    _set(task, spec)
    numbers = spread(halved(range(n), spec.half), min(filter(None, (spec.limit, limit)), default=0))
    check_needs(spec, [docs[i] for i in numbers])
    return HarnessTask(spec, name, task, tuple(numbers))


def run_harness_task(scorer: Scorer, loaded: HarnessTask) -> TaskResult:
    """Every chosen row, asked and judged by lm-eval's own code.

    A chat model is asked in its own chat template where answers are generated.

    Raises:
        InputError: lm-eval could not run it. ConfigError: it does not give the suite's metric.
    """
    import lm_eval  # type: ignore[import-untyped]
    from lm_eval.evaluator import evaluate  # type: ignore[import-untyped]

    from bitwright.eval.harness import BitwrightLM

    spec = loaded.spec
    lm = BitwrightLM(scorer=scorer, max_gen_toks=spec.max_tokens)
    samples: list[dict[str, Any]] = []
    if loaded.chosen:
        make_repeatable()
        generates = loaded.task.OUTPUT_TYPE == "generate_until"
        with _quiet():
            try:
                found = evaluate(
                    lm=lm,
                    task_dict={"tasks": {loaded.name: loaded.task}, "groups": {}, "group_map": {}},
                    samples={loaded.name: list(loaded.chosen)},
                    apply_chat_template=generates and scorer.template_style == "model",
                    fewshot_as_multiturn=True,
                    bootstrap_iters=0,
                )
            except (OSError, ValueError, KeyError, LookupError) as error:
                raise InputError(
                    f"{spec.name}: lm-eval could not run it: {_short(error)}"
                ) from None
        samples = found["samples"][loaded.name]
    outcomes = tuple(_outcome(scorer, lm, spec, sample) for sample in _one_filter(samples, spec))
    notes: dict[str, float | str] = {"lm_eval": str(lm_eval.__version__)}
    if lm.n_cut:
        notes["cut_prompts"] = float(lm.n_cut)
    first = tuple(scorer.encode(outcomes[0].prompt).tolist()) if outcomes else ()
    return TaskResult(
        spec.name, spec.category, spec.metric, outcomes, spec.chance, notes, first, spec.settings()
    )


def _set(task: Any, spec: TaskSpec) -> None:
    """The suite's own token limit, stop strings and examples over the task's."""
    if task.OUTPUT_TYPE == "generate_until":
        kwargs: dict[str, object] = {"max_gen_toks": spec.max_tokens}
        if spec.stops:
            kwargs["until"] = list(spec.stops)
        task.set_config(key="generation_kwargs", value=kwargs, update=True)
    task.set_config(key="num_fewshot", value=spec.shots)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval and what it loads print to stdout; that is kept for our result."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with redirect_stdout(sys.stderr):
        yield


def _wrapper(spec: TaskSpec, name: str, data: Path | None) -> dict[str, Any]:
    """A task config that includes lm-eval's own and points it at local rows (JSON is YAML)."""
    found = find_spec("lm_eval")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "tasks" / spec.source_parts[1]
    if not path.is_file():
        raise ConfigError(f"{spec.name}: lm-eval has no tasks/{spec.source_parts[1]}")
    config: dict[str, Any] = {"include": str(path), "task": name}
    if data is None:
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            raise InputError(
                f"{spec.name} comes from the hub and HF_HUB_OFFLINE is set: give a folder with "
                f"{spec.file} {BY_DATA}"
            )
        return config
    rows = data / spec.file
    if not spec.file or not rows.is_file():
        raise InputError(f"{spec.name}: {data} holds no {spec.file}: put the rows there")
    files = {"test": str(rows)}
    examples = rows.with_name(f"{rows.stem}.train{rows.suffix}")
    if examples.is_file():
        files["train"] = str(examples)
    elif spec.shots:
        raise InputError(
            f"{spec.name}: its {spec.shots} examples come from {examples.name}, which {data} does "
            "not hold: put the hub's training rows there, or set shots = 0"
        )
    return {
        **config,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
        "training_split": "train" if "train" in files else None,
        "fewshot_split": "train" if "train" in files else None,
        "validation_split": None,
        "test_split": "test",
    }


def _has_rows(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return any(line.strip() for line in file)


def _strings(value: object) -> list[str]:
    """Every text of a row, in order, also inside lists and objects."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for one in value for text in _strings(one)] if isinstance(value, list) else []


def _check_row(task: Any, doc: Mapping[str, Any]) -> None:
    """Columns that are not there show themselves here, by lm-eval's own errors."""
    task.doc_to_text(doc)
    task.doc_to_target(doc)
    if task.OUTPUT_TYPE == "multiple_choice":
        task.doc_to_choice(doc)


def _one_filter(samples: list[dict[str, Any]], spec: TaskSpec) -> list[dict[str, Any]]:
    """Samples of the filter that a task names as 'metric@filter', or of the first one."""
    wanted = spec.metric.partition("@")[2] or (samples[0]["filter"] if samples else "")
    return [sample for sample in samples if sample["filter"] == wanted]


def _outcome(scorer: Scorer, lm: Any, spec: TaskSpec, sample: Mapping[str, Any]) -> Outcome:
    metric = spec.metric.partition("@")[0]
    if metric not in sample:
        raise ConfigError(
            f"{spec.name}: lm-eval gives {', '.join(sample['metrics'])}, not {metric!r}"
        )
    value = float(np.mean(sample[metric]))
    prompt = str(sample["arguments"][0][0])
    raw = sample["resps"][0][0]  # before any filter
    shown = raw if isinstance(raw, str) else json.dumps(sample["filtered_resps"])
    wrong = "truncated" if prompt in lm.truncated else _kind_of_wrong(raw, sample)
    return Outcome(
        spec.name,
        str(sample["doc_id"]),
        ids_sha256(scorer.encode(prompt)),
        prompt,
        shown,
        str(sample["target"]),
        CORRECT if value == 1.0 else wrong,
        value,
        truncated=prompt in lm.truncated,
    )


def _kind_of_wrong(raw: object, sample: Mapping[str, Any]) -> str:
    """`empty`: nothing was said; `unparsable`: lm-eval's filter found no answer in it."""
    if not isinstance(raw, str):
        return "wrong_answer"
    if not raw.strip():
        return "empty"
    return "unparsable" if sample["filtered_resps"] == ["[invalid]"] else "wrong_answer"


def _unreadable(spec: TaskSpec, data: Path | None, error: BaseException) -> str:
    if data is None:
        return (
            f"{spec.name} cannot be loaded from the hub ({_short(error)}): give a folder with "
            f"{spec.file} {BY_DATA}"
        )
    return (
        f"{spec.name}: lm-eval cannot read the rows of {spec.file} ({_short(error)}): give rows "
        "with the columns of the hub's data set"
    )


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
