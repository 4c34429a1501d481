from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitwright.corpora.records import Chunk
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import InputError
from bitwright.eval.divergence import Candidate, noise_floor, score_layouts
from bitwright.eval.files import check_same_vocabulary, score_file, verify_written
from bitwright.eval.tokens import COLUMNS
from tests.tiny import tiny_gguf

OPTIONS = SessionOptions(threads=1, n_ctx=128, working_type="file")
LADDER = ("Q3_K", "Q2_K", "Q6_K", "Q4_K", "IQ4_XS", "Q5_K", "Q8_0")


def chunk(index: int, category: str = "code") -> Chunk:
    tokens = np.random.default_rng(index).integers(0, 256, 60).astype(np.int32)
    documents = (f"{category}{index}a", f"{category}{index}b")
    return Chunk(category, "report", index, tokens, (0, 25), documents, np.full(60, 2, np.uint8))


CHUNKS = {"code": [chunk(0), chunk(1)], "chat": [chunk(2, "chat")]}


def mixed_layout(model: ModelFile) -> dict[str, str]:
    names = [t.name for t in model.tensors if is_quantizable(t, model.arch)]
    return {name: LADDER[i % len(LADDER)] for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return open_model(tiny_gguf(tmp_path_factory.mktemp("model") / "tiny-F16.gguf"))


@pytest.fixture(scope="module")
def session(model: ModelFile) -> Iterator[Session]:
    with Session(model, OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(model: ModelFile) -> ModelFile:
    out = model.path.parent / "out.gguf"
    packer = Packer(model, None)
    write_quantized(model, mixed_layout(model), out, packer=packer, ftype=12, provenance=None)
    return open_model(out, allow_requantize=True)


def test_the_written_file_gives_the_logits_of_the_layout_in_memory(
    session: Session, model: ModelFile, written: ModelFile
) -> None:
    layout = mixed_layout(model)
    packer = Packer(model, None)
    assert verify_written(session, layout, packer, written, chunk(0), options=OPTIONS) == 0.0
    other = {**layout, "blk.1.ffn_down.weight": "Q2_K"}
    assert other != layout
    assert verify_written(session, other, packer, written, chunk(0), options=OPTIONS) > 0.0


def test_a_file_scores_what_its_layout_scores_in_memory(
    session: Session, model: ModelFile, written: ModelFile, tmp_path: Path
) -> None:
    candidate = Candidate("ours", mixed_layout(model), Packer(model, None))
    in_memory = score_layouts(session, [candidate], CHUNKS)
    on_disk = score_file(
        session, written, CHUNKS, label="theirs", options=OPTIONS, store=tmp_path, key="k"
    )
    for category in CHUNKS:
        a, b = in_memory.table("ours", category), on_disk.table("theirs", category)
        assert a.kld.mean() > 1e-4
        for name in COLUMNS:
            assert np.array_equal(getattr(a, name), getattr(b, name))
    assert len(list(tmp_path.iterdir())) == 1
    both = in_memory.merged(on_disk)
    assert both.labels == ("ours", "theirs")
    assert both.table("theirs", "chat").n_tokens == 58


def test_the_reference_layout_scores_exactly_zero_and_the_session_is_restored(
    session: Session, model: ModelFile
) -> None:
    before = session.logits(chunk(0).tokens, (0, 25), chunk(0).rows()).copy()
    score_layouts(session, [Candidate("ours", mixed_layout(model), Packer(model, None))], CHUNKS)
    same = score_layouts(session, [Candidate("reference", {}, Packer(model, None))], CHUNKS)
    assert np.all(same.table("reference", "code").kld == 0.0)
    assert np.all(same.table("reference", "code").same_top1)
    assert np.array_equal(session.logits(chunk(0).tokens, (0, 25), chunk(0).rows()), before)
    assert noise_floor(session, CHUNKS) == {"code": 0.0, "chat": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_vocab": 300}, "vocabulary size is 300, the reference's is 288"),
        ({"add_bos": False}, "rule to add BOS is False, the reference's is True"),
    ],
)
def test_another_tokenizer_is_refused_with_both_values(
    session: Session, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    other = open_model(tiny_gguf(tmp_path / "other.gguf", **change))
    with pytest.raises(InputError, match="cannot be compared") as refused:
        score_file(session, other, CHUNKS, options=OPTIONS)
    assert message in str(refused.value)


def test_permuted_tokens_are_refused(model: ModelFile, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "permuted.gguf")
    data = path.read_bytes()
    data = data.replace(b"<filler_1>", b"<filler_x>").replace(b"<filler_2>", b"<filler_1>")
    path.write_bytes(data.replace(b"<filler_x>", b"<filler_2>"))
    with pytest.raises(InputError, match="token list"):
        check_same_vocabulary(model, open_model(path))


def test_another_chat_template_is_no_other_vocabulary(
    model: ModelFile, written: ModelFile, tmp_path: Path
) -> None:
    check_same_vocabulary(model, written)
    path = tiny_gguf(tmp_path / "template.gguf", chat_template="{{ messages }}")
    check_same_vocabulary(model, open_model(path))
