"""Log-likelihoods and answers of a model file, from text: BOS once, borders right, nothing cut."""

from collections.abc import Callable, Sequence
from itertools import groupby
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.conversation import Message, Tools
from bitwright.engine.decoder import Decoder, DecoderOptions
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import InputError
from bitwright.eval.answer_book import AnswerBook
from bitwright.eval.generation import Generation, Prompt, generate
from bitwright.eval.memory import available_memory, fitting_slots
from bitwright.eval.prompts import Prompts
from bitwright.eval.score import TOO_LONG, Pair, Score, Tokens

Progress = Callable[[int, int], None]
ROW_BLOCK = 32  # rows in float64 at one time


class Scorer:
    """A decoder with the model's own tokenizer and chat template; a context manager.

    ``prompts``: those of another file of the same model, ``book``: where answers and scores are
    kept as they come and taken from; both are closed by their owner.
    """

    def __init__(
        self,
        model: ModelFile,
        options: DecoderOptions | None = None,
        *,
        prompts: Prompts | None = None,
        book: AnswerBook | None = None,
    ) -> None:
        self.model = model
        self.book = book
        self.prompts = Prompts(model) if prompts is None else prompts
        self._own_prompts = prompts is None
        try:
            chosen = options or DecoderOptions()
            self.decoder = Decoder(model, fitting_slots(model, chosen, available_memory()))
        except BaseException:
            self._close_prompts()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.prompts.tokenizer

    @property
    def template_source(self) -> str:
        """The chat template that prompts are rendered with."""
        return self.prompts.template_source

    @property
    def template_style(self) -> str:
        """'model' where the template is the model's own."""
        return self.prompts.template_style

    def encode(self, text: str) -> Tokens:
        """Token ids with exactly one BOS (see Prompts)."""
        return self.prompts.encode(text)

    def encode_pair(self, context: str, continuation: str) -> Pair:
        """Ids of a context and of what follows it (see Prompts)."""
        return self.prompts.encode_pair(context, continuation)

    def prompt_text(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """A conversation as the model's template writes it (see Prompts)."""
        return self.prompts.prompt_text(messages, tools)

    def score(
        self,
        requests: Sequence[Pair],
        progress: Progress | None = None,
        slot: int | None = None,
    ) -> list[Score]:
        """Scores of (context, continuation) ids, in their order.

        Requests that start alike are scored after one another, so that the common start is decoded
        once; requests that differ in the last token only share one forward pass. ``slot``: the one
        to decode in, None for any.
        """
        known = {i: s for i, pair in enumerate(requests) if (s := self._known_score(pair))}
        out = [known.get(i, TOO_LONG) for i in range(len(requests))]
        inputs = [np.concatenate(pair)[:-1].astype(np.int32) for pair in requests]

        def key(i: int) -> tuple[list[int], int]:
            return inputs[i].tolist(), len(requests[i][1])

        done = len(known)
        asked = sorted((i for i in range(len(requests)) if i not in known), key=key)
        for _, group in groupby(asked, key):
            members = list(group)
            done += len(members)
            scores = self._score_group(inputs[members[0]], [requests[i][1] for i in members], slot)
            for i, score in zip(members, scores, strict=True):
                out[i] = score
                if self.book is not None:
                    self.book.keep_score(requests[i], score)
            if progress is not None:
                progress(done, len(requests))
        return out

    def _score_group(
        self, tokens: Tokens, continuations: Sequence[Tokens], slot: int | None
    ) -> list[Score]:
        """Continuations of one length that share every token but their last."""
        n = len(continuations[0])
        if n == 0:
            return [Score(0.0, True, np.empty(0)) for _ in continuations]
        if not 0 < len(tokens) <= self.decoder.n_ctx:
            return [TOO_LONG for _ in continuations]
        first = len(tokens) - n
        if first < 0:
            raise InputError("a continuation needs at least one token before it")
        logprobs = np.empty((len(continuations), n))
        greedy = np.ones(len(continuations), np.bool_)
        for at, view in self.decoder.rows(tokens, first, slot):
            span = slice(at - first, at - first + len(view))
            targets = np.stack([c[span] for c in continuations])
            found, top = target_logprobs(view, targets)
            logprobs[:, span] = found
            greedy &= (targets == top).all(axis=1)
        return [
            Score(float(row.sum()), bool(all_top), row)
            for row, all_top in zip(logprobs, greedy, strict=True)
        ]

    def rolling(self, tokens: Tokens, prefix: int) -> tuple[float, int]:
        """(log p, tokens scored) of a whole text in windows that each end where the next begins.

        The first window starts with `prefix`; each later one sees as much context as fits, and
        every token is predicted once (as lm-eval's rolling windows with context_len 1).
        """
        total, size = 0.0, self.decoder.n_ctx
        padded = np.concatenate([np.array([prefix], np.int32), tokens.astype(np.int32)])
        at = 0  # tokens scored so far
        while at < len(tokens):
            end = min(at + size, len(tokens))
            begin = 0 if at == 0 else max(0, end - size)
            context, target = padded[begin : at + 1], padded[at + 1 : end + 1]
            total += self.score([(context, target)])[0].logprob
            at = end
        return total, len(tokens)

    def generate(
        self, prompts: Sequence[Prompt], progress: Progress | None = None
    ) -> list[Generation]:
        """Answers, in the prompts' order (see generation.py)."""
        return self._generate(prompts, progress)

    def generate_and_score(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Sequence[Pair]],
        progress: Progress | None = None,
    ) -> tuple[list[Generation], list[list[Score]]]:
        """Answers, and scores of each prompt's requests, with the prompt decoded once for both.

        The requests of a prompt start with its ids; the results are those of `score`.
        """
        scores: list[list[Score]] = [[TOO_LONG] * len(many) for many in requests]

        def ask(index: int, slot: int | None) -> None:
            scores[index] = self.score(requests[index], slot=slot)

        return self._generate(prompts, progress, ask), scores

    def _generate(
        self,
        prompts: Sequence[Prompt],
        progress: Progress | None,
        ask: Callable[[int, int | None], None] = lambda index, slot: None,
    ) -> list[Generation]:
        """``ask(index, slot)``: once for each prompt that fits, in its slot; None where its answer
        was known."""
        known = {i: a for i, prompt in enumerate(prompts) if (a := self._known_answer(prompt))}
        new = [i for i in range(len(prompts)) if i not in known]
        for index, answer in known.items():
            if answer.finish != "too_long":
                ask(index, None)

        def keep(index: int, answer: Generation) -> None:
            if self.book is not None:
                self.book.keep_answer(prompts[new[index]], answer)

        def step(done: int, _: int) -> None:
            if progress is not None:
                progress(len(known) + done, len(prompts))

        found = generate(
            self.decoder,
            [prompts[i] for i in new],
            progress=step,
            on_start=lambda index, slot: ask(new[index], slot),
            on_answer=keep,
        )
        known.update(zip(new, found, strict=True))
        return [known[i] for i in range(len(prompts))]

    def _known_answer(self, prompt: Prompt) -> Generation | None:
        return None if self.book is None else self.book.answer(prompt)

    def _known_score(self, pair: Pair) -> Score | None:
        return None if self.book is None else self.book.score(pair)

    def close(self) -> None:
        """Free the model and the template's process; a second call does nothing."""
        self.decoder.close()
        self._close_prompts()

    def _close_prompts(self) -> None:
        if self._own_prompts:
            self.prompts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def target_logprobs(
    logits: NDArray[np.float32], targets: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(log p (m, k), top token (k,)) of logits (k, n_vocab) for m lists of targets (m, k)."""
    k = len(logits)
    out = np.empty(targets.shape)
    top = logits.argmax(axis=1)
    for at in range(0, k, ROW_BLOCK):
        block = logits[at : at + ROW_BLOCK].astype(np.float64)
        block -= block.max(axis=1, keepdims=True)
        norm = np.log(np.exp(block).sum(axis=1))
        rows = np.arange(len(block))
        out[:, at : at + ROW_BLOCK] = block[rows, targets[:, at : at + ROW_BLOCK]] - norm
    return out, top
