"""`bitwright damage`: the map of a model on a corpus, whole, by groups, by upgrades, by experts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bitwright.allocator.budget import parse_budget, resolve_budget
from bitwright.allocator.ladders import ladder
from bitwright.allocator.options import build_options
from bitwright.allocator.race_map import (
    Decider,
    MapSettings,
    MeasuredMap,
    Probing,
    measure_fixed,
    measure_map,
)
from bitwright.allocator.racing import RaceLimits
from bitwright.corpora.records import Chunk
from bitwright.corpora.store import load_corpus
from bitwright.damage.curve import Errors
from bitwright.damage.damage_map import DamageMap, load_damage_map, save_damage_map
from bitwright.damage.experts import list_unexecuted, measure_experts
from bitwright.damage.forward import choose_forward
from bitwright.damage.groups import group_lines, measure_groups
from bitwright.damage.ledger import Ledger
from bitwright.damage.noise import floors_in_session
from bitwright.damage.pricing import packing_errors
from bitwright.damage.probe import PROBE_VERSION, PackedTensors, probed_tensors
from bitwright.damage.summary import CSV, export_table, floor_lines, plot_map
from bitwright.damage.upgrades import measure_upgrades
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.errors import BitwrightError, ConfigError
from bitwright.workflows.output import Output
from bitwright.workflows.progress import Reporter
from bitwright.workflows.run_folder import METRICS_VERSION, RunFolder, key_of
from bitwright.workflows.single import ModelChoice, load_checked_imatrix, make_packer, stock_size
from bitwright.workflows.stage_damage import describe_map


@dataclass(frozen=True, slots=True)
class DamageRequest:
    """What to measure and how much of it, as the command line says.

    ``budget`` makes it a race to the layout of that size for ``target``. ``way``: 'single'
    (one tensor at a time), 'groups' (role × depth band) or 'upgrades' (all low but one).
    ``expert_tensor``: this tensor's experts, one at a time.
    """

    probe_type: str = "Q2_K"
    stride: int = 1
    minutes: float | None = None
    tokens: int | None = None
    tolerance: float = 0.02
    budget: str | None = None
    target: str | None = None
    ladder: str = "K"
    way: str = "single"
    expert_tensor: str | None = None
    export: Path | None = None

    def settings(self) -> MapSettings:
        """As the measuring functions take it."""
        return MapSettings(
            probe_type=self.probe_type,
            stride=self.stride,
            second=self.budget is not None,
            limits=RaceLimits(self.tolerance, self.tokens, self.minutes),
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    """Everything that one command works on."""

    session: Session
    packer: Packer
    ledger: Ledger
    chunks: Mapping[str, Sequence[Chunk]]
    target: str
    folder: Path
    reporter: Reporter


def damage(
    choice: ModelChoice,
    corpus_folder: Path,
    imatrix_path: Path | None,
    request: DamageRequest,
    out: Path,
    output: Output,
) -> None:
    """Measure on the corpus's probe split; goes on in the folder where it was stopped."""
    model, corpora = choice.open(), load_corpus(corpus_folder)
    found = load_checked_imatrix(imatrix_path, model)
    chunks = {category: c.split("probe") for category, c in corpora.items()}
    target = request.target or next(iter(chunks))
    if target not in chunks:
        raise ConfigError(f"--target {target}: the corpus has {', '.join(chunks)}")
    folder = RunFolder.open(out).path
    way = _WAYS.get("experts" if request.expert_tensor else request.way)
    if way is None:
        raise ConfigError(f"{request.way!r} is no way to probe: single, groups or upgrades")
    key = _key(model, found, choice, request.way)
    reporter = output.reporter()
    reporter.stage("damage", f"to {request.probe_type}")
    try:
        with ExitStack() as stack:
            packer = make_packer(model, found, choice, folder / "packed")
            session = stack.enter_context(Session(model, choice.options))
            for note in (*session.notes, *list_unexecuted(session, found)):
                reporter.note(note)
            ledger = stack.enter_context(Ledger(folder / "ledger.sqlite", key))
            opened = _Opened(session, packer, ledger, chunks, target, folder, reporter)
            facts, text = way(opened, request)
    finally:
        reporter.close()
    output.result({"path": str(out), "key": key, **facts}, text)


def _key(model: ModelFile, found: Imatrix | None, choice: ModelChoice, way: str) -> str:
    options = choice.options
    return key_of(
        PROBE_VERSION,
        model.sha256(),
        found.sha256() if found else None,
        [options.working_type, options.n_ctx, options.gpu_layers],
        METRICS_VERSION,
        # Upgrades give rows of the same form that mean something else.
        way if way == "upgrades" else "single",
    )


