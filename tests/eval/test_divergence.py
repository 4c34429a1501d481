from pathlib import Path

import numpy as np
import pytest

from bitwright.errors import ConfigError, NotFiniteError
from bitwright.eval.divergence import Candidate, noise_floor, plan_blocks, score_layouts
from bitwright.eval.scores import scores_of
from bitwright.eval.suite import load_suite
from bitwright.eval.tokens import COLUMNS
from tests.eval.fakes import VOCAB, FakeSession, Stopped, make_chunk

CHUNKS = {
    "code": [make_chunk("code", i, [f"c{i}", f"c{i + 1}"]) for i in range(3)],
    "chat": [make_chunk("chat", i, [f"t{i}"], kind=3) for i in range(2)],
    "math": [],
}
FILES = [Candidate("low", {"w": "noise0.1"}, None), Candidate("high", {"w": "noise0.5"}, None)]


def run(session: FakeSession, **options: object):
    return score_layouts(session, FILES, CHUNKS, **options)


def same(a, b) -> bool:
    return a.tables.keys() == b.tables.keys() and all(
        np.array_equal(getattr(a.tables[k], name), getattr(b.tables[k], name))
        for k in a.tables
        for name in COLUMNS
    )


def test_damage_grows_with_the_noise_and_every_row_is_scored() -> None:
    result = run(FakeSession())
    low, high = result.table("low", "code"), result.table("high", "code")
    assert low.n_tokens == sum(len(c.rows()) for c in CHUNKS["code"])
    assert 0 < low.kld.mean() < high.kld.mean()
    assert np.array_equal(low.nll_ref, high.nll_ref)
    assert result.table("low", "math").n_tokens == 0


def test_likelihoods_are_those_of_the_targets() -> None:
    session = FakeSession()
    table = run(session).table("low", "code")
    chunk = CHUNKS["code"][0]
    logits = session.table[chunk.tokens[chunk.rows()]].astype(np.float64)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), chunk.targets()]
    assert np.allclose(table.nll_ref[: len(expected)], expected, atol=1e-5)


def test_a_document_in_two_chunks_is_one_document() -> None:
    table = run(FakeSession()).table("low", "code")
    assert table.documents == ("c0", "c1", "c2", "c3")
    per_document = np.bincount(table.document).tolist()
    assert per_document == [11, 22, 22, 11]


def test_blocks_fit_the_memory_cap_and_keep_every_chunk_in_order() -> None:
    rows_bytes = 4 * VOCAB * len(CHUNKS["code"][0].rows())
    blocks = plan_blocks(CHUNKS, VOCAB, 2 * rows_bytes)
    flat = [chunk for block in blocks for chunk in block.chunks]
    assert [id(c) for c in flat] == [id(c) for chunks in CHUNKS.values() for c in chunks]
    for block in blocks:
        assert sum(4 * VOCAB * len(c.rows()) for c in block.chunks) <= 2 * rows_bytes
    assert len(plan_blocks(CHUNKS, VOCAB, 1)) == 5


def test_the_block_size_does_not_change_the_result() -> None:
    assert same(run(FakeSession()), run(FakeSession(), memory_bytes=1))


def test_each_layout_is_applied_once_per_block_and_restored() -> None:
    session = FakeSession()
    run(session)
    assert session.applied == ["noise0.1", "noise0.5"]
    assert session.noise == 0.0


@pytest.mark.parametrize("die_after", [0, 1, 4, 7, 10, 14])
def test_a_killed_run_goes_on_and_ends_with_the_same_result(tmp_path: Path, die_after: int) -> None:
    options = {"store": tmp_path, "key": "model", "memory_bytes": 1}
    with pytest.raises(Stopped):
        run(FakeSession(die_after=die_after), **options)
    session = FakeSession()
    assert same(run(session, **options), run(FakeSession()))
    assert session.forwards <= 15 - die_after // 3 * 2


def test_a_finished_run_costs_no_forward_pass_and_another_key_does(tmp_path: Path) -> None:
    run(FakeSession(), store=tmp_path, key="model")
    again = FakeSession()
    seen: list[tuple[int, int, str]] = []
    run(again, store=tmp_path, key="model", progress=lambda *a: seen.append(a))
    assert again.forwards == 0
    assert seen[-1][:2] == (15, 15)
    other = FakeSession()
    run(other, store=tmp_path, key="another model")
    assert other.forwards == 15


def test_a_new_candidate_only_costs_its_own_passes_and_the_reference(tmp_path: Path) -> None:
    run(FakeSession(), store=tmp_path, key="model")
    session = FakeSession()
    more = [*FILES, Candidate("new", {"w": "noise0.2"}, None)]
    score_layouts(session, more, CHUNKS, store=tmp_path, key="model")
    assert session.applied == ["noise0.2"]
    assert session.forwards == 10


def test_the_imatrix_is_part_of_what_is_stored(tmp_path: Path) -> None:
    run(FakeSession(), store=tmp_path, key="model")
    session = FakeSession()
    other = [Candidate("low", {"w": "noise0.1"}, None, key="other imatrix")]
    score_layouts(session, other, CHUNKS, store=tmp_path, key="model")
    assert session.applied == ["noise0.1"]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_logits_that_are_no_numbers_name_file_and_chunk_and_are_not_kept(tmp_path: Path) -> None:
    files = [FILES[0], Candidate("broken", {"w": "noiseinf"}, None)]
    with pytest.raises(NotFiniteError, match=r"broken on code chunk 0: .*row"):
        score_layouts(FakeSession(), files, CHUNKS, store=tmp_path, key="k")
    session = FakeSession()
    session.table[:] = np.nan
    with pytest.raises(NotFiniteError, match="the reference on code chunk 0"):
        score_layouts(session, FILES, CHUNKS)
    assert len(list(tmp_path.glob("*.npz"))) == 1  # what was scored before it


def test_small_and_large_categories_stand_by_themselves() -> None:
    sizes = {"tiny": 1, "large": 40}
    chunks = {c: [make_chunk(c, i, [f"{c}{i}"]) for i in range(n)] for c, n in sizes.items()}
    together = score_layouts(FakeSession(), FILES, {**chunks, "empty": []})
    for category, many in chunks.items():
        alone = score_layouts(FakeSession(), FILES, {category: many})
        own = together.table("high", category)
        assert own.n_tokens == 11 * len(many)
        assert np.array_equal(own.kld, alone.table("high", category).kld)
    scores = scores_of(together, "high", load_suite("divergence"))
    assert (scores["empty"]["kld_nats"], scores["empty"]["n_tokens"]) == (None, 0)


def test_labels_must_differ() -> None:
    with pytest.raises(ConfigError, match="share a label"):
        score_layouts(FakeSession(), [FILES[0], FILES[0]], CHUNKS)


def test_progress_counts_every_forward_pass() -> None:
    seen: list[tuple[int, int, str]] = []
    run(FakeSession(), memory_bytes=1, progress=lambda *a: seen.append(a))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (15, 15)


def test_noise_floor_of_a_deterministic_engine_is_nothing() -> None:
    floor = noise_floor(FakeSession(), CHUNKS)
    assert floor["code"] == pytest.approx(0.0, abs=1e-9)
    assert floor["math"] is None
