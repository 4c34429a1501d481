"""The study: few variables, deterministic, resumable, never two spaces in one."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from bitwright.allocator import study as study_module
from bitwright.allocator.steering import Steering
from bitwright.allocator.study import (
    Measured,
    Settings,
    Variable,
    close_own,
    close_stale,
    make_space,
    open_storage,
    point_of,
    run_study,
    steering_of,
)
from bitwright.errors import ConfigError, StorageError
from tests.allocator.tables import table
from tests.allocator.test_steering import options as options  # the fixture

SPACE = (Variable("a", -1, 1, 0), Variable("b", 0, 2, 1))

CHILD = """
import sys, time
from bitwright.allocator.study import Measured, Settings, Variable, run_study
SPACE = (Variable("a", -1, 1, 0), Variable("b", 0, 2, 1))
def measure(types, params, report):
    a, b = float(types["a"]), float(types["b"])
    value = (a - 0.3) ** 2 + (b - 1.2) ** 2
    report(1, value)
    print("measuring", flush=True)
    time.sleep(float(sys.argv[3]))
    return Measured((value,), pruned=value > 1.0)
solve = lambda p: {k: repr(v) for k, v in p.items()}
found = run_study(Settings(int(sys.argv[2]), 0, 7, sys.argv[1]), SPACE, "f" * 20,
                  [{"a": 0.0, "b": 1.0}], solve, measure)
for t in found.trials:
    print(repr((dict(t.params), t.values, t.pruned)))
