"""Same seed, same file; killed in every stage, still the same file, and nothing is done twice."""

import hashlib
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright, listing, started

WAIT_S = 120.0


def sha256_of(folder: Path) -> str:
    (path,) = folder.glob("*.gguf")
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Lines:
    """The lines that a process writes to stderr, while it runs."""

    def __init__(self, process: Popen[bytes]) -> None:
        self.text = ""
        assert process.stderr is not None
        self._stream = os.fdopen(os.dup(process.stderr.fileno()), "rb", buffering=0)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream:
            while data := self._stream.read(4096):
                self.text += data.decode()

    def join(self) -> None:
        self._thread.join(WAIT_S)


def rows_in(ledger: Path) -> int:
    if not ledger.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=0.1) as db:
            count = int(db.execute("SELECT count(*) FROM probes").fetchone()[0])
        db.close()
    except sqlite3.Error:
        return 0
    return count


# Stage → what shows that it is in the middle of its work (folder, stderr so far).
MOMENTS: dict[str, Callable[[Path, str], bool]] = {
    "corpus": lambda folder, err: "[corpus]" in err,
    "imatrix": lambda folder, err: (folder / "imatrix-code.json").exists(),
    "damage": lambda folder, err: rows_in(folder / "damage" / "ledger.sqlite") > 2,
    "errors": lambda folder, err: "[errors]" in err,
    "search": lambda folder, err: any((folder / "select").glob("joint-*.jsonl")),
    "select": lambda folder, err: any((folder / "select" / "tokens").glob("*.npz")),
    "report": lambda folder, err: any((folder / "report" / "tokens").glob("*.npz")),
    "quantize": lambda folder, err: "[quantize]" in err,
    "last": lambda folder, err: (folder / "evaluate.json").exists(),
}
# The manifest that a stage leaves when it ends.
ENDS = {
    "corpus": "corpus.json",
    "imatrix": "imatrix.json",
    "damage": "damage.json",
    "errors": "errors.json",
    "select": "select.json",
    "report": "report-scores.json",
    "quantize": "quantize.json",
}


def kill_in(stage: str, folder: Path, arguments: list[str]) -> bool:
    """Run until the stage is in the middle of its work, then SIGKILL; False if it ended before."""
    with started(*arguments) as process:
        lines = Lines(process)
        deadline = time.monotonic() + WAIT_S
        while process.poll() is None and not MOMENTS[stage](folder, lines.text):
            assert time.monotonic() < deadline, lines.text
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        killed = process.wait() == -signal.SIGKILL
        lines.join()
        return killed


@pytest.fixture(scope="module")
def arguments(finished: Finished) -> Callable[[Path], list[str]]:
    def made(folder: Path) -> list[str]:
        model, workflow = str(finished.model), str(finished.workflow)
        return ["run", workflow, "--model", model, "--out", str(folder), "--threads", "1"]

    return made


def test_killed_in_every_stage_the_same_command_ends_with_the_same_file(
    finished: Finished, arguments: Callable[[Path], list[str]], tmp_path: Path
):
    folder = tmp_path / "killed"
    ended: dict[str, bytes] = {}
    for stage in MOMENTS:
        assert kill_in(stage, folder, arguments(folder)), f"{stage} had ended before the kill"
        if stage in ENDS:
            assert not (folder / ENDS[stage]).exists(), f"killed too late for {stage}"
            assert not list(folder.glob("*.gguf"))
        for name, content in ended.items():
            assert (folder / name).read_bytes() == content, f"{name} was computed again"
        done = [name for name in ENDS.values() if (folder / name).exists()]
        ended = {name: (folder / name).read_bytes() for name in done}
    assert set(ENDS.values()) == ended.keys()
    last = bitwright(*arguments(folder), "--json")
    assert last.code == 0, last.err
    assert sha256_of(folder) == sha256_of(finished.folder)
    assert {n: (folder / n).read_bytes() for n in ended} == ended
    assert [e["scores"] for e in last.json["files"]] == [
        e["scores"] for e in finished.ran.json["files"]
    ]
    assert not list(folder.rglob(".*.tmp")), "leftovers of the killed runs"


def test_a_finished_run_is_not_computed_again(
    finished: Finished, arguments: Callable[[Path], list[str]], tmp_path: Path
):
    folder = tmp_path / "again"
    shutil.copytree(finished.folder, folder)
    before = listing(folder)
    again = bitwright(*arguments(folder), "--json")
    assert again.code == 0, again.err
    assert again.json["files"] != []
    after = listing(folder)
    written = {name for name in after if after[name] != before.get(name)}
    # Cheap to write, and never computed on.
    assert written <= {"README.md", "report.html", "layout.txt", "result.json"}


def test_the_same_seed_in_another_folder_with_a_copied_workflow_gives_the_same_file(
    finished: Finished, arguments: Callable[[Path], list[str]], tmp_path: Path
):
    (tmp_path / "copy").mkdir()
    workflow = tmp_path / "copy" / finished.workflow.name
    workflow.write_bytes(finished.workflow.read_bytes() + b"\n# another comment\n")
    model = tmp_path / "copy" / finished.model.name
    model.write_bytes(finished.model.read_bytes())
    out = tmp_path / "second"
    ran = bitwright("run", workflow, "--model", model, "--out", out, "--threads", "2", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["model"] == model.name
    assert sha256_of(out) == sha256_of(finished.folder)


def test_a_second_budget_costs_no_new_probes(
    finished: Finished, arguments: Callable[[Path], list[str]], tmp_path: Path
):
    folder = tmp_path / "larger"
    shutil.copytree(finished.folder, folder)
    names = ("corpus.json", "imatrix.json", "damage.json")
    before = {name: (folder / name).read_bytes() for name in names}
    ran = bitwright(*arguments(folder), "--budget", "5.5 bpw", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["budget_bytes"] > finished.ran.json["budget_bytes"]
    assert {name: (folder / name).read_bytes() for name in names} == before


def test_damaged_results_in_the_run_folder_are_computed_again(
    finished: Finished, arguments: Callable[[Path], list[str]], tmp_path: Path
):
    folder = tmp_path / "damaged"
    shutil.copytree(finished.folder, folder)
    (gguf,) = folder.glob("*.gguf")
    gguf.write_bytes(gguf.read_bytes()[:1000])
    (folder / "errors.json").write_text("{", encoding="utf-8")
    (folder / "damage" / "damage_map.parquet").unlink(missing_ok=True)
    ran = bitwright(*arguments(folder), "--json")
    assert ran.code == 0, ran.err
    assert sha256_of(folder) == sha256_of(finished.folder)
