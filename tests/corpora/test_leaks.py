"""Hashing into splits, and what counts as a leak."""

from collections import Counter

import pytest

from bitwright.corpora.leaks import (
    LeakCheck,
    content_sha256,
    grams,
    overlap,
    own_words,
    shared,
    split_of,
    words,
)
from bitwright.corpora.records import Document

SHARES = {"calibrate": 0.4, "probe": 0.2, "select": 0.2, "report": 0.2}


def text_of(start: int, count: int) -> str:
    return " ".join(f"w{i}" for i in range(start, start + count))


def test_split_depends_on_the_words_only_and_keeps_the_shares() -> None:
    counts = Counter(split_of([f"word{i}"], SHARES) for i in range(4000))
    for split, share in SHARES.items():
        assert counts[split] / 4000 == pytest.approx(share, abs=0.03)
    assert split_of(words("Hello, World"), SHARES) == split_of(words("hello world!"), SHARES)
    assert split_of(["x"], {**SHARES, "calibrate": 0, "probe": 1, "select": 0, "report": 0}) == (
        "probe"
    )


def test_system_text_and_tools_do_not_separate_documents() -> None:
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    system = ({"role": "system", "content": "boilerplate"}, *talk)
    one, two = Document("1", "c", "s", messages=talk), Document("2", "c", "s", messages=system)
    assert own_words(one) == own_words(two)
    assert content_sha256(one) != content_sha256(two)


def test_grams_know_the_order_of_words() -> None:
    a = words(text_of(0, 13))
    assert len(grams(a)) == 1
    assert shared(grams(a), grams(a)) == 1.0
    assert shared(grams(a), grams(a[::-1])) == 0.0
    assert len(grams(words(text_of(0, 20)))) == 8
    assert len(grams(["short"])) == 1
    assert len(grams([])) == 0


def test_overlap_of_evaluation_items() -> None:
    documents = {"a": text_of(0, 60), "b": text_of(100, 60)}
    items = {
        "inside": text_of(110, 20),
        "half": text_of(40, 20) + " " + text_of(500, 20),
        "other": text_of(900, 40),
    }
    (found,) = overlap(documents, items, min_share=0.5)
    assert (found.text, found.document, found.share) == ("inside", "b", 1.0)
    assert {o.text for o in overlap(documents, items, min_share=0.1)} == {"inside", "half"}


def test_leaks_count_in_both_directions_and_only_between_splits() -> None:
    short, long = grams(words(text_of(0, 20))), grams(words(text_of(0, 2000)))
    check = LeakCheck(0.2)
    assert check.check("short", "report", short) is None
    leak = check.check("long", "calibrate", long)
    assert leak is not None
    assert (leak.text, leak.document, leak.share) == ("long", "short", 1.0)
    assert check.check("long", "report", long) is None
    other = LeakCheck(0.2)
    assert other.check("long", "calibrate", long) is None
    assert other.check("short", "report", short) is not None


def test_a_shared_licence_header_is_no_leak() -> None:
    header = text_of(0, 30)
    check = LeakCheck(0.2)
    assert check.check("a", "calibrate", grams(words(header + " " + text_of(1000, 300)))) is None
    assert check.check("b", "report", grams(words(header + " " + text_of(5000, 300)))) is None
