"""Sweeps and builds killed in the middle of each kind of work end as if nothing had happened."""

import hashlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.support import bitwright, started
from tests.workflows.test_sizes import write_sizes

WAIT_S = 120.0


def holds(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


# What shows that a run is in the middle of something.
SWEEP = [
    holds("sweep/tokens/*.npz"),
    holds("items/reference.json"),
    holds("items/files/.*.tmp"),
    holds("explain/tokens/*.npz"),
]
BUILDS = [
    holds("ladders/tokens/*.npz"),
    holds("joint/*.json"),
    holds("items-2/reference.json"),
    holds("quantize-Bedrock.json"),
]


def killed(moment: Callable[[Path], bool], folder: Path, arguments: list[str]) -> bool:
    """Run until the moment, then SIGKILL; False where the run had ended before."""
    with started(*arguments) as process:
        deadline = time.monotonic() + WAIT_S
        while process.poll() is None and not moment(folder):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


def told(result: dict[str, Any]) -> dict[str, Any]:
    """The result without the place of the run folder."""
    builds = [
        {k: v for k, v in one.items() if k not in ("path", "layout")}
        for one in result.get("variants", ())
    ]
    return {**result, "variants": builds}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moments"), [("sweep", SWEEP), ("variants", BUILDS)])
def test_killed_anywhere_the_same_command_ends_with_the_same_result(
    kind: str, moments: list[Callable[[Path], bool]], tmp_path: Path, tiny_model: Path
) -> None:
    workflow = write_sizes(tmp_path, kind)
    command = ["run", str(workflow), "--model", str(tiny_model), "--threads", "1", "--json"]
    whole = bitwright(*command, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    folder = tmp_path / "killed"
    n_killed = sum(killed(m, folder, [*command, "--out", str(folder)]) for m in moments)
    assert n_killed >= len(moments) - 1, "the run ended before it could be killed"
    last = bitwright(*command, "--out", folder)
    assert last.code == 0, last.err
    assert told(last.json) == told(whole.json)
    assert sums(folder) == sums(tmp_path / "whole")
    assert not list(folder.rglob(".*.tmp")), "leftovers of the killed runs"
    assert not list(folder.glob("*/files/*.gguf"))


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.gguf")}