def _single(opened: _Opened, request: DamageRequest) -> tuple[dict[str, Any], str]:
    first = opened.chunks[opened.target][0]
    floors = floors_in_session(opened.session, first)
    with choose_forward(opened.session, first) as forwards:
        opened.reporter.note(forwards.reason)
        probing = Probing(
            opened.session,
            PackedTensors(opened.packer),
            opened.ledger,
            forwards.open_chunk,
            opened.reporter.step,
        )
        measured = _measure(probing, opened, request)
    found = replace(measured.damage_map, floors=floors)
    return _finish(opened, request, replace(measured, damage_map=found))


def _measure(probing: Probing, opened: _Opened, request: DamageRequest) -> MeasuredMap:
    settings = request.settings()
    if request.budget is None:
        return measure_fixed(probing, opened.chunks, settings, None)
    model, packer = opened.session.model, opened.packer
    options = build_options(
        model,
        ladder=ladder(request.ladder),
        imatrix=packer.imatrix,
        measured=frozenset(probed_tensors(opened.session)),
    )
    budget = resolve_budget(parse_budget(request.budget), model, stock_size(model))
    options.require_feasible(budget)
    known: dict[tuple[str, str], float] = {}

    def errors(offered: Mapping[str, Sequence[str]]) -> Errors:
        missing = {n: [t for t in types if (n, t) not in known] for n, types in offered.items()}
        known.update(packing_errors(packer, missing, progress=opened.reporter.step))
        return known

    decider = Decider(options, errors, opened.target, budget - options.fixed_bytes)
    return measure_map(probing, opened.chunks, settings, decider, "race")


def _upgrades(opened: _Opened, request: DamageRequest) -> tuple[dict[str, Any], str]:
    first = opened.chunks[opened.target][0]
    with choose_forward(opened.session, first) as forwards:
        found = measure_upgrades(
            opened.session,
            PackedTensors(opened.packer),
            opened.chunks,
            opened.ledger,
            probe_type=request.probe_type,
            runner=forwards.runner,
            progress=opened.reporter.step,
        )
    return _finish(opened, request, MeasuredMap(found, None, 0))


def _finish(
    opened: _Opened, request: DamageRequest, measured: MeasuredMap
) -> tuple[dict[str, Any], str]:
    """Save the map and its table; what to print."""
    found = measured.damage_map
    save_damage_map(found, opened.folder)
    table = export_table(found, request.export or opened.folder / CSV)
    lines = [plot_map(found, opened.target), "", *floor_lines(found), *found.notes]
    facts = {**describe_map(measured), "table": str(table), "notes": list(found.notes)}
    return facts, "\n".join([*lines, f"{facts['tensors']} tensors in {opened.folder}"])


def _groups(opened: _Opened, request: DamageRequest) -> tuple[dict[str, Any], str]:
    first = opened.chunks[opened.target][0]
    with choose_forward(opened.session, first) as forwards:
        found = measure_groups(
            opened.session,
            PackedTensors(opened.packer),
            opened.chunks,
            opened.ledger,
            probe_type=request.probe_type,
            runner=forwards.runner,
            damage_map=_map_in(opened.folder),
            progress=opened.reporter.step,
        )
    groups = [asdict(one) | {"ratio": one.ratio} for one in found]
    return {"groups": groups}, "\n".join(group_lines(found))


def _map_in(folder: Path) -> DamageMap | None:
    """The folder's map, to compare groups with; None where there is none yet."""
    try:
        return load_damage_map(folder)
    except BitwrightError:
        return None


def _experts(opened: _Opened, request: DamageRequest) -> tuple[dict[str, Any], str]:
    assert request.expert_tensor is not None
    found = measure_experts(
        opened.session,
        opened.packer,
        opened.chunks[opened.target],
        request.expert_tensor,
        probe_type=request.probe_type,
    )
    lines = [
        f"expert {one.expert:>3} {one.kld_nats:.6f} nats, seen {one.seen_rows:.0f} rows"
        + ("" if one.trusted else ": too few to be trusted")
        for one in sorted(found, key=lambda e: -e.kld_nats)
    ]
    return {"experts": [asdict(one) for one in found]}, "\n".join(lines)


_WAYS: Mapping[str, Callable[[_Opened, DamageRequest], tuple[dict[str, Any], str]]] = {
    "single": _single,
    "groups": _groups,
    "upgrades": _upgrades,
    "experts": _experts,
}
