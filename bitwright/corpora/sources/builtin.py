"""Text that comes with Bitwright or with Python, as documents: never the held-out side."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from bitwright.corpora.generators.arithmetic import math_sample
from bitwright.corpora.generators.chatml import CALL, CALL_END, Message, Sample, Tool
from bitwright.corpora.generators.dialogue import chat_sample
from bitwright.corpora.generators.stdlib_code import code_paths, code_text, prose_topics
from bitwright.corpora.generators.tools import tool_sample
from bitwright.corpora.recipe import BuiltinSource
from bitwright.corpora.records import Document
from bitwright.corpora.sources.files import split_text

PROSE_CHARS = 2000  # of one document of the prose source, or a little more

GENERATORS: Mapping[str, Callable[[np.random.Generator], Sample]] = {
    "chat": chat_sample,
    "math": math_sample,
    "tool_calling": tool_sample,
}


def builtin_documents(
    source: BuiltinSource, category: str, rng: np.random.Generator, skipped: Counter[str]
) -> Iterator[Document]:
    """Endless for the generators; each file or topic once, in an order drawn from ``rng``."""
    if source.name == "stdlib_code":
        return _code(category, rng, skipped)
    if source.name == "prose":
        return _prose(category, rng)
    return _generated(source.name, category, rng)


def _generated(name: str, category: str, rng: np.random.Generator) -> Iterator[Document]:
    number = 0
    while True:
        number += 1
        messages, tools = openai_form(GENERATORS[name](rng))
        yield Document(
            f"{name}:{number}", category, f"generated {name}", messages=messages, tools=tools
        )


def _code(category: str, rng: np.random.Generator, skipped: Counter[str]) -> Iterator[Document]:
    paths = code_paths()
    for i in rng.permutation(len(paths)):
        text = code_text(paths[i])
        if text is None:
            skipped["stdlib file of another kind"] += 1
        else:
            yield Document(f"stdlib/{paths[i]}", category, "Python standard library", text=text)


def _prose(category: str, rng: np.random.Generator) -> Iterator[Document]:
    """Topics in parts of a few paragraphs: some are so long that one split would get them all."""
    parts = [
        (f"pydoc/{topic}:{number}", part)
        for topic, text in prose_topics()
        for number, part in enumerate(split_text(text, None, PROSE_CHARS), start=1)
    ]
    for i in rng.permutation(len(parts)):
        name, text = parts[i]
        yield Document(name, category, "pydoc topics", text=text)


def openai_form(
    sample: Sample,
) -> tuple[tuple[Mapping[str, object], ...], tuple[Mapping[str, object], ...] | None]:
    """(messages, tools) as any chat template expects them; the demo model's gives the same text."""
    messages = tuple(_openai_message(message) for message in sample.messages)
    return messages, tuple(_openai_tool(tool) for tool in sample.tools) or None


def _openai_message(message: Message) -> Mapping[str, object]:
    content = message["content"]
    if message["role"] != "assistant" or not content.startswith(CALL):
        return message
    call = json.loads(content.removeprefix(CALL).removesuffix(CALL_END))
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def _openai_tool(tool: Tool) -> Mapping[str, object]:
    properties = {name: {"type": kind} for name, kind in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": tool.name, "parameters": parameters}}
