"""Greedy and sampled generation over a decoder: several answers at once, each as if alone.

Rows that a batch needs anyway (see engine/decoder.py) carry guesses: what followed the last two
tokens earlier in the same text. A greedy answer takes the guesses that the model would have made,
so it stays token for token what one-at-a-time decoding gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.decoder import MIN_ROWS, MIN_SLOT_ROWS, Decoder, Part

Tokens = NDArray[np.int32]
Row = NDArray[np.float32]
# end: the model ended its turn; stop: a stop string; length: max_tokens; context: no room left;
# too_long: the prompt itself does not fit and nothing was generated
Finish = Literal["end", "stop", "length", "context", "too_long"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature > 0, nucleus `top_p`, `top_k` (0 = all), and the seed of this one answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with BOS as they are sent; greedy unless `sampling` is given."""

    tokens: Tokens
    max_tokens: int
    stops: tuple[str, ...] = ()
    sampling: Sampling | None = None
    special: bool = True  # control tokens are part of the text


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer's text (up to a stop string), its tokens, and why it ended."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish

    @property
    def truncated(self) -> bool:
        """Whether the model had more to say, or could not be asked."""
        return self.finish in ("length", "context", "too_long")


@dataclass(slots=True)
class _Answer:
    index: int
    prompt: Prompt
    context: list[int]
    rng: np.random.Generator | None
    new: list[int] = field(default_factory=list)
    raw: bytearray = field(default_factory=bytearray)
    finish: Finish | None = None
    text: str = ""


