"""Tasks of lm-eval on our model: from the hub, or offline from local files with the same rows."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ConfigError, InputError
from bitwright.eval.outcome import CORRECT, Outcome, TaskResult, ids_sha256
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSpec

SPLITS = ("train", "validation", "test")


def run_harness_task(
    scorer: Scorer, spec: TaskSpec, data: Path | None = None, limit: int = 0
) -> TaskResult:
    """One lm-eval task, sample by sample; its chat template is used where the model has one.

    `data`/FILE holds the evaluated split's rows; FILE with '.train' before the ending, if it is
    there, the rows that few-shot examples come from.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task file. InputError: no data.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{spec.name} needs lm-eval: pip install 'bitwright[eval]'")
    import lm_eval  # type: ignore[import-untyped]
    from lm_eval.tasks import TaskManager  # type: ignore[import-untyped]

    from bitwright.eval.harness import BitwrightLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="bitwright-") as folder:
        name = f"bitwright_{spec.name}"
        wrapper = Path(folder) / f"{name}.yaml"
        wrapper.write_text(json.dumps(_wrapper(spec, name, data)), encoding="utf-8")
        manager = TaskManager(include_path=folder, include_defaults=False)
        chat = scorer.template_style == "model"
        lm = BitwrightLM(scorer=scorer, max_gen_toks=spec.max_tokens)
        try:
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=[name],
                task_manager=manager,
                num_fewshot=spec.shots or None,
                limit=min(filter(None, (spec.limit, limit)), default=None),
                apply_chat_template=chat and spec.metric.startswith(("prompt", "exact")),
                bootstrap_iters=0,
                log_samples=True,
            )
        except ImportError as error:
            raise ConfigError(
                f"{spec.name}: this task of lm-eval needs {error.name}: pip install "
                f"'lm-eval[{spec.source_parts[1].partition('/')[0]}]'"
            ) from None
        except (OSError, ValueError, KeyError, LookupError) as error:
            raise InputError(f"{spec.name}: lm-eval could not run it: {error}") from None
    samples = found["samples"][name]
    outcomes = tuple(_outcome(scorer, spec, sample) for sample in _one_filter(samples, spec))
    notes: dict[str, float | str] = {
        "lm_eval": str(lm_eval.__version__),
        "cut_prompts": float(lm.n_cut),
    }
    return TaskResult(spec.name, spec.category, spec.metric, outcomes, spec.chance, notes)


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
                f"{spec.file} by --data"
            )
        return config
    rows = data / spec.file
    if not spec.file or not rows.is_file():
        raise InputError(f"{spec.name}: {data} holds no {spec.file}: put the rows there")
    files = {"test": str(rows)}
    examples = rows.with_name(f"{rows.stem}.train{rows.suffix}")
    if examples.is_file():
        files["train"] = str(examples)
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


def _one_filter(samples: list[dict[str, Any]], spec: TaskSpec) -> list[dict[str, Any]]:
    """Samples of the filter that a task names as 'metric@filter', or of the first one."""
    wanted = spec.metric.partition("@")[2] or (samples[0]["filter"] if samples else "")
    return [sample for sample in samples if sample["filter"] == wanted]


def _outcome(scorer: Scorer, spec: TaskSpec, sample: Mapping[str, Any]) -> Outcome:
    metric = spec.metric.partition("@")[0]
    if metric not in sample:
        raise ConfigError(
            f"{spec.name}: lm-eval gives {', '.join(sample['metrics'])}, not {metric!r}"
        )
    value = float(np.mean(sample[metric]))
    prompt = str(sample["arguments"][0][0])
    raw = sample["resps"][0][0]  # before any filter
    shown = raw if isinstance(raw, str) else json.dumps(sample["filtered_resps"])
    return Outcome(
        spec.name,
        str(sample["doc_id"]),
        ids_sha256(scorer.encode(prompt)),
        prompt,
        shown,
        str(sample["target"]),
        CORRECT if value == 1.0 else "wrong_answer",
        value,
    )
