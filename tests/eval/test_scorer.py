"""Scores and answers against an independent computation over whole sequences."""

import numpy as np
import pytest

from bitwright.engine.decoder import Decoder, DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.engine.session import Session, SessionOptions
from bitwright.eval.generation import Prompt, Sampling, generate, sample
from bitwright.eval.scorer import Scorer, target_logprobs

MESSAGES = ({"role": "user", "content": "What is 7 + 5?"},)


@pytest.fixture(scope="module")
def scorer():
    with Scorer(open_model("demo"), DecoderOptions(threads=1, slots=4)) as made:
        yield made


@pytest.fixture(scope="module")
def session():
    options = SessionOptions(threads=1, working_type="file", flash_attn=False)
    with Session(open_model("demo"), options) as made:
        yield made


def by_hand(session, context, continuation) -> tuple[float, bool]:
    tokens = np.concatenate([context, continuation]).astype(np.int32)
    logits = session.logits(tokens, [0], np.arange(len(tokens))).astype(np.float64)
    rows = logits[len(context) - 1 : -1]
    logp = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    picked = logp[np.arange(len(rows)), continuation]
    return float(picked.sum()), bool((rows.argmax(axis=1) == continuation).all())


def test_loglikelihoods_agree_with_whole_sequences_item_by_item(scorer, session):
    prompt = scorer.prompt_text(MESSAGES)
    texts = ["7 + 5 = 12\n#### 12", "7 + 5 = 13\n#### 13", "Hello", "7", "12", "Good day"]
    pairs = [scorer.encode_pair(prompt, text) for text in texts]
    pairs += [
        scorer.encode_pair("The capital of France", " is Paris."),
        scorer.encode_pair("a", "b"),
    ]
    for pair, score in zip(pairs, scorer.score(pairs), strict=True):
        expected, greedy = by_hand(session, *pair)
        assert score.logprob == pytest.approx(expected, abs=1e-4)
        assert score.greedy == greedy
        assert score.per_token.sum() == pytest.approx(score.logprob)


def test_the_order_of_requests_changes_nothing(scorer):
    prompt = scorer.prompt_text(MESSAGES)
    pairs = [scorer.encode_pair(prompt, text) for text in ("12", "a long answer", "7 + 5", "7")]
    scorer.decoder.clear()
    forth = [score.logprob for score in scorer.score(pairs)]
    back = [score.logprob for score in scorer.score(pairs[::-1])][::-1]
    assert forth == back


def test_what_does_not_fit_is_said_not_cut(scorer):
    long = np.full(600, 9, np.int32)
    (score,) = scorer.score([(long, np.array([5], np.int32))])
    assert score.too_long
    (answer,) = scorer.generate([Prompt(long, 4)])
    assert answer.finish == "too_long"
    assert answer.tokens == ()
    (answer,) = scorer.generate([Prompt(long[:510], 50)])
    assert answer.finish in ("context", "end")
    assert len(answer.tokens) <= 2


def test_rolling_scores_each_token_once_with_the_context_that_fits(scorer, session):
    ids = scorer.tokenizer.encode("word " * 600)
    total, n = scorer.rolling(ids, scorer.tokenizer.bos_id)
    assert n == len(ids)
    padded = np.concatenate([[scorer.tokenizer.bos_id], ids]).astype(np.int32)
    expected, at = 0.0, 0
    while at < len(ids):
        end = min(at + 511, len(ids)) if at == 0 else min(at + 512, len(ids))
        end = min(at + 512, len(ids))
        begin = 0 if at == 0 else max(0, end - 512)
        window = padded[begin:end]
        rows = np.arange(at - begin, len(window))
        logits = session.logits(window, [0], rows).astype(np.float64)
        logp = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        expected += float(logp[np.arange(len(rows)), padded[at + 1 : end + 1]].sum())
        at = end
    assert total == pytest.approx(expected, rel=1e-6)


def test_exactly_one_bos_on_every_path(scorer):
    bos = scorer.tokenizer.bos_id
    text = scorer.tokenizer.bos_text
    for given in ("Hello", f"{text}Hello", f"{text}{text}Hello"):
        ids = scorer.encode(given)
        assert ids[0] == bos
        assert (ids == bos).sum() == 1
    assert (scorer.encode(scorer.prompt_text(MESSAGES)) == bos).sum() == 1
    context, continuation = scorer.encode_pair("Hello", " there")
    assert (np.concatenate([context, continuation]) == bos).sum() == 1


