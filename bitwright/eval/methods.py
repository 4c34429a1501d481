"""How a task's items are asked and judged: one function per method, items in, outcomes out."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bitwright.eval.generation import Generation, Prompt
from bitwright.eval.items import Item
from bitwright.eval.outcome import CORRECT, Outcome, ids_sha256
from bitwright.eval.score import Pair, Score
from bitwright.eval.scorer import Progress, Scorer
from bitwright.eval.task_suite import TaskSpec
from bitwright.eval.tool_formats import (
    LEAST,
    Call,
    Parsed,
    form_of_answers,
    format_of,
    parse_calls,
    write_calls,
)
from bitwright.eval.tool_match import judge, names_match

Tokens = NDArray[np.int32]
MEASURED = "measured"
_NUMBER = re.compile(r"####\s*(-?\d[\d,]*(?:\.\d+)?)")


@dataclass(slots=True)
class Bench:
    """A scorer with what tasks of one suite share: answers and scores that are known already.

    ``form``: of the chat template, in which calls are written. ``reads``: the one in which answers
    are read, once enough of them are there.
    """

    scorer: Scorer
    form: str
    reads: str = ""
    progress: Progress | None = None
    answers: dict[tuple[bytes, int, tuple[str, ...]], Generation] = field(default_factory=dict)
    scores: dict[tuple[bytes, bytes], Score] = field(default_factory=dict)

    @staticmethod
    def over(scorer: Scorer, progress: Progress | None = None) -> "Bench":
        """The form of tool calls is read from the chat template."""
        form = format_of(scorer.template_source) if scorer.template_style == "model" else "hermes"
        return Bench(scorer, form, progress=progress)

    def prompt(self, item: Item) -> tuple[str, Tokens]:
        """The item's prompt as text and as the ids that are sent."""
        text = self.scorer.prompt_text(item.messages, item.tools or None)
        return text, self.scorer.encode(text)

    def generate(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """Answers; a prompt that another task has asked is not asked again."""
        keys = [answer_key(prompt) for prompt in prompts]
        new = {key: p for key, p in zip(keys, prompts, strict=True) if key not in self.answers}
        found = self.scorer.generate(list(new.values()), self.progress)
        self.answers.update(zip(new, found, strict=True))
        return [self.answers[key] for key in keys]

    def score(self, requests: Sequence[Pair]) -> list[Score]:
        """Scores; a request that was asked before is not asked again."""
        keys = [score_key(pair) for pair in requests]
        new = {key: p for key, p in zip(keys, requests, strict=True) if key not in self.scores}
        found = self.scorer.score(list(new.values()), self.progress)
        self.scores.update(zip(new, found, strict=True))
        return [self.scores[key] for key in keys]


def answer_key(prompt: Prompt) -> tuple[bytes, int, tuple[str, ...]]:
    """What decides a greedy answer."""
    return prompt.tokens.tobytes(), prompt.max_tokens, prompt.stops


def score_key(pair: Pair) -> tuple[bytes, bytes]:
    """What decides a score."""
    return pair[0].tobytes(), pair[1].tobytes()


@dataclass(frozen=True, slots=True)
class Asked:
    """An item with its prompt and the model's answer."""

    item: Item
    text: str
    ids: Tokens
    answer: Generation


def ask(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Asked]:
    """Greedy answers to all items."""
    prompts = [bench.prompt(item) for item in items]
    answers = bench.generate([task_prompt(spec, ids) for _, ids in prompts])
    return [
        Asked(item, text, ids, answer)
        for item, (text, ids), answer in zip(items, prompts, answers, strict=True)
    ]


def task_prompt(spec: TaskSpec, ids: Tokens) -> Prompt:
    """How a task asks for an answer."""
    return Prompt(ids, spec.max_tokens, spec.stops)


def answered(spec: TaskSpec, asked: Asked, verdict: str, right: bool, expected: str) -> Outcome:
    """The outcome of a generated answer."""
    return Outcome(
        task=spec.name,
        item=asked.item.id,
        prompt_sha256=ids_sha256(asked.ids),
        prompt=asked.text,
        output=asked.answer.text,
        expected=expected,
        verdict=verdict,
        value=float(right),
        truncated=asked.answer.truncated,
    )


def tool_exact(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """The right calls with the right arguments, or none where none fits."""
    answers = ask(bench, spec, items)
    form = read_form(bench, spec, answers)
    out = []
    for asked in answers:
        verdict = call_verdict(asked, form)
        calls = list(asked.item.calls)
        expected = write_calls(calls, bench.form) if calls else ""
        out.append(answered(spec, asked, verdict, verdict == CORRECT, expected))
    return out


def read_form(bench: Bench, spec: TaskSpec, answers: Sequence[Asked]) -> str:
    """The form in which the task's answers are read: the spec's, or that of the answers."""
    if spec.form:
        return str(spec.form)
    calling = [(a.answer.text, tool_names(a.item)) for a in answers if a.item.gold]
    if not bench.reads and len(calling) >= LEAST:
        bench.reads = form_of_answers(bench.form, calling)
    return bench.reads or bench.form


def call_verdict(asked: Asked, form: str) -> str:
    """`correct` or the kind of failure, cut answers and prompts among them."""
    if asked.answer.finish == "too_long":
        return "too_long"
    verdict = judge(parse_calls(asked.answer.text, form), asked.item.gold)
    return "truncated" if verdict != CORRECT and asked.answer.truncated else verdict


def tool_name(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """The right functions, whatever their arguments."""
    answers = ask(bench, spec, items)
    form = read_form(bench, spec, answers)
    out = []
    for asked in answers:
        parsed = parse_calls(asked.answer.text, form)
        right = asked.answer.finish != "too_long" and names_match(parsed, asked.item.gold)
        verdict = CORRECT if right else _name_failure(asked, parsed)
        names = ", ".join(call.name for call in asked.item.calls)
        out.append(answered(spec, asked, verdict, right, names))
    return out


def _name_failure(asked: Asked, parsed: Parsed) -> str:
    if asked.answer.finish == "too_long":
        return "too_long"
    if not asked.item.gold:
        return "called_when_irrelevant"
    return "wrong_name" if parsed.status == "ok" else parsed.status


def tool_choice(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """The likeliest of the offered names where the call's name stands; several tools only.

    The names are compared with their closing quote, so a name that starts another is no shorter.
    """
    chosen = [item for item in items if has_choice(item)]
    prompts = [bench.prompt(item) for item in chosen]
    scores = bench.score(
        [
            pair
            for item, (text, _) in zip(chosen, prompts, strict=True)
            for pair in choice_pairs(bench, item, text)
        ]
    )
    out, at = [], 0
    for item, (text, ids) in zip(chosen, prompts, strict=True):
        names = tool_names(item)
        found = scores[at : at + len(names)]
        at += len(names)
        best = names[int(np.argmax([score.logprob for score in found]))]
        right = best == item.calls[0].name and not found[0].too_long
        verdict = "too_long" if found[0].too_long else CORRECT if right else "wrong_name"
        out.append(
            Outcome(
                spec.name,
                item.id,
                ids_sha256(ids),
                text,
                ", ".join(f"{n}: {s.logprob:.3f}" for n, s in zip(names, found, strict=True)),
                item.calls[0].name,
                verdict,
                float(right),
            )
        )
    return out


def has_choice(item: Item) -> bool:
    """Whether one of several tools is right."""
    return len(item.tools) > 1 and len(item.calls) == 1


def choice_pairs(bench: Bench, item: Item, prompt: str) -> list[Pair]:
    """One request for each offered tool."""
    return [_choice_pair(bench, prompt, name) for name in tool_names(item)]


def tool_names(item: Item) -> list[str]:
    """Names of the offered tools, in order."""
    names = []
    for tool in item.tools:
        function = tool.get("function", tool)
        assert isinstance(function, Mapping)
        names.append(str(function["name"]))
    return names


def _choice_pair(bench: Bench, prompt: str, name: str) -> Pair:
    whole = write_calls([Call(name, {})], bench.form)
    begin = whole.index(name)
    end = begin + len(name) + 1  # with the quote or bracket that ends the name
    return bench.scorer.encode_pair(prompt + whole[:begin], whole[begin:end])


def tool_nats(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """Negative log-likelihood of the right call, in nats per token."""
    chosen = [item for item in items if item.calls]
    prompts = [bench.prompt(item) for item in chosen]
    texts = [write_calls(list(item.calls), bench.form) for item in chosen]
    pairs = [
        call_pair(bench, item, prompt) for item, (prompt, _) in zip(chosen, prompts, strict=True)
    ]
    scores = bench.score(pairs)
    return [
        Outcome(
            spec.name,
            item.id,
            ids_sha256(np.concatenate(pair)),
            prompt,
            "" if score.too_long else f"{-score.logprob:.4f} nats",
            text,
            "too_long" if score.too_long else MEASURED,
            0.0 if score.too_long else -score.logprob,
            0.0 if score.too_long else float(len(pair[1])),
        )
        for item, (prompt, _), text, pair, score in zip(
            chosen, prompts, texts, pairs, scores, strict=True
        )
    ]


def call_pair(bench: Bench, item: Item, prompt: str) -> Pair:
    """The request for the right call."""
    return bench.scorer.encode_pair(prompt, write_calls(list(item.calls), bench.form))


def number(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """The number after '####' equals the answer."""
    out = []
    for asked in ask(bench, spec, items):
        match = _NUMBER.search(asked.answer.text)
        found = match[1].replace(",", "") if match else ""
        right = bool(found) and float(found) == float(asked.item.answer)
        wrong = "wrong_value" if found else _unanswered(asked, "no_number")
        out.append(answered(spec, asked, CORRECT if right else wrong, right, asked.item.answer))
    return out


def exact(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """The whole answer equals the right one, but for white space around it."""
    out = []
    for asked in ask(bench, spec, items):
        said = asked.answer.text.strip()
        right = said == asked.item.answer.strip()
        wrong = "wrong_answer" if said else _unanswered(asked, "empty")
        out.append(answered(spec, asked, CORRECT if right else wrong, right, asked.item.answer))
    return out


def _unanswered(asked: Asked, kind: str) -> str:
    if asked.answer.finish == "too_long":
        return "too_long"
    return "truncated" if asked.answer.truncated else kind


def bits_per_byte(bench: Bench, spec: TaskSpec, items: Sequence[Item]) -> list[Outcome]:
    """Bits that the model needs for each byte of a text it has not seen."""
    tokenizer = bench.scorer.tokenizer
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    head = np.array([start or 0], np.int32)
    pairs = [(head, tokenizer.encode(item.text, parse_special=False)) for item in items]
    scores = bench.scorer.score(pairs, bench.progress)
    return [
        Outcome(
            spec.name,
            item.id,
            ids_sha256(pair[1]),
            item.text,
            "" if score.too_long else f"{-score.logprob:.4f} nats",
            "",
            "too_long" if score.too_long else MEASURED,
            0.0 if score.too_long else -score.logprob / math.log(2),
            0.0 if score.too_long else float(len(item.text.encode())),
        )
        for item, pair, score in zip(items, pairs, scores, strict=True)
    ]


Method = Callable[[Bench, TaskSpec, Sequence[Item]], list[Outcome]]
METHODS: Mapping[str, tuple[Method, str]] = {
    "tool_exact": (tool_exact, "exact_call"),
    "tool_name": (tool_name, "right_function"),
    "tool_choice": (tool_choice, "accuracy"),
    "tool_nats": (tool_nats, "nats_per_token"),
    "number": (number, "exact_number"),
    "exact": (exact, "exact_match"),
    "bits_per_byte": (bits_per_byte, "bits_per_byte"),
}