def generate(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    progress: Callable[[int, int], None] | None = None,
    on_start: Callable[[int, int], None] | None = None,
    on_answer: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """One generation per prompt, in their order.

    ``on_start(index, slot)`` is called when a prompt is about to be decoded in a slot, for what
    else is asked about it there; ``on_answer(index, answer)`` as soon as its answer has ended.

    Prompts that start alike are run after one another, so their common start is decoded once for
    each slot. A prompt that leaves no room for a token is `too_long`; nothing is cut from it.
    """
    out: list[Generation | None] = [None] * len(prompts)
    queue = sorted(range(len(prompts)), key=lambda i: prompts[i].tokens.tolist(), reverse=True)
    active: dict[int, _Answer] = {}
    done = 0

    def ended(answer: _Answer) -> bool:
        if answer.finish is None:
            return False
        out[answer.index] = found = _result(answer)
        if on_answer is not None:
            on_answer(answer.index, found)
        return True

    while queue or active:
        free = [slot for slot in range(decoder.n_slots) if slot not in active]
        while queue and free:
            answer = _start(queue.pop(), prompts)
            if len(answer.prompt.tokens) >= decoder.n_ctx:
                answer.finish = "too_long"
                ended(answer)
                continue
            slot = decoder.best_slot(answer.prompt.tokens, free)
            free.remove(slot)
            if on_start is not None:
                on_start(answer.index, slot)
            _take(decoder, answer, _choose(answer, _prefill(decoder, slot, answer.prompt.tokens)))
            active[slot] = answer
        active = {slot: a for slot, a in active.items() if not ended(a)}
        if active:
            _step(decoder, active)
        before, done = done, sum(item is not None for item in out)
        if progress is not None and done > before:
            progress(done, len(prompts))
    return [item for item in out if item is not None]


def _start(index: int, prompts: Sequence[Prompt]) -> _Answer:
    prompt = prompts[index]
    rng = np.random.default_rng(prompt.sampling.seed) if prompt.sampling else None
    return _Answer(index, prompt, prompt.tokens.tolist(), rng)


def _prefill(decoder: Decoder, slot: int, tokens: Tokens) -> Row:
    at = decoder.reuse(slot, tokens, len(tokens) - 1)
    row: Row | None = None
    while at < len(tokens):
        end = min(at + decoder.n_batch, len(tokens))
        if 0 < len(tokens) - end < MIN_ROWS:
            end = len(tokens) - MIN_ROWS
        view = decoder.append([Part(slot, tokens[at:end], int(end == len(tokens)))])
        row, at = (view[0] if len(view) else row), end
    assert row is not None
    return row


def _step(decoder: Decoder, active: dict[int, _Answer]) -> None:
    """One batch: each answer's last token, and guesses of what follows it."""
    rows_each = max(MIN_SLOT_ROWS, -(-MIN_ROWS // len(active)))
    parts = []
    for slot, answer in active.items():
        room = decoder.n_ctx - decoder.held(slot)
        n_guesses = min(rows_each, room) - 1
        if answer.rng is not None or not decoder.rewinds:
            n_guesses = 0
        tokens = [answer.new[-1], *_guess(answer.context, n_guesses)]
        parts.append(Part(slot, np.array(tokens, np.int32), len(tokens)))
    view = decoder.append(parts)
    at = 0
    for part, (slot, answer) in zip(parts, active.items(), strict=True):
        length = decoder.held(slot) - len(part.tokens)
        used = 0
        for row, token in zip(view[at : at + part.wanted], part.tokens, strict=True):
            if answer.finish is not None or int(token) != answer.new[-1]:
                break
            used += 1
            _take(decoder, answer, _choose(answer, row))
        decoder.cut(slot, length + used)
        at += part.wanted


def _guess(context: list[int], n: int) -> list[int]:
    """The n tokens that followed the last two tokens where they stood last; else the last one."""
    if n <= 0:
        return []
    if len(context) > 2:
        array = np.array(context[:-1], np.int32)
        hits = np.flatnonzero((array[1:] == context[-1]) & (array[:-1] == context[-2]))
        if len(hits):
            follow = context[hits[-1] + 2 : hits[-1] + 2 + n]
            return follow + [context[-1]] * (n - len(follow))
    return [context[-1]] * n


def _choose(answer: _Answer, row: Row) -> int:
    sampling = answer.prompt.sampling
    if sampling is None or answer.rng is None:
        return int(row.argmax())
    return sample(row, sampling, answer.rng)


def sample(row: Row, sampling: Sampling, rng: np.random.Generator) -> int:
    """A token drawn at the temperature, after top_k and then top_p; ties by token id."""
    logits = row.astype(np.float64) / sampling.temperature
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    p = np.exp(logits[order] - logits[order[0]])
    p /= p.sum()
    if sampling.top_p < 1:
        # the fewest tokens that reach top_p together, the one that crosses it included
        keep = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
        order, p = order[:keep], p[:keep] / p[:keep].sum()
    return int(rng.choice(order, p=p))


def _take(decoder: Decoder, answer: _Answer, token: int) -> None:
    """Add a token to the answer, and say whether that ends it."""
    answer.new.append(token)
    answer.context.append(token)
    if decoder.is_end(token):
        answer.finish = "end"
        return
    piece = decoder.piece(token, special=answer.prompt.special)
    before = len(answer.raw)
    answer.raw += piece
    if (at := _stop_at(answer.raw, answer.prompt.stops, before)) is not None:
        del answer.raw[at:]
        answer.finish = "stop"
    elif len(answer.new) >= answer.prompt.max_tokens:
        answer.finish = "length"
    elif len(answer.context) >= decoder.n_ctx:
        answer.finish = "context"


def _stop_at(raw: bytearray, stops: tuple[str, ...], before: int) -> int | None:
    """Where the first stop string begins that the last token completed, over token borders."""
    found = []
    for stop in stops:
        wanted = stop.encode()
        if wanted and (at := raw.find(wanted, max(0, before - len(wanted) + 1))) >= 0:
            found.append(at)
    return min(found, default=None)


def _result(answer: _Answer) -> Generation:
    assert answer.finish is not None
    text = bytes(answer.raw).decode("utf-8", errors="replace")
    return Generation(text, tuple(answer.new), answer.finish)
