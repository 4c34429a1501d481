"""A damage map by rounds: all text for all tensors, or racing to the layout that it decides."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.racing import (
    LEVEL,
    RaceLimits,
    RaceResult,
    Standing,
    decide,
    open_by_curve,
    race,
)
from bitwright.allocator.solver import Problem
from bitwright.corpora.records import Chunk
from bitwright.damage.collect import blocks_of, build_map, failed_pairs, known_probes
from bitwright.damage.curve import describe_curve, fit_curve
from bitwright.damage.damage_map import DamageMap
from bitwright.damage.intervals import estimate, interval
from bitwright.damage.ledger import Ledger
from bitwright.damage.pricing import DamageTable, Errors, Offered, Progress, price_types
from bitwright.damage.probe import (
    OpenChunk,
    PackedTensors,
    Work,
    probe_types,
    probed_tensors,
    run_probes,
    with_rows,
)
from bitwright.damage.rounds import Round, by_category, plan_rounds, tokens_of
from bitwright.damage.second_probes import second_probes
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.session import Session
from bitwright.errors import InputError

UNKNOWN_NATS = 1e3  # above any damage: the price of degrading what could not be measured

Pair = tuple[str, str]
Chunks = Mapping[str, Sequence[Chunk]]


@dataclass(frozen=True, slots=True)
class Probing:
    """What every probe needs. ``progress`` counts probes of the current round."""

    session: Session
    packed: PackedTensors
    ledger: Ledger
    open_chunk: OpenChunk
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Decider:
    """What a race decides on: ``target``'s damage within ``room`` bytes of the free tensors."""

    options: OptionSet
    errors: Callable[[Offered], Errors]
    target: str
    room: int


@dataclass(frozen=True, slots=True)
class MapSettings:
    """How much is measured.

    ``second``: further types of some tensors, for the type curve. ``tensors``: only these.
    """

    probe_type: str = "Q2_K"
    tensors: tuple[str, ...] | None = None
    stride: int = 1
    second: bool = True
    limits: RaceLimits = field(default_factory=RaceLimits)


@dataclass(frozen=True, slots=True)
class MeasuredMap:
    """The map; how the race ended (None for a map of fixed tokens); tokens spent on it."""

    damage_map: DamageMap
    race: RaceResult | None
    tokens: int


def measure_map(
    probing: Probing, chunks: Chunks, settings: MapSettings, decider: Decider, mode: str
) -> MeasuredMap:
    """`measure_racing` for mode 'race', else `measure_fixed`; with the fitted type curve."""
    if mode == "race":
        measured = measure_racing(probing, chunks, settings, decider)
    else:
        measured = measure_fixed(probing, chunks, settings, decider)
    found = measured.damage_map
    if not settings.second:
        return measured
    offered = {n: t for n, t in decider.options.offered.items() if n in set(found.tensors)}
    probed = found.types()
    errors = decider.errors(_with_probe(offered, {n: t[0] for n, t in probed.items()}))
    curve = fit_curve(found, errors)
    return replace(measured, damage_map=replace(found, curve=describe_curve(curve)))


def measure_fixed(
    probing: Probing, chunks: Chunks, settings: MapSettings, decider: Decider | None
) -> MeasuredMap:
    """Every tensor on all text, or as far as the limits' tokens and minutes reach.

    Text is spent chunk by chunk over all categories, so that a limit leaves an even map; the first
    chunks are always measured whole. With a decider, second probes follow.
    """
    pairs, limits = _first_pairs(probing, settings), settings.limits
    chunks = with_rows(chunks)
    rounds = plan_rounds(chunks, chunks, settings.stride)
    if settings.stride > 1:
        rounds = rounds[: max(map(len, chunks.values()))]
    limited = limits.tokens is not None or limits.minutes is not None
    started, tokens, used = time.monotonic(), 0, 0
    notes: tuple[str, ...] = ()
    for one in rounds:
        cost = tokens_of(one) * len(pairs)
        over_tokens = limits.tokens is not None and tokens + cost > limits.tokens
        over_time = limits.minutes is not None and time.monotonic() - started > 60 * limits.minutes
        if used and (over_tokens or over_time):
            notes = (f"{used} of {len(rounds)} rounds of text were measured: the budget is spent",)
            break
        # Without a limit all at once, so that progress counts all of it.
        batch = [one] if limited else rounds
        _run(probing, batch, pairs, floor=not used)
        tokens += sum(map(tokens_of, batch)) * len(pairs)
        used += len(batch)
        if not limited:
            break
    found = _map(probing, pairs, rounds[:used], settings)
    if settings.second and decider is not None:
        more = _second(found, decider)
        _run(probing, rounds[:1], more, floor=False)
        tokens += tokens_of(rounds[0]) * len(more)
        found = _map(probing, [*pairs, *more], rounds[:used], settings)
    return MeasuredMap(replace(found, notes=(*found.notes, *notes)), None, tokens)


