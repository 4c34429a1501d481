"""The Optuna study: a few numbers steer the table, the exact solver spends, measuring judges.

No variable stands for a tensor: at a hundred evaluations that is hopeless. Each trial is a
steering (see ``steering``), solved exactly, so every trial is feasible and uses the budget; its
value is the measured joint KLD of the layout. The sampler is made anew for each trial from the seed
and the number of trials that ended, so that a study that was killed and resumed goes the same
way as one that ran through. Several workers on one storage share its trials; what they find
together depends on who ends first.
"""

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from bitwright.allocator.steering import Steering, main_roles
from bitwright.damage.pricing import DamageTable
from bitwright.errors import ConfigError, StorageError

STARTUP = 8  # random points before the sampler models anything, warm starts included
ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
NAMELESS_S = 10.0  # a trial without its worker's name for so long was left by a kill
# Waits between tries while other workers hold the storage; what was measured is not lost meanwhile.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
LOCKED = (StorageInternalError, SQLAlchemyError)  # or failed in another way
WORKER_STRIDE = 1_000_003  # between the seeds of workers that share a study

SHARED_NOTE = (
    "the study's storage may be shared: with several workers its trials depend on who ends first"
    " and are not reproducible, but the layout that is chosen builds the same file again"
)

T = TypeVar("T")
Types = Mapping[str, str]
Params = Mapping[str, float]
ReportChunk = Callable[[int, float], None]


@dataclass(frozen=True, slots=True)
class Variable:
    """One continuous variable of the space, and its neutral value."""

    name: str
    low: float
    high: float
    neutral: float


@dataclass(frozen=True, slots=True)
class Settings:
    """``trials`` and ``minutes``: whichever ends first; 0 means no such end.

    ``storage``: a journal file, or an Optuna RDB URL that many workers may share.
    """

    trials: int
    minutes: float
    seed: int
    storage: str
    pareto: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What a trial's layout measured: one value, or several in Pareto mode."""

    values: tuple[float, ...]
    pruned: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """One ended trial."""

    number: int
    params: Params
    values: tuple[float, ...]
    types: Types
    pruned: bool


@dataclass(frozen=True, slots=True)
class StudyResult:
    """``trials`` in order; ``front``: those that no other beats on all values; notes for a user."""

    name: str
    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    notes: tuple[str, ...]


def make_space(
    table: DamageTable, target: str, *, pareto: bool = False, mix: float | None = None
) -> tuple[Variable, ...]:
    """5 to 15 variables: type curve, other categories, depth, a factor per role but the first.

    Factors are relative to the role with most damage: a common factor changes no layout. The
    embedding and the output have factors of their own: what they get of the budget.

    Args:
        mix: the target's share in the declared imatrix, where the study varies it too.
    """
    roles = main_roles(table, target)[1:]
    found = [
        Variable("exponent", 0.7, 1.4, 1.0),
        Variable("general", 0.0, 0.6, 0.0),
        Variable("slope", -0.7, 0.7, 0.0),
        Variable("curve", -1.0, 1.0, 0.0),
        *(Variable(f"role.{one}", -1.2, 1.2, 0.0) for one in roles),
    ]
    if mix is not None:
        found.append(Variable("mix", 0.0, 1.0, mix))
    return (*found, Variable("size", 0.9, 1.0, 1.0)) if pareto else tuple(found)


def steering_of(params: Params) -> Steering:
    """The steering that a point of the space stands for."""
    roles = {n.removeprefix("role."): v for n, v in params.items() if n.startswith("role.")}
    return Steering(roles, params["slope"], params["curve"], params["exponent"], params["general"])


def point_of(steering: Steering, space: Sequence[Variable]) -> dict[str, float]:
    """The nearest point of the space; role factors relative to the role that has no variable."""
    named = {v.name.removeprefix("role.") for v in space if v.name.startswith("role.")}
    first = next((x for one, x in steering.roles.items() if one not in named), 0.0)
    values = {
        "exponent": steering.exponent,
        "general": steering.general,
        "slope": steering.slope,
        "curve": steering.curve,
        **{f"role.{one}": x - first for one, x in steering.roles.items()},
    }
    return {v.name: min(max(values.get(v.name, v.neutral), v.low), v.high) for v in space}


