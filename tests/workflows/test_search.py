"""Joint measurements that are never repeated, the search on them, and what decides in the end."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitwright.allocator.candidates import propose
from bitwright.allocator.terms import SideBudget, Terms
from bitwright.corpora.store import load_corpus
from bitwright.damage.damage_map import load_damage_map
from bitwright.damage.pricing import price_types
from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.session import SessionOptions
from bitwright.errors import StorageError
from bitwright.eval.statistics import Interval
from bitwright.eval.suite import load_suite
from bitwright.workflows import stage_search
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import Joint, JointMeter, _load
from bitwright.workflows.mixes import Mixes, make_mixes, other_mixes, share_of
from bitwright.workflows.preflight import make_options, make_plan
from bitwright.workflows.progress import Silent
from bitwright.workflows.run_folder import NotDone, RunFolder
from bitwright.workflows.spec import SearchSettings, StudySettings, load_workflow
from bitwright.workflows.stage_allocate import (
    broken_prices,
    choose_best,
    make_terms,
    may_be_chosen,
    reason_to_keep_stock,
)
from bitwright.workflows.stage_search import Best, Task, search
from tests.workflows.conftest import Finished

BOTH = ("code", "general")


@pytest.fixture
def ctx(finished: Finished, tmp_path: Path) -> RunContext:
    spec, name = load_workflow(finished.workflow)
    options = SessionOptions(threads=1, n_ctx=spec.engine.n_ctx, working_type="file")
    folder = folder_of(finished, tmp_path / "run")
    return RunContext(spec, name, open_model(finished.model), folder, options, Silent())


def folder_of(finished: Finished, path: Path) -> RunFolder:
    """A new run folder with the imatrices of the finished run."""
    shutil.copytree(finished.folder / "imatrix", path / "imatrix", dirs_exist_ok=True)
    return RunFolder.open(path)


def select_chunks(finished: Finished):
    corpora = load_corpus(finished.folder / "corpus")
    return {c: corpora[c].split("select") for c in BOTH}


def meter_of(ctx: RunContext, finished: Finished, **room: int) -> JointMeter:
    mixes = mixes_of(ctx, finished)
    return JointMeter(ctx, select_chunks(finished), mixes.imatrices, load_suite(), **room)


def mixes_of(ctx: RunContext, finished: Finished) -> Mixes:
    task = read_imatrix(finished.folder / "imatrix" / "task.gguf")
    return make_mixes(ctx, task, ctx.spec.imatrix.task)


def task_of(ctx: RunContext, finished: Finished, meter: JointMeter) -> tuple[Task, tuple]:
    plan = make_plan(ctx)
    mapped = load_damage_map(finished.folder / "damage")
    imatrix = read_imatrix(finished.folder / "imatrix" / "task.gguf")
    options = make_options(
        ctx, plan.budget_bytes, imatrix=imatrix, measured=frozenset(mapped.rows["tensor"])
    )
    rows = json.loads((finished.folder / "damage" / "packing_errors.json").read_text())
    errors = {(tensor, kind): error for tensor, kind, error in rows}
    table = price_types(mapped, errors, options.offered)
    terms = replace(make_terms(ctx, plan, table), prices={})
    proposed = propose(options, {1.0: table}, plan.budget_bytes, ctx.spec.target, terms)
    mixes = mixes_of(ctx, finished)
    return Task(ctx, options, table, terms, plan.budget_bytes, meter, mixes), proposed


def all_at(ctx: RunContext, kind: str) -> dict[str, str]:
    return {t.name: kind for t in ctx.model.tensors if t.n_rows > 1}


def test_a_layout_is_measured_once_even_after_a_kill(ctx, finished):
    with meter_of(ctx, finished) as meter:
        first = meter.measure(all_at(ctx, "Q2_K"), "code")
        count = meter.measured
        again = meter.measure(all_at(ctx, "Q2_K"), "code")
        assert meter.measured == count > 0
    assert (first.kld == again.kld).all()
    path = next((ctx.folder.path / "select").glob("joint-*.jsonl"))
    with path.open("a") as file:
        file.write('["torn line')  # what a kill in mid-write leaves
    with meter_of(ctx, finished) as meter:
        assert (meter.measure(all_at(ctx, "Q2_K"), "code").kld == first.kld).all()
        assert meter.measured == 0
        meter.measure(all_at(ctx, "Q4_K"), "code")
    assert len(_load(path)) == 2 * count


def test_the_meter_measures_what_the_layout_is_now(ctx, finished):
    """The session changes only what differs; the result must not depend on what came before."""
    with meter_of(ctx, finished) as meter:
        low = meter.measure(all_at(ctx, "Q2_K"), "code")
        high = meter.measure({"blk.0.attn_v.weight": "Q8_0"}, "code")
    with meter_of(
        replace(ctx, folder=folder_of(finished, ctx.folder.path / "b")), finished
    ) as meter:
        fresh = meter.measure({"blk.0.attn_v.weight": "Q8_0"}, "code")
    assert (fresh.kld == high.kld).all()
    assert high.mean < low.mean


def test_the_meter_finds_what_the_scores_of_the_run_found(ctx, finished):
    """Two ways to one number: in the search, and when the candidates were scored."""
    found = json.loads((finished.folder / "select.json").read_text())["result"]
    assert len(found["layouts"]) > 2
    with meter_of(ctx, finished) as meter:
        for label, types in found["layouts"].items():
            for category in BOTH:
                own, scored = (
                    meter.measure(types, category).mean,
                    found["measured"][label][category],
                )
                assert own == pytest.approx(scored, rel=1e-6), (label, category)


def studied(ctx: RunContext, **given) -> RunContext:
    """With a study in its workflow, and no rounds."""
    study = StudySettings(trials=1, **given)
    spec = ctx.spec.model_copy(update={"search": SearchSettings(), "study": study})
    return replace(ctx, spec=spec)


def test_mixes_vary_the_target_and_keep_the_rest_as_declared():
    declared = {"code": 7.0, "chat": 1.0, "general": 2.0}
    found = other_mixes(declared, {"general": 1.0}, "code", (0.0, 0.4, 0.7, 1.0))
    assert list(found) == ["mix-0", "mix-40", "mix-100"]  # 70 % is the declared one
    assert found["mix-0"] == pytest.approx({"chat": 1 / 3, "general": 2 / 3})
    assert found["mix-40"] == pytest.approx({"code": 0.4, "chat": 0.2, "general": 0.4})
    assert found["mix-100"] == {"code": 1.0}
    pure = other_mixes({"code": 1.0}, {"general": 1.0}, "code", (0.25,))
    assert pure == {"mix-25": {"code": 0.25, "general": 0.75}}
    assert other_mixes({"code": 1.0}, {"code": 1.0}, "code", (0.25,)) == {}
    assert share_of({"a": 3.0, "b": 1.0}, "a") == 0.75


def test_a_study_has_the_mixes_that_its_workflow_names(ctx, finished):
    assert not mixes_of(ctx, finished).vary  # no study
    assert not mixes_of(studied(ctx, imatrix_shares=()), finished).vary
    mixes = mixes_of(studied(ctx), finished)
    assert list(mixes.imatrices) == ["task", "mix-25", "mix-50", "mix-75", "mix-100"]
    assert [mixes.nearest(x) for x in (0.7, 0.74, 0.0, 0.9, 0.36)] == [
        "task", "mix-75", "mix-25", "mix-100", "mix-25"
    ]  # fmt: skip
    whole = read_imatrix(ctx.folder.path / "imatrix" / "category-code.gguf")
    assert mixes.imatrices["mix-100"].sha256() == whole.sha256()


def test_a_layout_is_measured_with_the_imatrix_that_is_named(ctx, finished):
    """And filed under it: neither mixed up in memory nor after a resume."""
    here, types = studied(ctx, imatrix_shares=(0.0,)), all_at(ctx, "Q2_K")
    with meter_of(here, finished) as meter:
        task = meter.measure(types, "code")
        other = meter.measure(types, "code", imatrix="mix-0")
        again = meter.measure(types, "code")
        assert (again.kld == task.kld).all()
        assert (other.kld != task.kld).any()
    with meter_of(here, finished) as meter:
        assert (meter.measure(types, "code", imatrix="mix-0").kld == other.kld).all()
        assert meter.measured == 0
    general = read_imatrix(finished.folder / "imatrix" / "category-general.gguf")
    fresh = replace(ctx, folder=folder_of(finished, ctx.folder.path / "b"))
    alone = JointMeter(fresh, select_chunks(finished), {"task": general}, load_suite())
    with alone as meter:
        assert (meter.measure(types, "code").kld == other.kld).all()


def test_other_mixes_are_another_study(ctx, finished):
    found = []
    for shares in ((), (0.0,), (1.0,)):
        here = studied(ctx, imatrix_shares=shares)
        with meter_of(here, finished) as meter:
            task, _ = task_of(here, finished, meter)
            found.append(stage_search.study_fingerprint(task, ["mix"]))
    assert len(set(found)) == 3


def test_what_another_imatrix_measures_does_not_teach(ctx, finished):
    here = studied(ctx, imatrix_shares=(0.0,))
    with meter_of(here, finished) as meter:
        task, proposed = task_of(here, finished, meter)
        joint = task.measure(proposed[0].types)
        best = Best(meter, proposed[0], joint)
        assert best.offer(
            replace(proposed[0], imatrix="mix-0"), Joint(joint.kld * 0.5, joint.tokens)
        )
        assert best.measured == []
        assert best.candidate.imatrix == "mix-0"
        assert best.knows(proposed[0].types, "mix-0")
        assert not best.knows(proposed[0].types)
        best.offer(proposed[0], joint)
        assert len(best.measured) == 1


@pytest.mark.parametrize("better", ["mix-0", "mix-100", "task"])
def test_a_study_takes_the_mix_that_measures_better(ctx, finished, monkeypatch, better):
    """By the real solver and sampler; what a mix is worth is made plain by scaling it."""
    here = studied(ctx, imatrix_shares=(0.0, 1.0))
    here = replace(
        here,
        spec=here.spec.model_copy(update={"study": here.spec.study.model_copy(
            update={"trials": 8})}),
    )  # fmt: skip
    real = JointMeter.measure

    def measure(self, types, category, stop=None, imatrix=None):  # type: ignore[no-untyped-def]
        found = real(self, types, category, None, imatrix)
        return Joint(found.kld * (0.5 if (imatrix or "task") == better else 1.0), found.tokens)

    monkeypatch.setattr(JointMeter, "measure", measure)
    with meter_of(here, finished) as meter:
        task, proposed = task_of(here, finished, meter)
        found, record = search(task, proposed[:1], ())
        tried = {task.mix_of(t["params"]) for t in record["study"]["trials"]}
    assert tried == {"task", "mix-0", "mix-100"}
    chosen = (*found, proposed[0])[0]
    assert chosen.imatrix == better
    if better != "task":
        assert {"mix-0": "100 % general", "mix-100": "100 % code"}[better] in chosen.how
    assert record["measured"][0]["imatrix"] == "task"  # the first layout, which is to be beaten


def test_a_read_only_folder_is_not_measured_in(ctx, finished):
    reading = replace(ctx, folder=RunFolder(ctx.folder.path, read_only=True))
    with meter_of(reading, finished) as meter, pytest.raises(NotDone):
        meter.measure(all_at(ctx, "Q2_K"), "code")


def test_a_measurement_can_stop_after_a_chunk(ctx, finished):
    with meter_of(ctx, finished) as meter:
        assert len(meter.chunks["code"]) > 1, "the fixture must have text to stop in"
        part = meter.measure(all_at(ctx, "Q2_K"), "code", lambda joint: True)
        assert len(part.kld) == 1
        assert not meter.is_whole(part, "code")


def test_a_category_that_is_measured_later_has_the_originals_reference(ctx, finished):
    with meter_of(ctx, finished) as meter:
        meter.measure(all_at(ctx, "Q2_K"), "code")  # from here on the weights are another layout's
        later = meter.measure(all_at(ctx, "Q2_K"), "general")
        assert not list(ctx.folder.path.glob("tmp*")), "the references' files have no name"
    with meter_of(
        replace(ctx, folder=folder_of(finished, ctx.folder.path / "b")), finished
    ) as meter:
        first = meter.measure(all_at(ctx, "Q2_K"), "general")
    assert (later.kld == first.kld).all()
    assert first.mean > 0


@pytest.mark.parametrize(
    ("pareto", "room", "categories"),
    [(False, {}, ()), (False, {"disk_bytes": 1}, ("code",)), (True, {"disk_bytes": 1}, BOTH)],
)
def test_a_search_says_what_text_it_does_not_see(ctx, finished, pareto, room, categories):
    said: list[str] = []

    class Record(Silent):
        def note(self, text: str) -> None:
            said.append(text)

    study = StudySettings(trials=1, pareto=pareto)
    spec = ctx.spec.model_copy(update={"search": SearchSettings(), "study": study})
    here = replace(ctx, spec=spec, reporter=Record())
    with meter_of(here, finished, **room) as meter:
        task, proposed = task_of(here, finished, meter)
        search(task, proposed[:1], ())
    text = select_chunks(finished)
    wanted = [f"the first 1 of {len(text[c])} select chunks of {c}:" for c in categories]
    notes = [note for note in said if "select chunks" in note]
    assert len(notes) == len(wanted)
    assert all(one in note for one, note in zip(wanted, notes, strict=True))


def test_a_full_disk_stops_a_search_with_a_sentence(ctx, finished, monkeypatch):
    def full(**where):  # type: ignore[no-untyped-def]
        raise OSError(28, "No space left on device")

    name = "bitwright.workflows.joint_meter.tempfile.TemporaryFile"
    with meter_of(ctx, finished) as meter, monkeypatch.context() as patch:
        patch.setattr(name, full)
        with pytest.raises(StorageError, match="the disk is full"):
            meter.measure(all_at(ctx, "Q2_K"), "code")
    # Known before the first pass where the disk says so.
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr("bitwright.engine.atomic.shutil.disk_usage", lambda path: usage)
    with meter_of(ctx, finished) as meter, pytest.raises(StorageError, match="only 0 are free"):
        meter.measure(all_at(ctx, "Q2_K"), "code")


def test_differences_are_paired_by_document():
    tokens = np.full((2, 8), 10.0)
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 2, (2, 8))
    better = Joint(base * 0.9, tokens).less(Joint(base, tokens))
    assert better[0] == pytest.approx(-0.1 * base.sum() / 160)
    same = Joint(base, tokens).less(Joint(base, tokens))
    assert same == (0.0, 0.0)
    one = Joint(base[:, :1], tokens[:, :1]).less(Joint(base[:, :1] * 2, tokens[:, :1]))
    assert math.isinf(one[1])


def test_search_study_and_swaps_never_lose_and_resume_to_the_same(ctx, finished):
    spec = ctx.spec.model_copy(
        update={
            "search": SearchSettings(rounds=2, swaps=4),
            "study": StudySettings(trials=4),
        }
    )
    results = []
    for part in ("a", "a", "b"):  # 'a' twice: the second replays the first from its files
        here = replace(ctx, spec=spec, folder=folder_of(finished, ctx.folder.path / part))
        with meter_of(here, finished) as meter:
            task, proposed = task_of(here, finished, meter)
            free = [c for c in proposed if c.label.startswith("target")]
            found, record = search(task, free, [c for c in proposed if c not in free])
            results.append((found, record["measured"], record["study"]["trials"], meter.measured))
            first = task.measure(free[0].types)
            chosen = task.measure((*found, *free)[0].types)
            assert chosen.mean <= first.mean
            for one in found:
                assert one.size_bytes <= task.budget_bytes
    assert results[0][:3] == results[1][:3] == results[2][:3]
    assert results[1][3] == 0  # nothing was measured again
    assert results[2][3] > 0


def test_the_first_layouts_of_a_search_are_shown_one_by_one_and_all_teach(
    ctx, finished, monkeypatch
):
    seen: list[tuple[float, int, str]] = []

    class Record(Silent):
        def step(self, done: float, total: int, label: str) -> None:
            seen.append((done, total, label))

    spec = ctx.spec.model_copy(update={"search": SearchSettings(rounds=1)})
    here = replace(ctx, spec=spec, reporter=Record())
    taught: list[int] = []
    real = stage_search.fit_steering

    def fit(table, target, measured):  # type: ignore[no-untyped-def]
        taught.append(len(measured))
        return real(table, target, measured)

    monkeypatch.setattr(stage_search, "fit_steering", fit)
    with meter_of(here, finished) as meter:
        task, proposed = task_of(here, finished, meter)
        search(task, proposed[:1], proposed[1:])
    n = len(proposed)
    assert n > 1
    assert taught[0] == n  # also those that may not be chosen
    assert [s for s in seen if "first layouts" in s[2]] == [
        (k, n, f"first layouts, {one.label}") for k, one in enumerate(proposed)
    ]


def test_a_layout_replaces_the_best_only_beyond_the_noise(ctx, finished):
    with meter_of(ctx, finished) as meter:
        _, proposed = task_of(ctx, finished, meter)
    tokens = np.full((1, 20), 10.0)
    rng = np.random.default_rng(1)
    base = rng.lognormal(0, 1, (1, 20))
    best = Best(meter, proposed[0], Joint(base, tokens))
    noisy = base + rng.normal(0, 1, base.shape)
    noisy += (base.sum() - noisy.sum() - 0.5) / 20  # a little better, within the noise
    assert not best.offer(proposed[0], Joint(noisy, tokens))
    assert best.offer(proposed[0], Joint(base * 0.8, tokens))
    assert not best.offer(proposed[0], Joint(base * 0.1, tokens), whole=False)


def test_no_search_measures_nothing(ctx, finished):
    spec = ctx.spec.model_copy(update={"search": SearchSettings()})
    here = replace(ctx, spec=spec)
    with meter_of(here, finished) as meter:
        task, proposed = task_of(here, finished, meter)
        assert search(task, proposed, ()) == ((), {})
        assert meter.measured == 0


# What decides in the end


def test_prices_are_checked_on_what_was_measured():
    stock = {"code": 1.0, "chat": 1.0, "math": 1e-9, "tools": 0.0}
    own = {"code": 0.5, "chat": 1.2, "math": 5e-9, "tools": 1.0}
    prices = {"chat": 0.1, "math": 0.1, "tools": 0.1, "none": 0.1}
    noise = {"math": 1e-8, "chat": 1e-8}
    assert broken_prices(own, stock, prices, noise) == {"chat": 1.2}
    assert broken_prices(own, stock, {"chat": 0.25}, noise) == {}


def test_reasons_to_keep_stock():
    assert reason_to_keep_stock(Interval(0.5, 0.4, 0.6, 9), {}) == ""
    assert "breaks the price" in reason_to_keep_stock(Interval(0.5, 0.4, 0.6, 9), {"chat": 1.2})
    assert "not better by more than" in reason_to_keep_stock(Interval(0.9, 0.7, 1.1, 9), {})
    assert "×1.300" in reason_to_keep_stock(Interval(1.3, 1.1, 1.5, 9), {})
    assert "too few documents" in reason_to_keep_stock(Interval(0.5, None, None, 1), {})
    assert "no KLD ratio" in reason_to_keep_stock(Interval(None, None, None, 0), {})


def test_the_layout_that_measures_best_is_taken_prices_first():
    measured = {"target": {"code": 0.5}, "mixed": {"code": 0.4}, "role-rule": {"code": 0.3}}
    none = {label: {} for label in measured}
    assert choose_best(measured, ["target", "mixed", "role-rule"], none, "code") == "role-rule"
    broken = none | {"role-rule": {"chat": 1.2}}
    assert choose_best(measured, ["target", "mixed", "role-rule"], broken, "code") == "mixed"
    every = {label: {"chat": 1.2} for label in measured}
    assert choose_best(measured, ["target", "mixed"], every, "code") == "mixed"
    same = {"target": {"code": 0.4}, "mixed": {"code": 0.4}}
    assert choose_best(same, ["target", "mixed"], none, "code") == "target"


def test_simple_layouts_may_be_chosen_where_they_keep_all_terms():
    plain, split = Terms(), Terms(side_budgets=(SideBudget("ffn_*", 10),))
    assert may_be_chosen("target", split)
    assert may_be_chosen("role-rule-mixed", plain)
    assert not may_be_chosen("role-rule-mixed", split)
    assert not may_be_chosen("uniform", plain)
    assert not may_be_chosen("honest-name", plain)
