"""Groups, upgrades, experts, noise floors and the text of a map, on tiny models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bitwright.damage.damage_map import DamageMap, load_damage_map, save_damage_map
from bitwright.damage.experts import (
    coverage_lines,
    expert_bytes,
    expert_coverage,
    list_unexecuted,
    measure_experts,
)
from bitwright.damage.groups import group_lines, measure_groups, plan_groups
from bitwright.damage.kld import make_reference, score
from bitwright.damage.ledger import Ledger
from bitwright.damage.noise import (
    floor_of_repacking,
    floors_in_session,
    floors_of_formats,
    reference_of,
)
from bitwright.damage.probe import PackedTensors, measure_damage
from bitwright.damage.summary import TIDY, export_table, floor_of, plot_map, tidy_table
from bitwright.damage.upgrades import measure_upgrades
from bitwright.engine.imatrix_file import Imatrix, ImatrixEntry
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer, to_float32
from bitwright.engine.session import Session
from bitwright.engine.suffix import SuffixRunner
from bitwright.errors import ConfigError
from tests.damage.test_probe import OPTIONS, made_chunk
from tests.tiny import tiny_gguf

CHUNKS = {"code": [made_chunk("code", 0), made_chunk("code", 1)]}
EXPERTS = "blk.0.ffn_down_exps.weight"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = tiny_gguf(tmp_path_factory.mktemp("ways") / "tiny.gguf", n_layer=2)
    with Session(open_model(path), OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    path = tiny_gguf(
        tmp_path_factory.mktemp("moe") / "moe.gguf",
        **{"n_layer": 1, "n_embd": 64, "n_ff": 256, "n_expert": 4, "n_vocab": 288},
    )
    with Session(open_model(path), OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def damage_map(session: Session, tmp_path_factory: pytest.TempPathFactory) -> DamageMap:
    with Ledger(tmp_path_factory.mktemp("ways") / "l.sqlite", "k") as ledger:
        return measure_damage(session, Packer(session.model, None), CHUNKS, ledger)


def packed(session: Session) -> PackedTensors:
    return PackedTensors(Packer(session.model, None))


def mean_kld(session: Session, types: dict[str, str]) -> float:
    """Mean KLD over scored rows of all chunks with these tensors degraded, one at a time."""
    packer, total, rows = Packer(session.model, None), 0.0, 0
    for chunk in CHUNKS["code"]:
        batch = (chunk.tokens, chunk.starts, chunk.rows())
        session.restore_all()
        reference = make_reference(session.logits(*batch), chunk.targets())
        for name, type_name in types.items():
            session.set_tensor(name, type_name, packer.pack(name, type_name))
        kld = score(reference, session.logits(*batch), chunk.targets()).kld[chunk.scored()]
        total, rows = total + float(kld.sum()), rows + len(kld)
    session.restore_all()
    return total / rows


def test_bands_cut_the_depth_into_parts() -> None:
    names = [f"blk.{i}.attn_q.weight" for i in range(6)] + ["output.weight"]
    groups = plan_groups(names, bands=3)
    assert groups["attn_q 1/3"] == ("blk.0.attn_q.weight", "blk.1.attn_q.weight")
    assert groups["attn_q 3/3"] == ("blk.4.attn_q.weight", "blk.5.attn_q.weight")
    assert groups["output"] == ("output.weight",)


@pytest.mark.parametrize("partial", [True, False])
def test_a_group_is_measured_together(
    session: Session, damage_map: DamageMap, tmp_path: Path, partial: bool
) -> None:
    with Ledger(tmp_path / "l.sqlite", "k") as ledger, SuffixRunner(session) as runner:
        found = measure_groups(
            *(session, packed(session), CHUNKS, ledger),
            bands=1,
            runner=runner if partial else None,
            damage_map=damage_map,
        )
        steps: list[int] = []
        again = measure_groups(
            *(session, packed(session), CHUNKS, ledger),
            bands=1,
            damage_map=damage_map,
            progress=lambda done, *_: steps.append(done),
        )
    assert again == found
    assert steps == []
    one = next(g for g in found if g.group == "ffn_up 1/1")
    assert one.kld_nats == pytest.approx(mean_kld(session, dict.fromkeys(one.members, "Q2_K")))
    singles = damage_map.rows.set_index(["tensor", "span"])["kld_nats"]
    total = sum(singles.loc[(name, "scored")] for name in one.members)
    assert one.sum_of_members == pytest.approx(total)
    assert one.ratio == pytest.approx(total / one.kld_nats)
    assert any("ffn_up 1/1" in line and "sum of members" in line for line in group_lines(found))


@pytest.mark.parametrize("partial", [True, False])
def test_an_upgrade_is_what_one_tensor_wins_back(
    session: Session, tmp_path: Path, partial: bool
) -> None:
    with Ledger(tmp_path / "l.sqlite", "upgrades") as ledger, SuffixRunner(session) as runner:
        found = measure_upgrades(
            *(session, packed(session), CHUNKS, ledger), runner=runner if partial else None
        )
    low = dict.fromkeys(found.tensors, "Q2_K")
    name = "blk.1.ffn_down.weight"
    rows = found.rows[(found.rows["tensor"] == name) & (found.rows["span"] == "scored")]
    without = {tensor: kind for tensor, kind in low.items() if tensor != name}
    gain = mean_kld(session, low) - mean_kld(session, without)
    assert float(rows["kld_nats"].iloc[0]) == pytest.approx(gain, abs=1e-7)
    assert any("upgrade-one" in note for note in found.notes)


def some_imatrix(counts: list[float], n_per_row: int) -> Imatrix:
    entry = ImatrixEntry(
        np.ones((len(counts), n_per_row), np.float32), np.array(counts, np.float32)
    )
    return Imatrix({EXPERTS: entry}, chunk_count=10, chunk_size=100, datasets=("x",))


def test_coverage_says_how_much_text_it_would_take(experts: Session) -> None:
    model = experts.model
    found = {c.tensor: c for c in expert_coverage(some_imatrix([640, 320, 32, 80], 256), model)}
    one = found[EXPERTS]
    assert one.rare == (2,)
    assert one.unseen == ()
    assert one.tokens_needed == 2000  # twice the rows of expert 2 take twice the 1000 tokens
    assert "about 2,000 tokens" in coverage_lines([one])[0]
    missing = found["blk.0.ffn_up_exps.weight"]
    assert missing.unseen == (0, 1, 2, 3)
    assert "other text" in coverage_lines([missing])[0]
    rare = {c.tensor: c for c in expert_coverage(some_imatrix([640, 320, 0, 80], 256), model)}
    assert rare[EXPERTS].unseen == (2,)
    assert "at least" in coverage_lines([rare[EXPERTS]])[0]


def test_experts_are_listed_before_the_run(experts: Session) -> None:
    lines = list_unexecuted(experts, some_imatrix([640, 320, 32, 80], 256))
    assert any(EXPERTS in line and "not to be trusted: 2" in line for line in lines)


def test_one_expert_is_degraded_and_the_others_stay(experts: Session) -> None:
    packer = Packer(experts.model, None)
    info = experts.model.tensor(EXPERTS)
    data = expert_bytes(experts, packer, EXPERTS, "Q2_K", 1)
    before, after = (
        to_float32(raw, experts.working_type, info.n_elements).reshape(4, -1)
        for raw in (experts.model.raw(EXPERTS), data)
    )
    assert np.array_equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not np.array_equal(before[1], after[1])
    with pytest.raises(ConfigError, match="give 0 to 3"):
        expert_bytes(experts, packer, EXPERTS, "Q2_K", 4)


def test_damage_of_experts_adds_up_and_rare_ones_are_flagged(experts: Session) -> None:
    packer = Packer(experts.model, some_imatrix([640, 320, 32, 80], 256))
    found = measure_experts(experts, packer, CHUNKS["code"], EXPERTS)
    assert [one.expert for one in found] == [0, 1, 2, 3]
    assert [one.trusted for one in found] == [True, True, False, True]
    assert max(one.kld_nats for one in found) > 0
    subset = measure_experts(experts, packer, CHUNKS["code"], EXPERTS, experts=[3])
    assert subset[0].kld_nats == pytest.approx(found[3].kld_nats)


def test_floors_of_the_same_reference_are_small_and_named(session: Session) -> None:
    chunk = CHUNKS["code"][0]
    found = floors_in_session(session, chunk)
    assert {"2 threads", "flash attention on", "flash attention off"} == set(found)
    assert max(found.values()) < 1e-3
    formats = floors_of_formats(
        session.model, OPTIONS, session.working_type, chunk, reference_of(session, chunk)
    )
    assert list(formats) == ["BF16 instead of F16"]
    assert formats["BF16 instead of F16"] > 0
    assert floor_of_repacking(session.model, OPTIONS, 1, chunk) == {}


def test_repacking_is_measured_on_a_quantized_file(session: Session, tmp_path: Path) -> None:
    from bitwright.engine.upstream import upstream_quantize

    path = tmp_path / "q4_0.gguf"
    upstream_quantize(session.model, path, "Q4_0", None)
    model = open_model(path, allow_requantize=True)
    found = floor_of_repacking(model, OPTIONS, 1, CHUNKS["code"][0])
    assert list(found) == ["CPU repacking"]
    assert floors_of_formats(model, OPTIONS, "Q4_0", CHUNKS["code"][0], None) == {}  # type: ignore[arg-type]


def test_values_under_a_floor_are_shown_as_such(damage_map: DamageMap) -> None:
    values = damage_map.probe_rows["kld_nats"]
    raised = replace(damage_map, floors={"flash attention off": float(values.median())})
    assert floor_of(raised, "code") == pytest.approx(values.median())
    text = plot_map(raised, "code", worst=99)
    assert "·" in text
    assert "under the noise floor" in text
    assert "under the noise floor" not in plot_map(damage_map, "code", worst=99)


def test_the_tidy_table_has_the_agreed_columns(damage_map: DamageMap, tmp_path: Path) -> None:
    table = tidy_table(damage_map)
    assert tuple(table.columns) == TIDY
    assert len(table) == len(damage_map.tensors)
    csv = pd.read_csv(export_table(damage_map, tmp_path / "t.csv"))
    parquet = pd.read_parquet(export_table(damage_map, tmp_path / "t.parquet"))
    assert np.allclose(csv["kld_nats"], parquet["kld_nats"])


def test_what_was_found_survives_saving(damage_map: DamageMap, tmp_path: Path) -> None:
    changed = replace(damage_map, failed=("x",), floors={"2 threads": 0.0}, curve={"exponent": 1.0})
    save_damage_map(changed, tmp_path)
    loaded = load_damage_map(tmp_path)
    assert (loaded.failed, dict(loaded.floors), dict(loaded.curve)) == (
        ("x",),
        {"2 threads": 0.0},
        {"exponent": 1.0},
    )
