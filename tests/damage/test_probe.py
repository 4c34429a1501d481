"""Degrade-one probes on tiny models: values, spans, resume after a kill."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bitwright.corpora.records import Chunk
from bitwright.damage.damage_map import DamageMap, save_damage_map
from bitwright.damage.kld import make_reference, score
from bitwright.damage.ledger import Ledger, chunk_id
from bitwright.damage.pricing import packing_errors, price_types, types_to_pack
from bitwright.damage.probe import (
    REFERENCE,
    ChunkForward,
    full_forward,
    measure_damage,
    suffix_forward,
)
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.suffix import SuffixRunner
from bitwright.engine.upstream import upstream_layout
from bitwright.errors import ConfigError, EngineError, InputError
from tests.tiny import tiny_gguf

OPTIONS = SessionOptions(threads=1, n_ctx=128, working_type="file")
GOLDEN = Path(__file__).parents[1] / "golden" / "llama_cpp_demo.json"


def made_chunk(category: str, index: int, n: int = 24) -> Chunk:
    """Two documents; the first half of each is a prompt."""
    rng = np.random.default_rng([index, len(category)])
    half = n // 2
    kinds = np.tile(np.repeat([1, 2], [half // 2, half - half // 2]), 2).astype(np.uint8)
    tokens = rng.integers(0, 256, n).astype(np.int32)
    return Chunk(category, "probe", index, tokens, (0, half), ("a", "b"), kinds)


def made_chunks() -> dict[str, list[Chunk]]:
    return {"code": [made_chunk("code", i) for i in range(4)], "math": [made_chunk("math", 0)]}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("probe") / "tiny.gguf", n_layer=1)


@pytest.fixture(scope="module")
def session(model_path: Path) -> Iterator[Session]:
    with Session(open_model(model_path), OPTIONS) as opened:
        yield opened


class Counting:
    """Full forward passes that remember which probes were run."""

    def __init__(self) -> None:
        self.probed: list[tuple[str, str, str]] = []

    @contextmanager
    def __call__(self, session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
        with full_forward(session, chunk) as forward:

            def probe(name: str, type_name: str, packed: np.ndarray) -> np.ndarray:
                self.probed.append((chunk.category, chunk_id(chunk), name))
                return forward.probe(name, type_name, packed)

            yield ChunkForward(forward.reference, probe)


def measured(session: Session, path: Path, **options: object) -> DamageMap:
    with Ledger(path, "key") as ledger:
        packer = Packer(session.model, None)
        return measure_damage(session, packer, made_chunks(), ledger, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole_map(session: Session, tmp_path_factory: pytest.TempPathFactory) -> DamageMap:
    return measured(session, tmp_path_factory.mktemp("ledger") / "l.sqlite")


def test_values_are_those_of_one_swapped_tensor(session: Session, whole_map: DamageMap) -> None:
    name = "blk.0.ffn_down.weight"
    packed = Packer(session.model, None).pack(name, "Q2_K")
    klds, scored = [], []
    for chunk in made_chunks()["code"]:
        batch = (chunk.tokens, chunk.starts, chunk.rows())
        reference = session.logits(*batch).astype(np.float64)
        with session.swapped(name, "Q2_K", packed):
            other = session.logits(*batch).astype(np.float64)
        p, q = (z - np.log(np.exp(z).sum(1, keepdims=True)) for z in (reference, other))
        klds.append((np.exp(p) * (p - q)).sum(1))
        scored.append(chunk.scored())
    kld, mask = np.concatenate(klds), np.concatenate(scored)
    assert 0 < mask.sum() < len(mask)
    rows = whole_map.rows[
        (whole_map.rows["tensor"] == name) & (whole_map.rows["category"] == "code")
    ].set_index("span")
    assert rows.loc["overall", "kld_nats"] == pytest.approx(kld.mean(), rel=1e-4)
    assert rows.loc["scored", "kld_nats"] == pytest.approx(kld[mask].mean(), rel=1e-4)
    assert rows.loc["overall", "n_tokens"] == len(kld)
    by_chunk = np.array([part.mean() for part in klds])  # equal sizes
    assert rows.loc["overall", "se"] == pytest.approx(by_chunk.std(ddof=1) / 2, rel=1e-3)


def test_every_quantizable_weight_is_measured_in_graph_order(
    session: Session, whole_map: DamageMap
) -> None:
    assert whole_map.tensors == session.weights  # the tiny model has no other executed weight
    assert len(whole_map.rows) == len(session.weights) * 2 * 2
    assert (whole_map.rows["type"] == "Q2_K").all()
    assert (whole_map.rows["kld_nats"] > 0).all()
    assert whole_map.categories == ("code", "math")
    assert whole_map.se_method == {"code": "chunks", "math": "tokens"}
    assert whole_map.noise_floor == {"code": 0.0, "math": 0.0}


def test_suffix_probes_give_the_same_map(
    session: Session, whole_map: DamageMap, tmp_path: Path
) -> None:
    with SuffixRunner(session) as runner:
        found = measured(session, tmp_path / "l.sqlite", open_chunk=suffix_forward(runner))
        assert runner.suffix_passes > 0
    pd.testing.assert_frame_equal(found.rows, whole_map.rows, check_exact=True)
    assert found.noise_floor == whole_map.noise_floor


def test_the_session_ends_at_its_reference(session: Session, tmp_path: Path) -> None:
    chunk = made_chunk("code", 9)
    before = session.logits(chunk.tokens, chunk.starts, chunk.rows()).copy()
    measured(session, tmp_path / "l.sqlite", tensors=["blk.0.attn_v.weight"])
    after = session.logits(chunk.tokens, chunk.starts, chunk.rows())
    assert (before == after).all()


KILLED = """
import os, signal, sys
from pathlib import Path
from bitwright.engine.model_file import open_model
from bitwright.engine.session import Session
from tests.damage.test_probe import OPTIONS, measured
def stop(done, total, label):
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
with Session(open_model(sys.argv[1]), OPTIONS) as session:
    measured(session, Path(sys.argv[2]), progress=stop)