def run_study(
    settings: Settings,
    space: Sequence[Variable],
    fingerprint: str,
    warm: Sequence[Params],
    solve: Callable[[Params], Types],
    measure: Callable[[Types, Params, ReportChunk], Measured],
    progress: Callable[[int, int, str], None] | None = None,
) -> StudyResult:
    """Run or resume the study of this search space until its trials or minutes are used up.

    Args:
        fingerprint: of all that decides what a point means; another one is another study.
        warm: points to try first.
        measure: of a layout and its point; reports each chunk's running mean, and says when it
            stopped early.

    Raises:
        ConfigError: neither trials nor minutes, or a storage that cannot be opened.
        StorageError: a storage that other workers keep locked.
    """
    if settings.trials <= 0 and settings.minutes <= 0:
        raise ConfigError("the study has neither trials nor minutes: set one of them above 0")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = _patiently(lambda: open_storage(settings.storage))
    name = f"bitwright-{fingerprint[:16]}"
    study, notes, earlier = _patiently(lambda: _opened(storage, name, space, settings.pareto))
    starts = [*warm, *earlier]
    if "://" in settings.storage:
        notes.append(SHARED_NOTE)
    else:  # one worker: what it measured is at hand, and sets the bar
        for done in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            measure(dict(done.user_attrs["types"]), done.params, lambda _step, _value: None)
    ends_at = time.monotonic() + settings.minutes * 60 if settings.minutes > 0 else None

    def step() -> bool:
        ended = len(study.get_trials(deepcopy=False, states=ENDED))
        out_of_time = ends_at is not None and time.monotonic() >= ends_at
        if out_of_time or (settings.trials > 0 and ended >= settings.trials):
            return False
        # Other workers' trials under way: neither their start nor their random numbers again.
        others = len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))
        study.sampler = _sampler(settings.seed + ended + WORKER_STRIDE * others)
        if ended + others < len(starts):
            study.enqueue_trial(dict(starts[ended + others]))
        best = _one_trial(study, space, solve, measure)
        if progress is not None:
            progress(ended + 1, max(settings.trials, ended + 1), best)
        return True

    while _patiently(step, lambda: close_own(study)):
        pass
    return _result(study, name, notes)


def _opened(
    storage: optuna.storages.BaseStorage, name: str, space: Sequence[Variable], pareto: bool
) -> tuple[optuna.Study, list[str], list[Params]]:
    """The study, new or gone on with; notes for a user; points of earlier studies to start from."""
    notes, earlier = _earlier_best(storage, name, space)
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        directions=["minimize"] * (3 if pareto else 1),
        load_if_exists=True,
    )
    stale = close_stale(study)
    if stale:
        notes.append(f"{stale} trial(s) that a killed run had begun were closed")
    return study, notes, earlier


def _patiently(call: Callable[[], T], tidy: Callable[[], None] = lambda: None) -> T:
    """``call``, tried again for a while when the storage is locked by other workers.

    ``tidy`` runs between two tries.

    Raises:
        StorageError: it stayed locked.
    """
    for wait in WAITS_S:
        try:
            return call()
        except LOCKED:
            time.sleep(wait)
            with contextlib.suppress(*LOCKED):
                tidy()
    try:
        return call()
    except LOCKED as error:
        raise StorageError(
            f"the study's storage stayed locked or failed ({str(error).splitlines()[0]}): use a"
            " journal file (the default) or one worker; ended trials are kept"
        ) from None


