"""lm-eval on our model, offline: item by item against whole-sequence logits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bitwright
from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.engine.session import Session, SessionOptions
from bitwright.errors import ConfigError, InputError
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import TaskSpec
from tests.eval.hub_rows import ARC as ARC_ROWS
from tests.eval.hub_rows import write_lines

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")
ARC = {
    "id": "1",
    "question": "What color is the sky?",
    "choices": {"text": ["blue", "red", "very green", "white"], "label": ["A", "B", "C", "D"]},
    "answerKey": "A",
}


@pytest.fixture(scope="module")
def scorer():
    with Scorer(open_model("demo"), DecoderOptions(threads=1, slots=2)) as made:
        yield made


def instance(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, ("t", 0, 1))


def test_scores_and_greediness_agree_with_independent_logits(scorer):
    from bitwright.eval.harness import BitwrightLM

    lm = BitwrightLM(scorer=scorer)
    pairs = [("Question: sky?\nAnswer:", f" {c}") for c in ARC["choices"]["text"]]
    pairs += [("", "Hello there"), ("def f(x): ", "return x"), ("a b c", "\n")]
    found = lm.loglikelihood([instance("loglikelihood", *p) for p in pairs], disable_tqdm=True)
    options = SessionOptions(threads=1, working_type="file", flash_attn=False)
    with Session(open_model("demo"), options) as session:
        for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
            head = scorer.encode(context) if context.strip() else scorer.encode("")
            whole = scorer.encode(context + continuation)
            n = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), None)
            kept = scorer.encode(context.rstrip()) if n is None else head[:n]
            logits = session.logits(whole, [0], np.arange(len(whole))).astype(np.float64)
            logits -= np.logaddexp.reduce(logits, axis=1, keepdims=True)
            rows = np.arange(len(kept) - 1, len(whole) - 1)
            assert value == pytest.approx(float(logits[rows, whole[rows + 1]].sum()), abs=1e-4)
            assert greedy == bool((logits[rows].argmax(1) == whole[rows + 1]).all())


def test_rolling_and_generation(scorer):
    from bitwright.eval.harness import BitwrightLM

    lm = BitwrightLM(scorer=scorer)
    (value,) = lm.loglikelihood_rolling([instance("loglikelihood_rolling", "Hello there.")])
    (score,) = scorer.score([(scorer.encode("")[:1], scorer.encode("Hello there.")[1:])])
    assert value == pytest.approx(score.logprob)
    chat = lm.apply_chat_template([{"role": "user", "content": "What is 3 + 4?"}])
    greedy = {"until": ["####"], "max_gen_toks": 20}
    (text,) = lm.generate_until([instance("generate_until", chat, greedy)])
    assert text == "3 + 4 = 7\n"
    drawn = {"do_sample": True, "temperature": 2.0, "max_gen_toks": 8, "until": []}
    request = instance("generate_until", chat, drawn)
    assert lm.generate_until([request]) == lm.generate_until([request])


def test_what_is_too_long_is_counted_or_refused(scorer):
    from bitwright.eval.harness import BitwrightLM

    lm = BitwrightLM(scorer=scorer)
    long = "word " * 700
    lm.loglikelihood([instance("loglikelihood", long, " end")], disable_tqdm=True)
    assert lm.n_cut == 1
    lm = BitwrightLM(scorer=scorer, too_long="refuse")
    with pytest.raises(InputError, match="larger n_ctx"):
        lm.loglikelihood([instance("loglikelihood", long, " end")], disable_tqdm=True)
    with pytest.raises(ConfigError, match="knows no colour"):
        BitwrightLM(scorer=scorer, colour="blue")


def test_a_stock_task_on_local_rows(scorer, tmp_path):
    from bitwright.eval.harness_tasks import load_harness_task, run_harness_task

    (tmp_path / "arc.jsonl").write_text(json.dumps(ARC) + "\n" + json.dumps(ARC) + "\n")
    spec = TaskSpec(
        name="arc_easy",
        category="general",
        method="lm_eval",
        source="lm_eval:arc/arc_easy.yaml",
        file="arc.jsonl",
        metric="acc",
        chance=0.25,
    )
    result = run_harness_task(scorer, load_harness_task(spec, tmp_path))
    assert result.summary()["n"] == 2
    assert result.outcomes[0].prompt.startswith("Question: What color")
    with pytest.raises(InputError, match="holds no"):
        load_harness_task(spec.model_copy(update={"file": "none.jsonl"}), tmp_path)
    with pytest.raises(ConfigError, match="has no tasks/"):
        load_harness_task(spec.model_copy(update={"source": "lm_eval:no.yaml"}), tmp_path)


def test_lm_eval_knows_the_model_by_name_without_an_import():
    package = Path(bitwright.__file__).parent
    program = (
        f"import site; site.addsitedir({str(package / 'eval')!r})\n"
        "from lm_eval.api.registry import get_model, model_registry\n"
        "print(get_model('bitwright').__name__, 'hf' in model_registry)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env
    )
    assert done.stdout.split() == ["BitwrightLM", "True"], done.stderr


@pytest.mark.slow
def test_the_command_line_of_lm_eval_runs_on_a_gguf(scorer, tmp_path):
    """`lm_eval --model bitwright --model_args path=…` gives what our suites give."""
    from bitwright.eval.harness_tasks import load_harness_task, run_harness_task

    write_lines(tmp_path / "arc.jsonl", ARC_ROWS)
    task = {
        "include": "arc/arc_easy.yaml",
        "task": "ours_arc",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "arc.jsonl")}},
        "training_split": None,
        "fewshot_split": None,
        "validation_split": None,
    }
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    task["include"] = str(folder / task["include"])
    (tmp_path / "ours_arc.yaml").write_text(json.dumps(task))
    package = Path(bitwright.__file__).parent
    program = (
        f"import site; site.addsitedir({str(package / 'eval')!r})\n"
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    )
    line = [sys.executable, "-c", program, "run", "--model", "bitwright"]
    line += ["--model_args", f"path={open_model('demo').path},threads=1", "--tasks", "ours_arc"]
    line += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    line += ["--log_samples"]
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (kept,) = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(text) for text in kept.read_text().splitlines()]
    spec = TaskSpec(
        name="arc",
        category="general",
        method="lm_eval",
        source="lm_eval:arc/arc_easy.yaml",
        file="arc.jsonl",
        metric="acc",
    )
    own = run_harness_task(scorer, load_harness_task(spec, tmp_path))
    assert [s["acc"] for s in sorted(samples, key=lambda s: s["doc_id"])] == [
        outcome.value for outcome in own.outcomes
    ]
