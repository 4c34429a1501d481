from dataclasses import replace
from pathlib import Path

import numpy as np

from bitwright.eval.tokens import COLUMNS, concatenate, load_tables, save_tables
from tests.eval.synthetic import draw_pair, table


def test_tables_come_back_exactly(tmp_path: Path) -> None:
    a, _ = draw_pair(np.random.default_rng(0), 5, "lognormal")
    chat = replace(a, category="chat")
    save_tables([a, chat], tmp_path / "block.npz", "k1")
    names = {"code": a.documents, "chat": a.documents, "math": ()}
    back = load_tables(tmp_path / "block.npz", "k1", "a", names)
    assert [t.category for t in back] == ["code", "chat"]
    for name in COLUMNS:
        assert np.array_equal(getattr(back[0], name), getattr(a, name))
    assert list(tmp_path.iterdir()) == [tmp_path / "block.npz"]


def test_another_key_or_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "block.npz"
    assert load_tables(path, "k1", "a", {"code": ()}) is None
    save_tables([table(np.ones(3), [0, 0, 0])], path, "k1")
    assert load_tables(path, "k2", "a", {"code": ()}) is None
    path.write_bytes(path.read_bytes()[:100])
    assert load_tables(path, "k1", "a", {"code": ()}) is None
    path.write_bytes(b"")
    assert load_tables(path, "k1", "a", {"code": ()}) is None


def test_select_keeps_only_the_asked_spans_of_all_columns() -> None:
    given = table(np.arange(4.0), [0, 0, 1, 1], kind=np.array([1, 4, 3, 4]))
    part = given.select([4])
    assert part.kld.tolist() == [1.0, 3.0]
    assert part.document.tolist() == [0, 1]
    assert part.documents == given.documents


def test_concatenate_keeps_order() -> None:
    given = table(np.arange(4.0), [0, 0, 1, 1])
    assert concatenate([given, given]).kld.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