def test_no_bos_where_the_model_wants_none(scorer, monkeypatch):
    monkeypatch.setattr(scorer.tokenizer, "adds_bos", False)
    assert scorer.tokenizer.bos_id not in scorer.encode("Hello").tolist()


def test_a_pair_spells_the_text_and_a_border_token_counts_as_continuation(scorer):
    context, continuation = scorer.encode_pair("retur", "n value")
    whole = scorer.encode("return value")
    np.testing.assert_array_equal(np.concatenate([context, continuation]), whole)
    context, continuation = scorer.encode_pair("What is ", "this")
    assert scorer.tokenizer.decode(continuation).strip() == "this"


def naive(decoder: Decoder, prompt: Prompt) -> tuple[int, ...]:
    tokens, out = prompt.tokens.tolist(), []
    while len(out) < prompt.max_tokens:
        decoder.clear()
        for _, view in decoder.rows(np.array(tokens, np.int32), len(tokens) - 1):
            out.append(int(view[-1].argmax()))
        tokens.append(out[-1])
        if decoder.is_end(out[-1]):
            break
    return tuple(out)


def test_answers_side_by_side_are_those_of_one_at_a_time(scorer):
    questions = ["What is 7 + 5?", "Reverse this list: cat, dog, fox", "What is 8 * 4?"]
    questions += ["Hello!", "Say river 3 times."]
    texts = [scorer.prompt_text(({"role": "user", "content": q},)) for q in questions]
    prompts = [Prompt(scorer.encode(text), 16) for text in texts]
    found = scorer.generate(prompts)
    with Decoder(open_model("demo"), DecoderOptions(threads=1, slots=1)) as alone:
        for prompt, answer in zip(prompts, found, strict=True):
            assert answer.tokens == naive(alone, prompt)
        assert [a.tokens for a in generate(alone, prompts)] == [a.tokens for a in found]


def test_a_stop_string_over_token_borders_ends_the_answer_before_it(scorer):
    ids = scorer.encode(scorer.prompt_text(MESSAGES))
    (free,) = scorer.generate([Prompt(ids, 32)])
    for begin in range(1, len(free.text) - 3):
        stop = free.text[begin : begin + 3]
        (answer,) = scorer.generate([Prompt(ids, 32, (stop,))])
        assert answer.finish == "stop"
        assert answer.text == free.text[: free.text.index(stop)]
        assert not answer.truncated


def test_a_token_limit_is_a_truncation(scorer):
    (answer,) = scorer.generate([Prompt(scorer.encode(scorer.prompt_text(MESSAGES)), 2)])
    assert (answer.finish, len(answer.tokens), answer.truncated) == ("length", 2, True)


def test_sampling_depends_on_its_seed_and_not_on_the_neighbours(scorer):
    ids = scorer.encode("Once")
    prompts = [Prompt(ids, 8, sampling=Sampling(1.5, seed=s)) for s in (1, 2, 1)]
    first, second, third = scorer.generate(prompts)
    assert first.tokens == third.tokens != second.tokens
    (alone,) = scorer.generate([prompts[0]])
    assert alone.tokens == first.tokens


def test_nucleus_and_top_k_keep_what_they_say():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    rng = np.random.default_rng(0)
    drawn = {sample(row, Sampling(1.0, top_p=0.7), rng) for _ in range(200)}
    assert drawn == {0, 1}
    assert {sample(row, Sampling(1.0, top_k=1), rng) for _ in range(20)} == {0}


def test_target_logprobs_are_a_softmax():
    logits = np.random.default_rng(0).normal(0, 3, (70, 11)).astype(np.float32)
    targets = np.tile(np.arange(70) % 11, (2, 1)).astype(np.int32)
    found, top = target_logprobs(logits, targets)
    exact = logits.astype(np.float64)
    exact -= np.logaddexp.reduce(exact, axis=1, keepdims=True)
    np.testing.assert_allclose(found[1], exact[np.arange(70), targets[0]], atol=1e-12)
    np.testing.assert_array_equal(top, logits.argmax(axis=1))
