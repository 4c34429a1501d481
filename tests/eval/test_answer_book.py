"""Answers that are kept as they come: a stopped suite asks nothing twice, and ends the same."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.errors import StorageError
from bitwright.eval.answer_book import NAME, AnswerBook, answers_until_kept
from bitwright.eval.generation import Generation, Prompt, Sampling
from bitwright.eval.run_suite import SuiteOptions, run_suite
from bitwright.eval.score import TOO_LONG, Score
from bitwright.eval.scorer import Scorer
from bitwright.eval.task_suite import load_task_suite

PROMPT = Prompt(np.array([1, 2, 3], np.int32), 8, ("\n",))
ANSWER = Generation("grün \ufffd", (5, 6), "stop")


class Stopped(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(open_model("demo"), DecoderOptions(threads=1, n_ctx=256, slots=2)) as opened:
        yield opened


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    pair = (np.array([1, 2], np.int32), np.array([3], np.int32))
    score = Score(-1.25, True, np.array([-1.0, -0.25]))
    with AnswerBook(tmp_path / "book", "a") as book:
        assert book.answer(PROMPT) is None
        book.keep_answer(PROMPT, ANSWER)
        book.keep_score(pair, score)
        book.keep_score((pair[0], pair[0]), TOO_LONG)
    with AnswerBook(tmp_path / "book", "a") as book:
        assert book.answer(PROMPT) == ANSWER
        found, long = book.score(pair), book.score((pair[0], pair[0]))
        assert found is not None
        assert long is not None
        assert (found.logprob, found.greedy, found.too_long) == (-1.25, True, False)
        np.testing.assert_array_equal(found.per_token, score.per_token)
        assert (long.logprob, long.too_long, len(long.per_token)) == (-np.inf, True, 0)
        # The border between context and continuation is part of the question.
        moved = (np.array([1], np.int32), np.array([2, 3], np.int32))
        assert book.score(moved) is None


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([1, 2, 4], np.int32)},
        {"max_tokens": 9},
        {"stops": ()},
        {"sampling": Sampling(seed=1)},
        {"special": False},
    ],
)
def test_another_question_has_no_answer(tmp_path: Path, change: dict[str, object]) -> None:
    with AnswerBook(tmp_path / "book", "a") as book:
        book.keep_answer(PROMPT, ANSWER)
        assert book.answer(dataclasses.replace(PROMPT, **change)) is None  # type: ignore[arg-type]


def test_a_book_of_another_file_is_begun_anew(tmp_path: Path) -> None:
    with AnswerBook(tmp_path / "book", "a") as book:
        book.keep_answer(PROMPT, ANSWER)
    with AnswerBook(tmp_path / "book", "b") as book:
        assert book.answer(PROMPT) is None
    with AnswerBook(tmp_path / "book", "a") as book:
        assert book.answer(PROMPT) is None


def test_a_book_is_gone_with_its_work_and_stays_after_an_error(tmp_path: Path) -> None:
    def stopped() -> None:
        with answers_until_kept(tmp_path, "a") as book:
            book.keep_answer(PROMPT, ANSWER)
            raise Stopped

    with pytest.raises(Stopped):
        stopped()
    assert (tmp_path / NAME).is_file()
    with answers_until_kept(tmp_path, "a") as book:
        assert book.answer(PROMPT) == ANSWER
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_book_is_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_text("no database, but somebody's text\n" * 40)
    with pytest.raises(StorageError, match="cannot be used"):
        AnswerBook(path, "a")
    assert path.read_text().startswith("no database")


def test_a_stopped_suite_asks_only_what_is_missing(scorer: Scorer, tmp_path: Path) -> None:
    suite, few = load_task_suite("builtin"), SuiteOptions(limit=6)
    counters = scorer.decoder.counters
    scorer.decoder.clear()
    before = counters.decoded
    whole = run_suite(scorer, suite, few)
    all_tokens = counters.decoded - before

    def stop(done: int, total: int, name: str) -> None:
        if name == "math" and done >= 3:
            raise Stopped

    with AnswerBook(tmp_path / "book", "a") as book:
        scorer.book = book
        scorer.decoder.clear()
        with pytest.raises(Stopped):
            run_suite(scorer, suite, few, progress=stop)
    with AnswerBook(tmp_path / "book", "a") as book:
        scorer.book = book
        scorer.decoder.clear()
        before = counters.decoded
        seen: list[tuple[int, int, str]] = []
        assert run_suite(scorer, suite, few, progress=lambda *at: seen.append(at)) == whole
        rest = counters.decoded - before
        assert 0 < rest < 0.8 * all_tokens
        assert seen[-1][0] == seen[-1][1]  # known answers count as done
        before = counters.decoded
        assert run_suite(scorer, suite, few) == whole
        assert counters.decoded == before
    scorer.book = None