"""


def test_a_killed_run_goes_on_and_ends_with_the_same_map(
    model_path: Path, session: Session, whole_map: DamageMap, tmp_path: Path
) -> None:
    path, finished = tmp_path / "l.sqlite", 11
    arguments = [sys.executable, "-c", KILLED, str(model_path), str(path), str(finished)]
    done = subprocess.run(arguments, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    with Ledger(path, "key") as ledger:
        before = {
            (category, chunk_id(chunk), name)
            for category, chunks in made_chunks().items()
            for chunk in chunks
            for name, _ in ledger.probes(chunk_id(chunk), category)
            if name != REFERENCE
        }
    assert len(before) == finished
    counting = Counting()
    seen: list[tuple[int, int]] = []
    resumed = measured(
        session,
        path,
        open_chunk=counting,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    total = 5 * len(session.weights)
    assert before.isdisjoint(counting.probed)
    assert len(counting.probed) == len(set(counting.probed)) == total - finished
    assert seen[-1] == (total, total)
    assert seen[0][0] in (finished, finished + 1)
    pd.testing.assert_frame_equal(resumed.rows, whole_map.rows, check_exact=True)
    for name, found in (("a", whole_map), ("b", resumed)):
        (tmp_path / name).mkdir()
        save_damage_map(found, tmp_path / name)
    files = [sorted(p.read_bytes() for p in (tmp_path / n).iterdir()) for n in "ab"]
    assert files[0] == files[1]


def test_another_type_and_one_more_category_cost_only_what_is_missing(
    session: Session, tmp_path: Path
) -> None:
    path, counting = tmp_path / "l.sqlite", Counting()
    tensors = ["blk.0.attn_q.weight", "blk.0.ffn_up.weight"]
    few = {"code": made_chunks()["code"][:1]}
    packer = Packer(session.model, None)
    with Ledger(path, "key") as ledger:
        options = {"tensors": tensors, "open_chunk": counting}
        measure_damage(session, packer, few, ledger, **options)  # type: ignore[arg-type]
        assert len(counting.probed) == 2
        more = few | {"math": made_chunks()["math"]}
        measure_damage(session, packer, more, ledger, **options)  # type: ignore[arg-type]
        assert len(counting.probed) == 4
        other = measure_damage(session, packer, more, ledger, probe_type="q3_k", **options)  # type: ignore[arg-type]
        assert len(counting.probed) == 8
    assert other.types() == dict.fromkeys(tensors, ("Q3_K",))
    assert other.probe_type == "Q3_K"


def test_rows_that_do_not_fit_take_the_fallback_and_experts_are_measured(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "moe.gguf", n_layer=1, n_embd=64, n_ff=256, n_expert=4, n_vocab=288)
    with Session(open_model(path), OPTIONS) as session:
        found = measured(session, tmp_path / "l.sqlite")
    types = found.types()
    assert types["blk.0.ffn_gate_exps.weight"] == ("Q4_0",)  # rows of 64
    assert types["blk.0.ffn_down_exps.weight"] == ("Q2_K",)  # rows of 256
    assert "blk.0.ffn_gate_inp.weight" not in types  # routers stay
    assert (found.rows["kld_nats"] > 0).all()


def test_a_map_can_be_priced(session: Session, whole_map: DamageMap) -> None:
    offered = dict.fromkeys(whole_map.tensors, ("Q3_K", "Q4_K", "Q6_K", "F16"))
    packer = Packer(session.model, None, threads=2)
    errors = packing_errors(packer, types_to_pack(whole_map, offered), max_rows=16)
    table = price_types(whole_map, errors, offered)
    assert (np.diff(table.nats[:, :3], axis=1) < 0).all()
    assert (table.nats[:, 3] == 0).all()
    assert not table.measured.any()


def test_a_broken_probe_is_named(session: Session, tmp_path: Path) -> None:
    @contextmanager
    def broken(session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
        with full_forward(session, chunk) as forward:

            def probe(name: str, type_name: str, packed: np.ndarray) -> np.ndarray:
                logits = forward.probe(name, type_name, packed).copy()
                logits[2, 5] = np.nan
                return logits

            yield ChunkForward(forward.reference, probe)

    with pytest.raises(
        EngineError, match=r"blk\.0\.attn_q.* at Q2_K, code chunk 0: row 2 .*token 5"
    ):
        measured(session, tmp_path / "l", open_chunk=broken, tensors=["blk.0.attn_q.weight"])


def breaking(*names: str, times: int = 1000) -> object:
    """Full passes whose logits are broken for some tensors, so many times."""
    left = dict.fromkeys(names, times)

    @contextmanager
    def open_chunk(session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
        with full_forward(session, chunk) as forward:

            def probe(name: str, type_name: str, packed: np.ndarray) -> np.ndarray:
                logits = forward.probe(name, type_name, packed).copy()
                if left.get(name, 0):
                    left[name] -= 1
                    logits[0, 0] = np.inf
                return logits

            yield ChunkForward(forward.reference, probe)

    return open_chunk


def test_one_broken_result_is_measured_again(
    session: Session, whole_map: DamageMap, tmp_path: Path
) -> None:
    name = "blk.0.attn_q.weight"
    found = measured(session, tmp_path / "l", open_chunk=breaking(name, times=1))
    assert found.failed == ()
    pd.testing.assert_frame_equal(found.rows, whole_map.rows, check_exact=True)


def test_a_tensor_that_stays_broken_is_left_out_and_named(
    session: Session, whole_map: DamageMap, tmp_path: Path
) -> None:
    name = "blk.0.attn_q.weight"
    found = measured(session, tmp_path / "l", open_chunk=breaking(name))
    assert found.failed == (name,)
    assert name not in found.tensors
    assert any(name in note and "safe type" in note for note in found.notes)
    others = whole_map.rows[whole_map.rows["tensor"] != name].reset_index(drop=True)
    pd.testing.assert_frame_equal(found.rows, others, check_exact=True)
    again = Counting()
    assert measured(session, tmp_path / "l", open_chunk=again).failed == (name,)
    assert again.probed == []  # the failure is in the ledger, and no NaN is


def test_other_faults_of_the_engine_are_not_taken_for_damage(
    session: Session, tmp_path: Path
) -> None:
    @contextmanager
    def drifting(session: Session, chunk: Chunk) -> Iterator[ChunkForward]:
        with full_forward(session, chunk) as forward:

            def probe(name: str, type_name: str, packed: np.ndarray) -> np.ndarray:
                raise EngineError("the graph is another one")

            yield ChunkForward(forward.reference, probe)

    with pytest.raises(EngineError, match="code chunk 0: the graph is another one"):
        measured(session, tmp_path / "l", open_chunk=drifting)


def test_impossible_requests_are_refused(session: Session, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_norm\.weight cannot be probed"):
        measured(session, tmp_path / "l", tensors=["blk.0.attn_norm.weight"])
    with (
        Ledger(tmp_path / "l", "key") as ledger,
        pytest.raises(InputError, match="category chat has no"),
    ):
        measure_damage(session, Packer(session.model, None), {"chat": []}, ledger)


def test_scores_of_stock_q3_equal_those_of_llama_perplexity() -> None:
    golden = json.loads(GOLDEN.read_text())
    first = golden["kld_first_row"]
    rows = np.arange(first, first + golden["kld_rows"])
    chunks = [np.array(chunk, np.int32) for chunk in golden["chunks"]]
    with Session(open_model("demo"), OPTIONS) as session:
        references = [make_reference(session.logits(c, [0], rows), c[rows + 1]) for c in chunks]
        layout = upstream_layout(session.model, "Q3_K_S")
        session.apply(layout, Packer(session.model, None))
        scores = [
            score(reference, session.logits(c, [0], rows), c[rows + 1])
            for reference, c in zip(references, chunks, strict=True)
        ]
    kld = np.concatenate([s.kld for s in scores])
    expected = golden["kld"]
    # llama-perplexity stores its base log-probabilities in 16 bits.
    assert kld.mean() == pytest.approx(expected["mean_kld_nats"], rel=2e-3)
    assert np.median(kld) == pytest.approx(expected["median_kld_nats"], rel=1e-2)
    assert kld.max() == pytest.approx(expected["max_kld_nats"], rel=2e-3)
    same = np.concatenate([s.same_top1 for s in scores]).mean()
    assert 100 * same == pytest.approx(expected["same_top_percent"], abs=1e-2)
    nll = np.concatenate([s.nll for s in scores]).mean()
    assert np.exp(nll) == pytest.approx(expected["ppl"], rel=1e-3)
    nll_ref = np.concatenate([r.target_nll for r in references]).mean()
    assert np.exp(nll_ref) == pytest.approx(expected["ppl_base"], rel=1e-3)