def measure_racing(
    probing: Probing, chunks: Chunks, settings: MapSettings, decider: Decider
) -> MeasuredMap:
    """Text goes to tensors whose type is open, until the layout is stable (see `racing`).

    Every tensor is measured on one chunk of each category; the race is about the target's.
    """
    pairs = _first_pairs(probing, settings)
    rounds = plan_rounds(with_rows(chunks), (decider.target,), settings.stride)
    options = decider.options
    tensors = options.tensors
    kinds = dict(pairs)
    if unknown := sorted(set(tensors) - set(kinds)):
        raise InputError(f"{unknown[0]} is to be chosen for and is not among the probed tensors")
    more: list[Pair] = []
    measured: list[int] = []
    extra = 0
    prices = decider.errors(_with_probe(options.offered, kinds))

    def measure(number: int, names: Sequence[str]) -> None:
        nonlocal extra, more
        # The first round also measures what is not chosen for: pinned tensors belong to the map.
        wanted = pairs if not number else [(n, kinds[n]) for n in kinds if n in set(names)]
        _run(probing, [rounds[number]], wanted, floor=not number)
        if not number and settings.second:
            more = _second(_map(probing, pairs, rounds[:1], settings), decider)
            _run(probing, rounds[:1], more, floor=False)
            extra = tokens_of(rounds[0]) * len(more)
        measured.append(number)

    def standing() -> Standing:
        used = rounds[: len(measured)]
        damage_map = _map(probing, [*pairs, *more], used, settings)
        table = price_types(damage_map, prices, _known_only(options.offered, damage_map))
        problem = byte_problem(options, table, decider.target, decider.room)
        low, high = _factors(probing, [(t, kinds[t]) for t in tensors], used, decider.target)
        return Standing(problem, low, high)

    costs = [tokens_of(one) for one in rounds]
    result = race(tensors, costs, measure, standing, settings.limits)
    found = _map(probing, [*pairs, *more], rounds[: result.rounds], settings)
    tokens = result.tokens + extra
    table = price_types(found, prices, _known_only(options.offered, found))
    problem = byte_problem(options, table, decider.target, decider.room)
    ones = np.ones(len(problem.tensors))
    decisions = decide(Standing(problem, ones, ones))
    result = replace(result, by_curve=open_by_curve(problem, decisions, spreads(problem, table)))
    return MeasuredMap(replace(found, notes=(*found.notes, race_note(result))), result, tokens)


def race_note(result: RaceResult) -> str:
    """The race in a sentence: what it cost, why it ended, what is open and what that may cost."""
    part = result.possible_loss / result.predicted if result.predicted > 0 else 0.0
    names = ", ".join(name for name, _ in result.undecided[:5])
    more = f" and {len(result.undecided) - 5} more" if len(result.undecided) > 5 else ""
    open_text = f": {names}{more}" if names else ""
    curve_loss = sum(loss for _, loss in result.by_curve)
    curve_text = (
        f"; {len(result.by_curve)} depend on the type curve, up to {curve_loss:.2g} nats, which"
        " only probes at further types decide"
        if result.by_curve
        else ""
    )
    return (
        f"racing used {result.tokens:,} of {result.tokens_all:,} tokens in {result.rounds} rounds "
        f"({result.reason}); {len(result.undecided)} tensors undecided, which could cost up to "
        f"{result.possible_loss:.2g} nats ({part:.1%} of the layout's damage){open_text}"
        f"{curve_text}"
    )


