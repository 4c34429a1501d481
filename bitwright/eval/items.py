"""Items of the built-in tasks: the held-out side of our own generators, no network needed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from bitwright.corpora.conversation import Message
from bitwright.corpora.generators.arithmetic import math_sample
from bitwright.corpora.generators.chatml import Sample, Tool
from bitwright.corpora.generators.dialogue import chat_sample
from bitwright.corpora.generators.stdlib_code import code_files
from bitwright.corpora.generators.tools import tool_sample
from bitwright.errors import ConfigError
from bitwright.eval.tool_formats import Call
from bitwright.eval.tool_match import Gold

T = TypeVar("T")
WINDOW_CHARS = 800
IRRELEVANT_OF_20 = (0, 7, 13)  # 15 % of the items, as in the generators


@dataclass(frozen=True, slots=True)
class Item:
    """One question: what is sent, and what is right.

    `text` is plain text to be scored (code) or continued; else `messages` (and `tools`) go through
    the chat template. `gold` and `calls`: the accepted and one exact right call; both empty where
    no tool fits. `extra`: what a method of its own needs (tests of a program).
    """

    id: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, object], ...] = ()
    text: str = ""
    answer: str = ""
    gold: tuple[Gold, ...] = ()
    calls: tuple[Call, ...] = ()
    extra: Mapping[str, str] | None = None

    def own_text(self) -> str:
        """What is the item's own, for the overlap check: no system message, no tool lists."""
        said = [str(m.get("content") or "") for m in self.messages if m["role"] != "system"]
        called = [f"{call.name} {dict(call.arguments)}" for call in self.calls]
        return "\n".join([*said, self.text, self.answer, *called])


def builtin_items(category: str, limit: int, seed: int) -> list[Item]:
    """`limit` items of a category, the same for the same seed.

    Raises:
        ConfigError: the generators have no such category.
    """
    if category not in BUILTIN:
        raise ConfigError(f"builtin:{category} is none of {', '.join(sorted(BUILTIN))}")
    return list(_generated(category, limit, seed))


@lru_cache(maxsize=32)
def _generated(category: str, limit: int, seed: int) -> tuple[Item, ...]:
    """The same items are asked of file after file."""
    return tuple(BUILTIN[category](limit, np.random.default_rng(seed)))


def _tools(limit: int, rng: np.random.Generator) -> list[Item]:
    """Single requests: 15 % that no tool serves; half of the rest in a phrasing never trained."""
    out = []
    for i in range(limit or 200):
        sample = tool_sample(
            rng, heldout=True, unseen_phrasing=i % 2 == 0, irrelevant=i % 20 in IRRELEVANT_OF_20
        )
        out.append(_tool_item(f"tool-{i}", sample))
    return out


def _tool_item(name: str, sample: Sample) -> Item:
    tools = tuple(tool_schema(tool) for tool in sample.tools)
    messages = sample.messages[:-1]
    if not isinstance(sample.expected, tuple):
        return Item(name, messages, tools, answer=str(sample.messages[-1]["content"]))
    called, arguments = sample.expected
    types = {tool.name: tool.parameters for tool in sample.tools}[called]
    gold = Gold(called, {key: (value,) for key, value in arguments.items()}, types)
    return Item(name, messages, tools, gold=(gold,), calls=(Call(called, arguments),))


def tool_schema(tool: Tool) -> dict[str, object]:
    """A signature as the JSON schema that chat templates take."""
    properties = {name: {"type": kind} for name, kind in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(tool.parameters)}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}


def _math(limit: int, rng: np.random.Generator) -> list[Item]:
    samples = [math_sample(rng, heldout=True) for _ in range(limit or 200)]
    return [
        Item(f"math-{i}", s.messages[:-1], answer=str(s.expected)) for i, s in enumerate(samples)
    ]


def _chat(limit: int, rng: np.random.Generator) -> list[Item]:
    samples = [chat_sample(rng, heldout=True) for _ in range(limit or 200)]
    return [
        Item(f"chat-{i}", s.messages[:-1], answer=str(s.expected)) for i, s in enumerate(samples)
    ]


def _code(limit: int, rng: np.random.Generator) -> list[Item]:
    """Windows of held-out files, cut at line ends, spread evenly over all of them."""
    windows = [
        Item(f"{path}#{i}", text=text)
        for path, source in code_files(heldout=True)
        for i, text in enumerate(text_windows(source, WINDOW_CHARS))
    ]
    if not limit or limit >= len(windows):
        return windows
    return [windows[i * len(windows) // limit] for i in range(limit)]


def text_windows(text: str, size: int) -> list[str]:
    """Pieces of whole lines of about `size` characters; a short rest is left out."""
    windows, at = [], 0
    while len(text) - at >= size // 2:
        end = text.find("\n", min(at + size, len(text)) - 1) + 1 or len(text)
        windows.append(text[at : min(end, at + size + size // 4)])
        at = end
    return windows


BUILTIN: Mapping[str, Callable[[int, np.random.Generator], list[Item]]] = {
    "tool_calling": _tools,
    "math": _math,
    "chat": _chat,
    "code": _code,
}


def spread(items: Sequence[T], limit: int) -> list[T]:
    """`limit` items, evenly spread over all of them; all for 0."""
    if not limit or limit >= len(items):
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def halved(items: Sequence[T], half: int) -> list[T]:
    """The first or second of two fixed halves without order in their choice; all for 0."""
    if not half:
        return list(items)
    order = np.random.default_rng(len(items)).permutation(len(items))
    middle = len(items) // 2
    return [items[i] for i in sorted(order[:middle] if half == 1 else order[middle:])]