def _one_trial(
    study: optuna.Study,
    space: Sequence[Variable],
    solve: Callable[[Params], Types],
    measure: Callable[[Types, Params, ReportChunk], Measured],
) -> str:
    trial = study.ask()
    trial.set_user_attr("worker", f"{socket.gethostname()}:{os.getpid()}")
    single = len(study.directions) == 1
    try:
        params = {v.name: trial.suggest_float(v.name, v.low, v.high) for v in space}
        types = solve(params)
        trial.set_user_attr("types", dict(types))

        def report(step: int, value: float) -> None:
            if single:
                trial.report(value, step)

        found = measure(types, params, report)
    except BaseException:
        with contextlib.suppress(*LOCKED):
            study.tell(trial, state=TrialState.FAIL)  # also when interrupted: nothing stays running
        raise
    trial.set_user_attr("values", list(found.values))
    if found.pruned:
        study.tell(trial, state=TrialState.PRUNED)
    else:
        study.tell(trial, list(found.values))
    return f"{found.values[0]:.5f} nats{' (stopped early)' if found.pruned else ''}"


def open_storage(storage: str) -> optuna.storages.BaseStorage:
    """A journal file, or a database for an URL.

    Raises:
        ConfigError: it cannot be opened. One of `LOCKED`: it is in use just now.
    """
    if "://" not in storage:
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        return JournalStorage(JournalFileBackend(storage))
    try:
        return RDBStorage(storage)
    except (ImportError, ValueError, SQLAlchemyError, StorageInternalError) as error:
        reason = str(error).splitlines()[0]
        if "locked" in reason:  # in use by another worker: to be waited for, not refused
            raise
        raise ConfigError(
            f"the study's storage cannot be opened ({reason}): use a journal file (the default),"
            " or check the URL"
        ) from None


def close_stale(study: optuna.Study) -> int:
    """Close running trials of processes that are gone; how many.

    Trials of other machines are left alone: their workers cannot be asked.
    """
    closed = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = str(trial.user_attrs.get("worker", ""))
        host, _, pid = worker.rpartition(":")
        begun = trial.datetime_start
        if not worker and begun and (datetime.now() - begun).total_seconds() < NAMELESS_S:
            continue  # its worker may be about to put its name on it
        if host not in ("", socket.gethostname()) or _runs(pid):
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        closed += 1
    for _ in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        # Queued by a run that was killed before it asked for it: it is queued again in its turn.
        study.tell(study.ask().number, state=TrialState.FAIL)
    return closed


def close_own(study: optuna.Study) -> None:
    """Close what this process left running when the storage failed in the middle of a trial."""
    mine = f"{socket.gethostname()}:{os.getpid()}"
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if trial.user_attrs.get("worker") == mine:
            study.tell(trial.number, state=TrialState.FAIL)


def _runs(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sampler(seed: int) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():  # 'multivariate' is marked as experimental
        warnings.simplefilter("ignore")
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=STARTUP)


def _earlier_best(
    storage: optuna.storages.BaseStorage, name: str, space: Sequence[Variable]
) -> tuple[list[str], list[Params]]:
    """What other studies in the same storage are worth: their best point, as a start."""
    others = [s for s in optuna.get_all_study_summaries(storage) if s.study_name != name]
    if not others:
        return [], []
    notes = [
        f"the search space, budget or text changed since {len(others)} earlier study(ies):"
        f" a new one begins, from their best points"
    ]
    points: list[Params] = []
    for other in sorted(others, key=lambda s: s.study_name):
        if len(other.directions) == 1 and other.best_trial is not None:
            known = other.best_trial.params
            points.append(
                {v.name: min(max(known.get(v.name, v.neutral), v.low), v.high) for v in space}
            )
    return notes, points


def _result(study: optuna.Study, name: str, notes: Sequence[str]) -> StudyResult:
    trials = tuple(
        Trial(
            t.number,
            dict(t.params),
            tuple(t.user_attrs.get("values", ())),
            dict(t.user_attrs.get("types", {})),
            t.state == TrialState.PRUNED,
        )
        for t in study.get_trials(deepcopy=False, states=ENDED)
    )
    whole = [t for t in trials if not t.pruned]
    front = tuple(t for t in whole if not any(_beats(o, t) for o in whole))
    return StudyResult(name, trials, front, tuple(notes))


def _beats(a: Trial, b: Trial) -> bool:
    no_worse = all(x <= y for x, y in zip(a.values, b.values, strict=True))
    # Of equal ones the first stays.
    return no_worse and (a.values != b.values or a.number < b.number)
