"""The ledger keeps what was finished, apart by key, through kills and damage."""

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from bitwright.damage.ledger import Ledger, ProbeId, Sums, chunk_id
from bitwright.errors import StorageError
from tests.eval.fakes import make_chunk

PROBE = ProbeId("blk.0.attn_q.weight", "Q2_K", "c0", "code")
SPANS = {"scored": Sums(3, 0.1 + 0.2, 1e-17, 1), "overall": Sums(5, -1e-9, 0.5, 0)}


def test_sums_come_back_bit_for_bit(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite", "key") as ledger:
        ledger.record(PROBE, SPANS)
    with Ledger(tmp_path / "l.sqlite", "key") as ledger:
        assert ledger.probes("c0", "code") == {(PROBE.tensor, PROBE.type): SPANS}
        assert ledger.probes("c0", "math") == {}
        assert ledger.probes("c1", "code") == {}


def test_another_key_sees_nothing_and_removes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    with Ledger(path, "a") as ledger:
        ledger.record(PROBE, SPANS)
    with Ledger(path, "b") as ledger:
        assert ledger.probes("c0", "code") == {}
        ledger.record(PROBE, {"overall": Sums(1, 9.0, 81.0, 1)})
    with Ledger(path, "a") as ledger:
        assert ledger.probes("c0", "code") == {(PROBE.tensor, PROBE.type): SPANS}


def test_a_probe_measured_twice_counts_once(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite", "a") as ledger:
        ledger.record(PROBE, SPANS)
        ledger.record(PROBE, SPANS)
        assert len(ledger.probes("c0", "code")) == 1


def test_a_transaction_that_did_not_end_leaves_no_row(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    broken = dataclasses.replace(SPANS["overall"], sum_kld=float("nan"))
    spans = {"scored": SPANS["scored"], "overall": broken}
    with Ledger(path, "a") as ledger, pytest.raises(StorageError, match="NOT NULL"):
        ledger.record(PROBE, spans)
    with Ledger(path, "a") as ledger:
        assert ledger.probes("c0", "code") == {}


def test_files_that_are_no_ledger_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match="remove it to measure again"):
        Ledger(path, "a")
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StorageError, match="version 99"):
        Ledger(path, "a")
    with pytest.raises(StorageError, match="does not exist"):
        Ledger(tmp_path / "nowhere" / "l.sqlite", "a")


def test_a_chunk_is_named_by_tokens_borders_and_spans() -> None:
    chunk = make_chunk("code", 0, ["a", "b"])
    moved = dataclasses.replace(chunk, index=7, category="math", documents=("c", "d"))
    assert chunk_id(chunk) == chunk_id(moved)
    tokens = chunk.tokens.copy()
    tokens[3] += 1
    others = [
        dataclasses.replace(chunk, tokens=tokens),
        dataclasses.replace(chunk, starts=(0, 11)),
        dataclasses.replace(chunk, kinds=np.full_like(chunk.kinds, 1)),
    ]
    assert len({chunk_id(c) for c in (chunk, *others)}) == 4
