"""The command line called in this process, and what a small run needs."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bitwright import cli

# Two categories, 128 tokens a chunk: every stage of a tiny model ends within a second.
WORKFLOW = """
schema = 1
target = "{target}"
budget = "{budget}"
baseline = "{baseline}"
rivals = ["IQ3_S"]
seed = 1
corpora = {{ code = "{code}", general = "{general}" }}

[imatrix]
general = {{ general = 1.0 }}
task = {{ code = 0.7, general = 0.3 }}

[chunks]
calibrate = 2
probe = 1
select = 8
report = 4

[search]
rounds = 1

[engine]
n_ctx = 128
working_type = "file"
"""

RECIPE = """
category = "{category}"
context = 8
on_leak = "drop"

[[sources]]
kind = "{kind}"
path = "{path}"
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout, as strict JSON."""
        return strict_json(self.out.splitlines()[-1])

    def refusal(self) -> str:
        """The one line of a refusal; fails if it is anything else."""
        lines = self.err.splitlines()
        assert self.code == 1, self
        assert self.out == "", self
        assert len(lines) == 1, self.err
        assert lines[0].startswith("bitwright: "), lines
        return lines[0]


def strict_json(text: str) -> dict[str, Any]:
    """Parse JSON that holds no NaN or Infinity."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    loaded = json.loads(text, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


def bitwright(*arguments: str | Path) -> Ran:
    """Call the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    code = 0
    with (
        patch.object(sys, "argv", ["bitwright", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        finally:
            signal.signal(signal.SIGINT, handler)
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def started(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command line as a process of its own; it is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bitwright.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write_workflow(
    folder: Path,
    *,
    target: str = "code",
    budget: str = "Q3_K_S + 2 %",
    baseline: str = "Q3_K_S",
    code: str = "code",
    general: str = "general",
    name: str = "small.toml",
) -> Path:
    """A workflow file of two categories in the folder."""
    path = folder / name
    text = WORKFLOW.format(
        target=target, budget=budget, baseline=baseline, code=code, general=general
    )
    path.write_text(text, encoding="utf-8")
    return path


def write_recipe(folder: Path, category: str, path: str, kind: str = "text") -> Path:
    """A recipe of one source in the folder."""
    recipe = folder / f"{category}.toml"
    text = RECIPE.format(category=category, path=path, kind=kind)
    recipe.write_text(text, encoding="utf-8")
    return recipe


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file under a folder with its size and modification time."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
