"""Between the first candidates and the choice: learn from measured layouts, study, swap.

Everything is judged by the joint KLD of whole layouts on the target's ``select`` chunks. A layout
replaces the best so far only if it is better by more than `SIGMAS` standard errors of the paired
difference; what was measured once, in this run or before a kill, is never measured again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitwright.allocator.candidates import CandidateLayout, make_candidate
from bitwright.allocator.choices import single_groups, weighted_cost
from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.predictions import predict
from bitwright.allocator.priors import find_prior, prior_table
from bitwright.allocator.steering import Fit, Steering, fit_steering, steered, steering_between
from bitwright.allocator.study import (
    Measured,
    Params,
    ReportChunk,
    Settings,
    StudyResult,
    make_space,
    point_of,
    run_study,
    steering_of,
)
from bitwright.allocator.swaps import swaps
from bitwright.allocator.terms import Terms, solve_within
from bitwright.damage.pricing import DamageTable
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import Joint, JointMeter, Stop
from bitwright.workflows.mixes import TASK, Mixes
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.stage_imatrix import describe_mix

SIGMAS = 2.0
LEARNED, STUDIED, SWAPPED = "learned", "study", "swapped"

Measure = Callable[[Mapping[str, str], Params, ReportChunk], Measured]


@dataclass(frozen=True, slots=True)
class Task:
    """What the search may do, on which table, and which imatrices it may pack with."""

    ctx: RunContext
    options: OptionSet
    table: DamageTable
    terms: Terms
    budget_bytes: int
    meter: JointMeter
    mixes: Mixes

    def solve(self, steering: Steering, share: float = 1.0) -> dict[str, str]:
        """The layout that is best on the steered table, all terms kept on the plain one."""
        target = self.ctx.spec.target
        table = steered(self.table, steering)
        cost = weighted_cost(self.options, table, steering.weights(table.categories, target))
        least = self.options.smallest_bytes
        room = max(least, int(self.budget_bytes * share)) - self.options.fixed_bytes
        groups = single_groups(self.options, self.terms.coherent)
        found = solve_within(self.options, groups, cost, room, self.table, self.terms)
        return self.options.complete(found.types)

    def candidate(
        self, label: str, types: Mapping[str, str], how: str, imatrix: str = TASK
    ) -> CandidateLayout:
        """With its bytes and what the plain table predicts."""
        made = make_candidate(self.options, self.table, label, types, how)
        return replace(made, imatrix=imatrix)

    def measure(
        self, types: Mapping[str, str], imatrix: str = TASK, stop: Stop | None = None
    ) -> Joint:
        """On the target; ``stop`` as the meter has it."""
        found = self.meter.measure(types, self.ctx.spec.target, stop, imatrix)
        assert found is not None  # an empty target is refused before
        return found

    def mix_of(self, params: Params) -> str:
        """The imatrix that a point of the study is measured with."""
        return self.mixes.nearest(params["mix"]) if "mix" in params else TASK


@dataclass(slots=True)
class Best:
    """The layout to beat, and all that were measured whole: (types, nats).

    Those of another imatrix than the damage map's do not teach. ``seen``: what the meter files
    them under.
    """

    meter: JointMeter
    candidate: CandidateLayout
    joint: Joint
    measured: list[tuple[Mapping[str, str], float]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    record: list[dict[str, Any]] = field(default_factory=list)

    def offer(self, candidate: CandidateLayout, joint: Joint, *, whole: bool = True) -> bool:
        """Take the candidate if it is better by more than the noise; remember it either way."""
        difference, se = joint.less(self.joint)
        better = whole and difference < -SIGMAS * se
        self.seen.add(self.meter.identity(candidate.types, candidate.imatrix))
        if whole and candidate.imatrix == TASK:
            self.measured.append((candidate.types, joint.mean))
        self.record.append(
            {
                "label": candidate.label,
                "imatrix": candidate.imatrix,
                "nats": joint.mean,
                "against_best": difference,
                "se": se if se < float("inf") else None,
                "taken": better,
                "whole": whole,
            }
        )
        if better:
            self.candidate, self.joint = candidate, joint
        return better

    def knows(self, types: Mapping[str, str], imatrix: str = TASK) -> bool:
        """Whether this layout was measured already with this imatrix."""
        return self.meter.identity(types, imatrix) in self.seen


def search(
    task: Task, proposed: Sequence[CandidateLayout], others: Sequence[CandidateLayout]
) -> tuple[tuple[CandidateLayout, ...], dict[str, Any]]:
    """Layouts to add to the proposed ones, and what was found on the way, for the manifest.

    ``proposed`` may be chosen, the first being what others have to beat; ``others`` (stock,
    controls) only teach.
    """
    spec = task.ctx.spec
    if (
        not spec.search.rounds
        and not spec.search.swaps
        and not (spec.study.trials or spec.study.minutes)
    ):
        return (), {}
    task.ctx.reporter.stage("search", "layouts measured whole on the target's select split")
    for category in task.meter.chunks if spec.study.pareto else [spec.target]:
        if note := task.meter.left_out(category):
            task.ctx.reporter.note(note)
    best = _measure_first(task, proposed, others)
    fit = _learn(task, best)
    record: dict[str, Any] = {"fit": _described(fit)}
    if spec.study.trials or spec.study.minutes:
        record["study"] = _study(task, best, fit)
    _swap(task, best, fit)
    record["measured"] = best.record
    found = best.candidate
    return (() if found in proposed else (found,)), record


def _measure_first(
    task: Task, proposed: Sequence[CandidateLayout], others: Sequence[CandidateLayout]
) -> Best:
    """The layout to beat among those that are there already; all of them teach."""
    total, label = len(proposed) + len(others), proposed[0].label
    task.ctx.reporter.step(0, total, f"first layouts, {label}")
    best = Best(task.meter, proposed[0], task.measure(proposed[0].types))
    best.offer(proposed[0], best.joint)
    for done, one in enumerate((*proposed[1:], *others), 1):
        task.ctx.reporter.step(done, total, f"first layouts, {one.label}")
        joint = task.measure(one.types)
        if one in proposed:
            best.offer(one, joint)
        else:
            best.measured.append((one.types, joint.mean))
    return best


def _learn(task: Task, best: Best) -> Fit:
    """Correct the table by what was measured, solve, measure; until nothing new is proposed."""
    target, rounds = task.ctx.spec.target, task.ctx.spec.search.rounds
    fit = fit_steering(task.table, target, best.measured)
    for k in range(rounds):
        types = task.solve(fit.steering)
        if best.knows(types):
            break
        how = f"least {target} damage of the table corrected by {len(best.measured)} measurements"
        joint = task.measure(types)
        best.offer(task.candidate(f"{LEARNED}-{k + 1}", types, how), joint)
        task.ctx.reporter.step(k + 1, rounds, f"learned {joint.mean:.5f} nats")
        fit = fit_steering(task.table, target, best.measured)
    return fit


def _described(fit: Fit) -> dict[str, Any]:
    known = fit.before == fit.before  # NaN without a measurement
    return {
        "log_error_before": fit.before if known else None,
        "log_error_after": fit.after if known else None,
        "log_scale": fit.scale,
        "roles": dict(fit.steering.roles),
        "slope": fit.steering.slope,
        "curve": fit.steering.curve,
    }


def _swap(task: Task, best: Best, fit: Fit) -> None:
    """Measure exchanges of tensors on the best layout, the most promising first."""
    target, left = task.ctx.spec.target, task.ctx.spec.search.swaps
    if left == 0:
        return
    total, table = left, steered(task.table, fit.steering)
    while left:
        improved = False
        base, imatrix = best.candidate.types, best.candidate.imatrix
        for one in swaps(task.options, table, base, task.budget_bytes, {target: 1.0}):
            types = {**base, **one.types}
            if best.knows(types, imatrix) or not keeps_prices(task, types):
                continue
            joint, whole = _measure_until_worse(task, best, types)
            left -= 1
            changed = ", ".join(f"{n} to {t}" for n, t in one.types.items())
            how = f"{best.candidate.how.partition(';')[0]}; then {changed}, measured better"
            candidate = task.candidate(SWAPPED, types, how, imatrix)
            improved = best.offer(candidate, joint, whole=whole)
            task.ctx.reporter.step(total - left, total, f"best {best.joint.mean:.5f} nats")
            if improved or not left:
                break
        if not improved:
            break


def keeps_prices(task: Task, types: Mapping[str, str]) -> bool:
    """Whether a layout keeps the prices and further budgets that solved ones were held to."""
    terms = task.terms
    if terms.coherent or terms.side_budgets:
        return False  # exchanges of single tensors would break them
    if terms.baseline is None:
        return True
    own = predict(task.table, types)
    base = predict(task.table, task.options.complete(terms.baseline))
    return all(own[c] <= (1 + e) * base[c] for c, e in terms.prices.items() if base.get(c, 0.0) > 0)


def _measure_until_worse(task: Task, best: Best, types: Mapping[str, str]) -> tuple[Joint, bool]:
    """The joint damage, and whether it was measured on all chunks: a bad one stops early."""

    def worse(joint: Joint) -> bool:
        difference, se = joint.less(best.joint)
        return len(joint.kld) > 1 and difference > SIGMAS * se

    found = task.measure(types, best.candidate.imatrix, worse)
    return found, task.meter.is_whole(found, task.ctx.spec.target)


def _study(task: Task, best: Best, fit: Fit) -> dict[str, Any]:
    """The Optuna study; its best layout is offered, in Pareto mode only its front is recorded."""
    ctx, spec = task.ctx, task.ctx.spec
    declared = task.mixes.shares[TASK] if task.mixes.vary else None
    space = make_space(task.table, spec.target, pareto=spec.study.pareto, mix=declared)
    neutral = {v.name: v.neutral for v in space}
    warm: list[Params] = [neutral, point_of(fit.steering, space)]
    warm += [{**neutral, "exponent": e} for e in (0.75, 1.25)]
    prior = find_prior(ctx.model)
    if prior is not None and spec.target in prior.sensitivity:
        table = prior_table(prior, task.options)
        warm.append(point_of(steering_between(task.table, table, spec.target), space))
    warm += [{**neutral, "mix": task.mixes.shares[name]} for name in task.mixes.others]
    path = ctx.folder.path / "select" / "study.log"
    settings = Settings(
        spec.study.trials,
        spec.study.minutes,
        spec.seed,
        spec.study.storage or str(path),
        spec.study.pareto,
    )
    if not spec.study.storage:
        ctx.folder.check_writable()
    fingerprint = study_fingerprint(task, [v.name for v in space])
    measure = _front_measure(task) if spec.study.pareto else _trial_measure(task, best)
    started = best.joint.mean

    def solve(params: Params) -> Mapping[str, str]:
        return task.solve(steering_of(params), params.get("size", 1.0))

    def show(done: int, total: int, text: str) -> None:
        ctx.reporter.step(done, total, f"study {text}, best {best.joint.mean:.5f} of {started:.5f}")

    found = run_study(settings, space, fingerprint, warm, solve, measure, show)
    for note in found.notes:
        ctx.reporter.note(note)
    if not spec.study.pareto:
        _offer_trials(task, best, found)
    return _study_record(found)


def study_fingerprint(task: Task, variables: Sequence[str]) -> str:
    """All that decides what a point of the space means and measures."""
    table = task.table
    return key_of(
        "study",
        list(variables),
        {n: list(t) for n, t in task.options.offered.items()},
        dict(task.options.fixed),
        task.budget_bytes,
        task.ctx.spec.target,
        task.ctx.spec.seed,
        [dict(task.terms.baseline or {}), dict(task.terms.prices), task.terms.coherent],
        [list(table.types), table.nats.tobytes().hex()],
        {name: one.sha256() for name, one in task.mixes.imatrices.items()},
        task.meter.key,
    )


def _trial_measure(task: Task, best: Best) -> Measure:
    """Target KLD, stopped where the paired difference to the best is clear after a few chunks."""
    held = {"best": best.joint}

    def measure(types: Mapping[str, str], params: Params, report: ReportChunk) -> Measured:
        def stop(joint: Joint) -> bool:
            report(len(joint.kld), joint.mean)
            difference, se = joint.less(held["best"])
            return len(joint.kld) > 1 and difference > SIGMAS * se

        joint = task.measure(types, task.mix_of(params), stop)
        whole = task.meter.is_whole(joint, task.ctx.spec.target)
        if whole and joint.mean < held["best"].mean:
            held["best"] = joint
        return Measured((joint.mean,), pruned=not whole)

    return measure


def _front_measure(task: Task) -> Measure:
    """(target KLD, worst off-target ratio to the baseline, bytes)."""
    target, baseline = task.ctx.spec.target, task.terms.baseline

    def measure(types: Mapping[str, str], params: Params, report: ReportChunk) -> Measured:
        ratios, imatrix = [0.0], task.mix_of(params)
        for category in task.meter.chunks:
            if category != target and baseline is not None:
                own = task.meter.measure(types, category, imatrix=imatrix)
                base = task.meter.measure(baseline, category)
                if own is not None and base is not None and base.mean > 0:
                    ratios.append(own.mean / base.mean)
        size = float(task.options.layout_bytes(types))
        return Measured((task.measure(types, imatrix).mean, max(ratios), size))

    return measure


def _offer_trials(task: Task, best: Best, found: StudyResult) -> None:
    """The best trial, under the same rule as all; each whole one also teaches the fit."""
    whole = [t for t in found.trials if not t.pruned]
    for trial in sorted(whole, key=lambda t: (t.values, t.number))[:1]:
        imatrix = task.mix_of(trial.params)
        how = f"trial {trial.number} of a study of {len(found.trials)} trials, measured best"
        if imatrix != TASK:
            how += f", with an imatrix of {describe_mix(task.mixes.parts[imatrix])}"
        candidate = task.candidate(STUDIED, trial.types, how, imatrix)
        if not best.knows(trial.types, imatrix):
            best.offer(candidate, task.measure(trial.types, imatrix))
    best.measured += [
        (t.types, t.values[0])
        for t in whole
        if task.mix_of(t.params) == TASK and not best.knows(t.types)
    ]


def _study_record(found: StudyResult) -> dict[str, Any]:
    return {
        "name": found.name,
        "trials": [
            {
                "number": t.number,
                "values": list(t.values),
                "pruned": t.pruned,
                "params": {k: round(v, 6) for k, v in t.params.items()},
            }
            for t in found.trials
        ],
        "front": [{"number": t.number, "values": list(t.values)} for t in found.front],
        "notes": list(found.notes),
    }