"""


def solve(params):
    return {name: repr(value) for name, value in params.items()}


def measure(types, params, report):
    a, b = float(types["a"]), float(types["b"])
    value = (a - 0.3) ** 2 + (b - 1.2) ** 2
    report(1, value)
    return Measured((value,), pruned=value > 1.0)


def run(path, trials=12, seed=7, fingerprint="f" * 20, space=SPACE, **kwargs):
    settings = Settings(trials, 0.0, seed, str(path), **kwargs)
    return run_study(settings, space, fingerprint, [{v.name: v.neutral for v in space}], solve,
                     measure)  # fmt: skip


def seen(result):
    return [(dict(t.params), t.values, t.pruned) for t in result.trials]


def test_the_same_seed_gives_the_same_trials(tmp_path):
    first, second = run(tmp_path / "1.log"), run(tmp_path / "2.log")
    assert seen(first) == seen(second)
    assert len(first.trials) == 12
    assert seen(run(tmp_path / "3.log", seed=8)) != seen(first)


def test_the_first_trial_is_the_default(tmp_path):
    assert dict(run(tmp_path / "s.log", trials=1).trials[0].params) == {"a": 0.0, "b": 1.0}


def test_a_study_in_two_parts_equals_one_that_ran_through(tmp_path):
    run(tmp_path / "1.log", trials=5)
    assert seen(run(tmp_path / "1.log", trials=12)) == seen(run(tmp_path / "2.log", trials=12))


def test_killed_in_mid_trial_it_ends_with_the_same_result(tmp_path):
    straight = run(tmp_path / "straight.log", trials=9)
    path = tmp_path / "killed.log"
    command = [sys.executable, "-c", CHILD, str(path), "9"]
    with subprocess.Popen([*command, "0.4"], stdout=subprocess.PIPE, text=True) as child:
        for _ in range(4):  # in the fourth trial
            assert child.stdout is not None
            child.stdout.readline()
        time.sleep(0.1)
        child.send_signal(signal.SIGKILL)
    states = optuna.load_study(study_name=None, storage=open_storage(str(path))).trials
    assert [t.state for t in states].count(TrialState.RUNNING) == 1
    resumed = run(path, trials=9)
    assert seen(resumed) == seen(straight)
    assert any("killed run" in note for note in resumed.notes)
    after = optuna.load_study(study_name=None, storage=open_storage(str(path))).trials
    assert not [t for t in after if t.state == TrialState.RUNNING]


@pytest.mark.slow
def test_hash_seeds_change_nothing(tmp_path):
    found = []
    for seed in ("0", "1"):
        found.append(
            subprocess.run(
                [sys.executable, "-c", CHILD, str(tmp_path / f"{seed}.log"), "6", "0"],
                env={**os.environ, "PYTHONHASHSEED": seed},
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
    assert found[0] == found[1]


def test_another_space_is_another_study_that_starts_from_the_best(tmp_path):
    path = tmp_path / "s.log"
    first = run(path)
    best = min((t for t in first.trials if not t.pruned), key=lambda t: t.values)
    wider = (*SPACE, Variable("c", 0, 1, 0.5))

    def measure_only_known(types, params, report):
        return measure(types, params, report)

    settings = Settings(3, 0.0, 7, str(path))
    second = run_study(settings, wider, "g" * 20, [], solve, measure_only_known)
    assert second.name != first.name
    assert len(second.trials) == 3
    assert "new one begins" in second.notes[0]
    assert dict(second.trials[0].params) == {**best.params, "c": 0.5}
    assert seen(run(path)) == seen(first)  # the old one is as it was


def test_an_interrupted_trial_is_closed(tmp_path):
    def interrupt(types, params, report):
        raise KeyboardInterrupt

    settings = Settings(3, 0.0, 7, str(tmp_path / "s.log"))
    with pytest.raises(KeyboardInterrupt):
        run_study(settings, SPACE, "f" * 20, [], solve, interrupt)
    trials = optuna.load_study(
        study_name=None, storage=open_storage(str(tmp_path / "s.log"))
    ).trials
    assert [t.state for t in trials] == [TrialState.FAIL]


def test_pareto_gives_a_front(tmp_path):
    def two(types, params, report):
        a, b = float(types["a"]), float(types["b"])
        return Measured((a * a, (a - 0.5) ** 2 + b, b))

    settings = Settings(15, 0.0, 1, str(tmp_path / "p.log"), pareto=True)
    found = run_study(settings, SPACE, "f" * 20, [], solve, two)
    assert 1 <= len(found.front) <= 15
    for one in found.front:
        assert not any(
            all(x < y for x, y in zip(o.values, one.values, strict=True)) for o in found.trials
        )


def test_what_cannot_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither trials nor minutes"):
        run(tmp_path / "s.log", trials=0)
    with pytest.raises(ConfigError, match="cannot be opened"):
        run("nosuch://host/db")


def test_the_space_has_5_to_15_variables_and_points_are_steerings(options):
    space = make_space(table(options), "code")
    assert 5 <= len(space) <= 15
    assert {v.name for v in make_space(table(options), "code", pareto=True)} - {
        v.name for v in space
    } == {"size"}
    neutral = {v.name: v.neutral for v in space}
    found = steering_of(neutral)
    assert all(v == 0 for v in found.roles.values())
    assert (found.slope, found.curve, found.exponent, found.general) == (0, 0, 1, 0)
    mixed = make_space(table(options), "code", pareto=True, mix=0.7)
    assert len(mixed) == len(space) + 2 <= 15
    assert next(v for v in mixed if v.name == "mix") == Variable("mix", 0.0, 1.0, 0.7)
    point = point_of(Steering({"attn_q": 0.5}, slope=9.0), space)
    assert point["slope"] == 0.7  # held within the space
    assert point.keys() == neutral.keys()


def test_overhead_of_a_trial_is_small(tmp_path):
    started = time.process_time()
    run(tmp_path / "s.log", trials=30)
    assert (time.process_time() - started) / 30 < 1.0


def test_a_journal_lies_where_it_should(tmp_path):
    run(tmp_path / "deep" / "s.log", trials=1)
    assert Path(tmp_path / "deep" / "s.log").is_file()


class Lock:
    """Another worker that holds an SQLite storage for itself, from within a trial."""

    def __init__(self, path):
        self.path, self.held = path, None

    def measure(self, types, params, report):
        found = measure(types, params, report)
        if self.held is None and found.values[0] > 0:
            self.hold()
            self.on_held()
        return found

    def hold(self):
        self.held = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self.held.execute("BEGIN EXCLUSIVE")

    def on_held(self):
        pass


def run_locked(path, lock, trials=4):
    # No waiting inside SQLite itself: what is tested is ours.
    url = f"sqlite:///{path}?timeout=0.05"
    return run_study(Settings(trials, 0.0, 7, url), SPACE, "f" * 20, [], solve, lock.measure)


def test_a_locked_storage_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module, "WAITS_S", (0.2,) * 10)
    lock = Lock(tmp_path / "s.db")
    lock.on_held = lambda: threading.Timer(0.5, lambda: lock.held.rollback()).start()
    found = run_locked(tmp_path / "s.db", lock)
    assert len(found.trials) == 4
    assert any("not reproducible" in note for note in found.notes)
    assert seen(found) == seen(run_locked(tmp_path / "other.db", Unlocked()))


def test_a_storage_that_is_locked_at_the_start_is_waited_for_too(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module, "WAITS_S", (0.2,) * 10)
    run_locked(tmp_path / "s.db", Unlocked(), trials=1)  # the tables are there
    lock = Lock(tmp_path / "s.db")
    lock.hold()
    threading.Timer(0.5, lock.held.rollback).start()
    assert len(run_locked(tmp_path / "s.db", Unlocked(), trials=2).trials) == 2


def test_a_storage_that_stays_locked_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module, "WAITS_S", (0.01, 0.02))
    lock = Lock(tmp_path / "s.db")
    with pytest.raises(StorageError, match=r"journal file .* or one worker; ended trials are kept"):
        run_locked(tmp_path / "s.db", lock)
    lock.held.rollback()
    study = optuna.load_study(study_name=None, storage=open_storage(f"sqlite:///{tmp_path}/s.db"))
    assert close_stale(study) == 0  # this process still runs: its trial is its own to close
    close_own(study)
    assert not [t for t in study.trials if t.state == TrialState.RUNNING]


class Unlocked:
    measure = staticmethod(measure)


@pytest.mark.slow
def test_workers_share_a_study_without_doubling_trials(tmp_path):
    path = tmp_path / "s.log"
    command = [sys.executable, "-c", CHILD, str(path), "16", "0.05"]
    workers = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0] * 4
    study = optuna.load_study(study_name=None, storage=open_storage(str(path)))
    states = [t.state for t in study.trials]
    assert not {TrialState.RUNNING, TrialState.WAITING} & set(states)
    ended = [t for t in study.trials if t.state in {TrialState.COMPLETE, TrialState.PRUNED}]
    assert 16 <= len(ended) <= 16 + 3
    assert len({tuple(sorted(t.params.items())) for t in ended}) >= len(ended) - 3
