"""A map by rounds on a tiny model: racing, limits, going on from the ledger."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitwright.allocator.options import build_options
from bitwright.allocator.race_map import (
    Decider,
    MapSettings,
    MeasuredMap,
    Probing,
    byte_problem,
    measure_fixed,
    measure_map,
    measure_racing,
)
from bitwright.allocator.racing import RaceLimits
from bitwright.damage.ledger import Ledger
from bitwright.damage.pricing import packing_errors, price_types
from bitwright.damage.probe import PackedTensors, full_forward, probed_tensors
from bitwright.damage.rounds import by_category, plan_rounds, tokens_of
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from tests.damage.test_probe import OPTIONS, made_chunk
from tests.tiny import tiny_gguf

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q6_K")
CHUNKS = {
    "code": [made_chunk("code", i, n=64) for i in range(4)],
    "math": [made_chunk("math", i, n=64) for i in range(2)],
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = tiny_gguf(tmp_path_factory.mktemp("race") / "tiny.gguf", n_layer=2)
    with Session(open_model(path), OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def decider(session: Session) -> Decider:
    options = build_options(
        session.model, ladder=LADDER, measured=frozenset(probed_tensors(session))
    )
    packer = Packer(session.model, None)
    room = (options.smallest_bytes + options.largest_bytes) // 2 - options.fixed_bytes
    return Decider(
        options, lambda offered: packing_errors(packer, offered, max_rows=8), "code", room
    )


def probing(session: Session, path: Path, seen: list[str] | None = None) -> Probing:
    def step(done: int, total: int, label: str) -> None:
        if seen is not None:
            seen.append(label)

    packed = PackedTensors(Packer(session.model, None))
    return Probing(session, packed, Ledger(path, "k"), full_forward, step)


def test_rounds_take_each_category_once_and_then_the_raced_one() -> None:
    rounds = plan_rounds(CHUNKS, ("code",), stride=2)
    assert [[c for c, _ in one] for one in rounds[:4]] == [["code", "math"]] + [["code"]] * 3
    assert len(rounds) == 8
    rows = [set(rounds[i][0][1].rows()) for i in (0, 4)]
    assert rows[0].isdisjoint(rows[1])  # the same chunk again, with its other rows
    assert tokens_of(rounds[0]) == 128
    assert {c: len(found) for c, found in by_category(rounds).items()} == {"code": 8, "math": 1}


def test_a_race_measures_all_once_and_some_more(
    session: Session, decider: Decider, tmp_path: Path
) -> None:
    settings = MapSettings(limits=RaceLimits(1e-4))
    with (one := probing(session, tmp_path / "l.sqlite")).ledger:
        found = measure_map(one, CHUNKS, settings, decider, "race")
    assert found.race is not None
    assert found.race.rounds > 1
    assert found.race.tokens < found.race.tokens_all
    assert set(found.damage_map.tensors) == set(probed_tensors(session))
    assert any("tensors undecided, which could cost up to" in n for n in found.damage_map.notes)
    assert {name for name, _ in found.race.by_curve} <= set(decider.options.tensors)
    assert max(len(types) for types in found.damage_map.types().values()) > 1
    assert found.damage_map.curve["n_pairs"]
    code = found.damage_map.probe_rows
    code = code[(code["span"] == "scored") & (code["category"] == "code")]
    assert code["n_tokens"].nunique() > 1  # some were measured on more text
    assert (code["kld_nats"] > 0).all()


def test_a_race_goes_on_from_its_ledger(session: Session, decider: Decider, tmp_path: Path) -> None:
    def run(seen: list[str] | None, limits: RaceLimits) -> MeasuredMap:
        settings = MapSettings(second=False, limits=limits)
        with (one := probing(session, tmp_path / "l.sqlite", seen)).ledger:
            return measure_racing(one, CHUNKS, settings, decider)

    first_round = 128 * len(probed_tensors(session))
    stopped = run(None, RaceLimits(1e-4, tokens=first_round))
    assert stopped.race is not None
    assert stopped.race.rounds == 1
    run(None, RaceLimits(1e-4))
    seen: list[str] = []
    again = run(seen, RaceLimits(1e-4))
    assert seen == []  # everything was in the ledger
    assert again.race is not None
    assert again.race.rounds > 1


def test_fixed_tokens_are_spent_evenly_over_tensors(
    session: Session, decider: Decider, tmp_path: Path
) -> None:
    limits = RaceLimits(tokens=130 * len(probed_tensors(session)))
    settings = MapSettings(second=False, limits=limits)
    with (one := probing(session, tmp_path / "l.sqlite")).ledger:
        found = measure_fixed(one, CHUNKS, settings, None)
    assert found.race is None
    assert found.tokens == 128 * len(probed_tensors(session))
    assert found.damage_map.n_chunks == {"code": 1, "math": 1}
    assert any("1 of 4 rounds" in note for note in found.damage_map.notes)


def test_what_could_not_be_measured_is_held_at_its_largest_type(
    session: Session, decider: Decider, tmp_path: Path
) -> None:
    with (one := probing(session, tmp_path / "l.sqlite")).ledger:
        found = measure_fixed(one, CHUNKS, MapSettings(second=False), None).damage_map
    options = decider.options
    lost = options.tensors[0]
    offered = {n: t for n, t in options.offered.items() if n != lost}
    table = price_types(found, decider.errors(options.offered), offered)
    problem = byte_problem(options, table, "code", decider.room)
    mine = np.flatnonzero(problem.owner == 0)
    assert problem.types[mine[int(np.argmin(problem.cost[mine]))]] == "Q6_K"
    assert problem.cost[mine[0]] > problem.cost[mine.max() + 1 :].max()
