"""From recipe to corpus: counts, disjoint splits, refusals, storage and mixes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitwright.corpora.build import build_corpus, require_splits
from bitwright.corpora.encoding import Piece
from bitwright.corpora.generators.chatml import CHAT_TEMPLATE
from bitwright.corpora.leaks import corpus_texts, overlap
from bitwright.corpora.mix import mix_chunks, token_counts
from bitwright.corpora.packing import pack, trim
from bitwright.corpora.recipe import load_recipe, parse_recipe
from bitwright.corpora.records import SPLITS, Chunk
from bitwright.corpora.store import corpus_sha256, load_corpus, save_corpus
from bitwright.engine.model_file import open_model
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import ConfigError, InputError
from tests.corpora.fake_tokenizer import FakeTokenizer

NEED = {"calibrate": 1000, "probe": 300, "select": 300, "report": 400}


def built(name: str, seed: int = 0, need=NEED, n_ctx: int = 128):
    tokenizer = FakeTokenizer(CHAT_TEMPLATE)
    return build_corpus(load_recipe(name), tokenizer, n_ctx=n_ctx, seed=seed, need_tokens=need)


def words_recipe(folder: Path, n_documents: int, extra: str = ""):
    rng = np.random.default_rng(5)
    texts = [" ".join(f"w{i}" for i in rng.integers(0, 10**6, 40)) for _ in range(n_documents)]
    (folder / "t.txt").write_text("\n\n".join(texts))
    text = (
        f'category = "general"\n{extra}[[sources]]\nkind = "text"\npath = "t.txt"\nmin_chars = 0\n'
    )
    return parse_recipe(text, name="r.toml", folder=folder)


@pytest.mark.parametrize("name", ["chat", "math", "tool_calling", "general"])
def test_built_in_recipes_give_exactly_what_was_asked(name: str) -> None:
    corpus = built(name)
    for split, count in NEED.items():
        chunks = corpus.split(split)
        assert sum(len(chunk.tokens) for chunk in chunks) == count
        assert any(chunk.scored().any() for chunk in chunks)
    for chunk in corpus.chunks:
        assert len(chunk.tokens) <= 128
        assert len(chunk.starts) == len(chunk.documents) <= 64
        assert (chunk.tokens[list(chunk.starts)] == 256).all()
        assert (chunk.tokens == 256).sum() == len(chunk.starts)
        assert chunk.scored().shape == chunk.rows().shape == chunk.row_documents().shape
    require_splits([corpus], SPLITS)
    json.dumps(corpus.statistics, allow_nan=False)


def test_splits_share_no_document() -> None:
    corpus = built("chat")
    seen: dict[str, str] = {}
    for chunk in corpus.chunks:
        for document in chunk.documents:
            assert seen.setdefault(document, chunk.split) == chunk.split
    assert set(seen.values()) == set(SPLITS)


def test_same_seed_same_corpus_other_seed_another() -> None:
    assert corpus_sha256(built("math")) == corpus_sha256(built("math"))
    assert corpus_sha256(built("math")) != corpus_sha256(built("math", seed=1))


def test_recipe_counts_are_chunks_of_n_ctx() -> None:
    corpus = built("math", need=None, n_ctx=64)
    tokens = [sum(len(c.tokens) for c in corpus.split(split)) for split in SPLITS]
    assert tokens == [24 * 64, 4 * 64, 6 * 64, 10 * 64]


def test_too_little_text_is_refused_with_both_numbers(tmp_path: Path) -> None:
    tokenizer = FakeTokenizer()
    with pytest.raises(InputError, match=r"has \d+ tokens to calibrate on .* 256 are needed"):
        build_corpus(words_recipe(tmp_path, 1), tokenizer, n_ctx=128, seed=0)
    (tmp_path / "t.txt").write_text(" \n\n \n")
    recipe = parse_recipe(
        'category = "general"\n[[sources]]\nkind = "text"\npath = "t.txt"\n',
        name="r",
        folder=tmp_path,
    )
    with pytest.raises(InputError, match="has 0 tokens"):
        build_corpus(recipe, tokenizer, n_ctx=128, seed=0)


def test_fewer_chunks_than_asked_is_said(tmp_path: Path) -> None:
    recipe = words_recipe(tmp_path, 12, "[chunks]\ncalibrate = 100\n")
    corpus = build_corpus(recipe, FakeTokenizer(), n_ctx=128, seed=0)
    tokens = corpus.statistics["splits"]["calibrate"]["tokens"]
    assert 256 <= tokens < 12800
    note = corpus.statistics["notes"][0]
    assert "asked for 100 chunks (12800 tokens)" in note
    assert f"({tokens} tokens)" in note


def test_an_empty_split_is_named_when_it_is_needed(tmp_path: Path) -> None:
    recipe = words_recipe(
        tmp_path, 6, "[splits]\ncalibrate = 1\nprobe = 0\nselect = 0\nreport = 0\n"
    )
    corpus = build_corpus(recipe, FakeTokenizer(), n_ctx=64, seed=0)
    require_splits([corpus], ["calibrate"])
    with pytest.raises(InputError, match="general corpus has no text to score in its probe split"):
        require_splits([corpus], SPLITS)


def test_more_windows_of_few_documents_when_text_is_short(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("word here " * 3000)
    recipe = parse_recipe(
        'category = "general"\nmax_windows = 1\n[splits]\ncalibrate = 1\nprobe = 0\nselect = 0\n'
        'report = 0\n[chunks]\nprobe = 0\nselect = 0\nreport = 0\n[[sources]]\nkind = "text"\n'
        'path = "t.txt"\n',
        name="r",
        folder=tmp_path,
    )
    corpus = build_corpus(recipe, FakeTokenizer(), n_ctx=64, seed=0)
    assert sum(len(chunk.tokens) for chunk in corpus.chunks) == 24 * 64
    assert corpus.statistics["notes"] == []


def leaky(folder: Path, on_leak: str):
    rng = np.random.default_rng(6)
    common = " ".join(f"c{i}" for i in range(60))
    texts = [
        common + " " + " ".join(f"w{i}" for i in rng.integers(0, 10**6, 20)) for _ in range(30)
    ]
    (folder / "t.txt").write_text("\n\n".join(texts))
    text = (
        f'category = "general"\non_leak = "{on_leak}"\n'
        "[splits]\ncalibrate = 0.7\nprobe = 0.1\nselect = 0.1\nreport = 0.1\n"
        '[[sources]]\nkind = "text"\npath = "t.txt"\nmin_chars = 0\n'
    )
    return parse_recipe(text, name="r.toml", folder=folder)


def test_leaks_are_refused_with_names_or_dropped_and_listed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.txt:\d+ and t\.txt:\d+ \(\d+%\)"):
        build_corpus(leaky(tmp_path, "refuse"), FakeTokenizer(), n_ctx=64, seed=0)
    corpus = build_corpus(leaky(tmp_path, "drop"), FakeTokenizer(), n_ctx=32, seed=0)
    assert len(corpus.statistics["leaks"]["dropped"]) > 0
    # All documents overlap, so only the split of the one read first has any.
    assert {chunk.split for chunk in corpus.chunks} == {"calibrate"}
    with pytest.raises(InputError, match=r"'overlap with another split': [1-9]"):
        build_corpus(leaky(tmp_path, "drop"), FakeTokenizer(), n_ctx=4096, seed=0)


def test_identical_documents_are_used_once(tmp_path: Path) -> None:
    recipe = words_recipe(tmp_path, 40)
    text = (tmp_path / "t.txt").read_text()
    (tmp_path / "t.txt").write_text(text + "\n\n" + text)
    corpus = build_corpus(recipe, FakeTokenizer(), n_ctx=64, seed=0)
    assert corpus.statistics["duplicates"] > 0
    names = [d for chunk in corpus.chunks for d in chunk.documents]
    assert len(set(names)) == len({d.split("#")[0] for d in names})


def test_two_sources_by_weight(tmp_path: Path) -> None:
    text = 'category = "chat"\non_leak = "drop"\n'
    for name, weight in (("chat", 3), ("math", 1)):
        text += f'[[sources]]\nkind = "builtin"\nname = "{name}"\nweight = {weight}\n'
    recipe = parse_recipe(text, name="r", folder=tmp_path)
    corpus = build_corpus(recipe, FakeTokenizer(CHAT_TEMPLATE), n_ctx=256, seed=0)
    chat, arithmetic = (source["tokens"] for source in corpus.statistics["sources"])
    assert chat / arithmetic == pytest.approx(3, rel=0.1)


def test_options_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="n_ctx is 4"):
        built("chat", n_ctx=4)
    with pytest.raises(ConfigError, match="train"):
        built("chat", need={"train": 3})


def piece(name: str, size: int) -> Piece:
    return Piece(name, np.arange(size, dtype=np.int32), np.full(size, 2, np.uint8))


def test_packing_keeps_pieces_whole_and_chunks_bounded() -> None:
    pieces = [piece(f"d{i}", size) for i, size in enumerate([60, 50, 40, 4, 100, 30])]
    chunks = pack(pieces, category="c", split="probe", n_ctx=100, max_sequences=2)
    assert [chunk.documents for chunk in chunks] == [("d0", "d2"), ("d1", "d3"), ("d4",), ("d5",)]
    assert chunks[0].starts == (0, 60)
    assert trim(pieces, 111)[0][-1].document == "d1"
    assert sum(len(p.tokens) for p in trim(pieces, 112)[0]) == 112


def test_rows_predict_within_sequences_only() -> None:
    chunk = Chunk(
        "c",
        "probe",
        0,
        np.arange(7, dtype=np.int32),
        (0, 3),
        ("a", "b"),
        np.array([0, 1, 2, 0, 3, 4, 0], np.uint8),
    )
    assert chunk.rows().tolist() == [0, 1, 3, 4]
    assert chunk.targets().tolist() == [1, 2, 4, 5]
    assert chunk.row_kinds().tolist() == [1, 2, 3, 4]
    assert chunk.row_documents().tolist() == [0, 0, 1, 1]
    assert chunk.scored().tolist() == [False, True, True, True]


def test_saved_corpora_come_back_equal_or_are_refused(tmp_path: Path) -> None:
    corpora = [built("chat"), built("math")]
    save_corpus(corpora, tmp_path)
    first = (tmp_path / "corpus.parquet").read_bytes()
    save_corpus(corpora, tmp_path)
    assert (tmp_path / "corpus.parquet").read_bytes() == first
    assert {p.name for p in tmp_path.iterdir()} == {"corpus.json", "corpus.parquet"}
    loaded = load_corpus(tmp_path)
    for corpus in corpora:
        assert corpus_sha256(loaded[corpus.category]) == corpus_sha256(corpus)
        assert loaded[corpus.category].statistics == corpus.statistics
        assert loaded[corpus.category].chunks[0].rows().dtype == np.int64
    save_corpus([built("chat", seed=9), corpora[1]], tmp_path / "other")
    (tmp_path / "corpus.parquet").write_bytes((tmp_path / "other/corpus.parquet").read_bytes())
    with pytest.raises(InputError, match="not the one of its manifest"):
        load_corpus(tmp_path)
    (tmp_path / "corpus.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="damaged"):
        load_corpus(tmp_path)
    with pytest.raises(InputError, match="no corpus"):
        load_corpus(tmp_path / "nowhere")


def test_mix_is_exact_and_not_drowned_by_the_larger_source() -> None:
    corpora = {
        "chat": built("chat", need={**NEED, "calibrate": 2001}),
        "math": built("math", need={**NEED, "calibrate": 501}),
    }
    mixed = mix_chunks(corpora, {"chat": 0.7, "math": 0.3})
    tokens = {
        name: sum(len(c.tokens) for c in mixed if c.category == name) for name in ("chat", "math")
    }
    assert tokens["math"] == 501
    assert tokens["chat"] == 1169
    fixed = mix_chunks(corpora, {"chat": 1, "math": 1}, total_tokens=333)
    assert sum(len(c.tokens) for c in fixed) == 333
    assert all(c.starts[-1] < len(c.tokens) == len(c.kinds) for c in fixed)
    assert mix_chunks(corpora, {"chat": 1.0, "math": 0}) == corpora["chat"].split("calibrate")


def test_mix_refusals() -> None:
    corpora = {"chat": built("chat")}
    with pytest.raises(ConfigError, match="code"):
        mix_chunks(corpora, {"code": 1})
    with pytest.raises(ConfigError, match="0 or more"):
        mix_chunks(corpora, {"chat": -1})
    with pytest.raises(ConfigError, match="no category"):
        mix_chunks(corpora, {"chat": 0})
    with pytest.raises(InputError, match="needs 5000 of chat"):
        mix_chunks(corpora, {"chat": 1}, total_tokens=5000)


def test_token_counts_add_up() -> None:
    assert token_counts({"a": 1, "b": 1, "c": 1}, 100) == {"a": 34, "b": 33, "c": 33}
    assert sum(token_counts({"a": 0.1, "b": 0.2, "c": 0.7}, 12345).values()) == 12345


def test_corpora_are_plain_values() -> None:
    corpus = built("chat")
    assert replace(corpus, n_ctx=1).n_ctx == 1
    with pytest.raises(ValueError, match="train"):
        corpus.split("train")


def test_demo_model_chat_with_its_real_tokenizer() -> None:
    with Tokenizer(open_model("demo")) as tokenizer:
        assert tokenizer.chat_template == CHAT_TEMPLATE
        corpus = build_corpus(
            load_recipe("tool_calling"), tokenizer, n_ctx=256, seed=0, need_tokens=NEED
        )
        chunk = corpus.split("report")[0]
        called = tokenizer.decode(chunk.tokens[chunk.kinds == 4])
        texts = corpus_texts(corpus, tokenizer)
    assert called.startswith('<tool_call>\n{"name": "')
    assert called.endswith("}\n</tool_call><|im_end|>")
    assert (chunk.tokens == tokenizer.bos_id).sum() == len(chunk.starts)
    assert corpus.statistics["template"] == "model"
    name, text = next(iter(texts.items()))
    assert overlap(texts, {"item": text})[0].document == name