def spreads(problem: Problem, table: DamageTable) -> np.ndarray:
    """Standard deviation of the logarithm of each option's price, as the type curve has it (n,)."""
    rows = {name: i for i, name in enumerate(table.tensors)}
    columns = {name: i for i, name in enumerate(table.types)}

    def one(name: str, kind: str) -> float:
        if name not in rows or kind not in columns or table.measured[rows[name], columns[kind]]:
            return 0.0
        return table.curve.log_spread(kind)

    pairs = zip((problem.tensors[i] for i in problem.owner), problem.types, strict=True)
    return np.array([one(*pair) for pair in pairs])


def _known_only(offered: Offered, damage_map: DamageMap) -> dict[str, Sequence[str]]:
    known = set(damage_map.tensors)
    return {name: types for name, types in offered.items() if name in known}


def byte_problem(options: OptionSet, table: DamageTable, target: str, room: int) -> Problem:
    """The solver's problem for one category's damage.

    A tensor that the table does not hold, since its probes failed, is held at its largest type.
    """
    column = table.categories.index(target)
    rows = {name: i for i, name in enumerate(table.tensors)}
    types = {name: i for i, name in enumerate(table.types)}

    def cost(name: str, kind: str) -> float:
        if kind == options.model.tensor(name).type:
            return 0.0
        if name not in rows:
            return 0.0 if kind == options.offered[name][-1] else UNKNOWN_NATS
        return float(table.nats[rows[name], types[kind], column])

    names = [(n, t) for n in options.tensors for t in options.offered[n]]
    counts = [len(options.offered[n]) for n in options.tensors]
    return Problem(
        tensors=options.tensors,
        owner=np.repeat(np.arange(len(options.tensors)), counts),
        types=tuple(t for _, t in names),
        cost=np.array([cost(n, t) for n, t in names]),
        size_bytes=np.array([options.option_bytes(n, t) for n, t in names], np.int64),
        budget_bytes=room,
    )


def _first_pairs(probing: Probing, settings: MapSettings) -> list[Pair]:
    names = probed_tensors(probing.session, settings.tensors)
    return probe_types(probing.session.model, names, settings.probe_type)


def _run(probing: Probing, rounds: Sequence[Round], pairs: Sequence[Pair], *, floor: bool) -> None:
    order = {name: i for i, name in enumerate(probing.session.weights)}
    sorted_pairs = sorted(pairs, key=lambda pair: order[pair[0]])
    run_probes(
        probing.session,
        probing.packed,
        [Work(category, chunk, sorted_pairs) for one in rounds for category, chunk in one],
        probing.ledger,
        open_chunk=probing.open_chunk,
        progress=probing.progress,
        floor=floor,
    )


def _map(
    probing: Probing, pairs: Sequence[Pair], rounds: Sequence[Round], settings: MapSettings
) -> DamageMap:
    kind = tensor_type(settings.probe_type).name
    notes = tuple(probing.session.notes)
    return build_map(probing.ledger, pairs, by_category(rounds), kind, notes)


def _second(damage_map: DamageMap, decider: Decider) -> list[Pair]:
    measured = set(damage_map.tensors)
    offered = {n: t for n, t in decider.options.offered.items() if n in measured}
    probed = damage_map.types()
    wanted = _with_probe(offered, {n: found[0] for n, found in probed.items()})
    return second_probes(damage_map, decider.errors(wanted), offered)


def _with_probe(offered: Offered, kinds: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The offered types of each tensor and the one that it was probed at."""
    return {name: tuple(dict.fromkeys((*types, kinds[name]))) for name, types in offered.items()}


def _factors(
    probing: Probing, pairs: Sequence[Pair], rounds: Sequence[Round], target: str
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of each tensor's paired interval, as factors of its value."""
    known = known_probes(probing.ledger, by_category(rounds)[target], target)
    failed = failed_pairs(pairs, {target: known})
    found = estimate(blocks_of(pairs, known))
    # A value not above zero has no interval of factors; its size is that of its error.
    nats = np.where(found.nats > 0, found.nats, np.nan_to_num(found.paired_se))
    nats = np.maximum(nats, np.finfo(float).tiny)
    ends = interval(nats, found.paired_se, found.n_blocks, LEVEL)
    low, high = ends.low / nats, ends.high / nats
    skip = np.array([pair in failed for pair in pairs])
    return np.where(skip, 1.0, low), np.where(skip, 1.0, high)
