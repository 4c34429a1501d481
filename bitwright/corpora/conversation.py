"""Conversations as text with scored spans, for any chat template.

A span is what the model itself would write: found by rendering each prefix of the conversation
with the header of the next assistant turn, and again with that turn. Templates that render an
earlier turn differently in a longer conversation (dropped thinking, tools moved to the last user
message) have no such prefixes; there the turn's text is looked up in the whole rendering.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwright.corpora.chat_template import ChatTemplate, Failure, Job
from bitwright.corpora.records import KIND_ASSISTANT, KIND_TOOL_CALL

Message = Mapping[str, object]
Messages = tuple[Message, ...]
Tools = tuple[Mapping[str, object], ...]

# Used when the model file has no template: ChatML if its two tokens exist, else plain lines.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_TOOLS_INTRO = (
    "You can call these functions. Answer a call with one JSON object between <tool_call> and "
    "</tool_call>."
)
_CALL_IN_TEXT = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [start, end) of a rendering; kind is an index into SPAN_KINDS."""

    start: int
    end: int
    kind: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text, without overlaps and in order of the spans."""

    text: str
    spans: tuple[Span, ...]


def render_conversation(
    template: ChatTemplate, messages: Messages, tools: Tools | None
) -> Rendering | Failure:
    """The text and what the assistant says in it; a Failure if no form of it can be rendered."""
    failure = Failure("no assistant turn")
    for form_messages, form_tools in forms(messages, tools):
        result = _render_form(template, form_messages, form_tools)
        if isinstance(result, Rendering):
            return result
        failure = result
    return failure


def forms(messages: Messages, tools: Tools | None) -> Iterator[tuple[Messages, Tools | None]]:
    """The conversation as given, then in the forms that less able templates need.

    Arguments as JSON text; tools and calls written out as text; the system message merged into
    the first user message.
    """
    has_calls = any(message.get("tool_calls") for message in messages)
    has_system = bool(messages) and messages[0]["role"] == "system"
    yield messages, tools
    if has_calls:
        yield tuple(_text_arguments(message) for message in messages), tools
    spelled = messages
    if has_calls or tools:
        spelled = _spelled_out(messages, tools)
        yield spelled, None
    if has_system or tools:
        yield _merged_system(spelled), None


def _function(call: object) -> Mapping[str, object]:
    assert isinstance(call, Mapping)
    inner = call.get("function", call)
    assert isinstance(inner, Mapping)
    return inner


def _calls(message: Message) -> Sequence[Mapping[str, object]]:
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, Sequence)
    return [_function(call) for call in calls]


def _text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {"type": "function", "function": {**call, "arguments": _json(call["arguments"])}}
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def call_text(call: Mapping[str, object]) -> str:
    """A call as text, for templates that know no tools."""
    body = {"name": call["name"], "arguments": call["arguments"]}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _spelled_out(messages: Messages, tools: Tools | None) -> Messages:
    out: list[Message] = []
    for message in messages:
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            out.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            texts = [content] if content else []
            texts += [call_text(call) for call in _calls(message)]
            out.append({"role": message["role"], "content": "\n".join(texts)})
        else:
            out.append(message)
    if not tools:
        return tuple(out)
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    block = f"{_TOOLS_INTRO}\n<tools>\n{lines}</tools>"
    if out and out[0]["role"] == "system":
        block = f"{out.pop(0)['content']}\n\n{block}"
    return ({"role": "system", "content": block}, *out)


def _merged_system(messages: Messages) -> Messages:
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
        return messages
    text = f"{messages[0]['content']}\n\n{messages[1]['content']}"
    return ({"role": "user", "content": text}, *messages[2:])


def _render_form(
    template: ChatTemplate, messages: Messages, tools: Tools | None
) -> Rendering | Failure:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    jobs = [Job(messages, tools)]
    for i in turns:
        jobs += [Job(messages[:i], tools, generate=True), Job(messages[: i + 1], tools)]
    whole, *prefixes = template.render(jobs)
    if isinstance(whole, Failure):
        return whole
    if tools and not all(str(_function(tool)["name"]) in whole for tool in tools):
        return Failure("the template leaves the tools out")
    spans: list[Span] = []
    cursor = 0
    for k, i in enumerate(turns):
        before, after = prefixes[2 * k : 2 * k + 2]
        bounds = _by_prefix(whole, before, after)
        if bounds is None or not _holds(whole[bounds[0] : bounds[1]], messages[i]):
            cursor = _after_earlier(whole, messages, i, cursor)
            bounds = _by_search(whole, messages[i], cursor)
        if bounds is None:
            return Failure("an assistant turn cannot be found in the rendered text")
        spans += _kinds(whole, bounds, messages[i])
        cursor = bounds[1]
    return Rendering(whole, tuple(spans))


def _by_prefix(whole: str, before: str | Failure, after: str | Failure) -> tuple[int, int] | None:
    """The turn lies between the two prefixes, without the line end that follows its last token."""
    if isinstance(before, Failure) or isinstance(after, Failure):
        return None
    if not (after.startswith(before) and whole.startswith(after)):
        return None
    start, end = len(before), len(after.rstrip())
    return (start, end) if start < end else None


def _holds(text: str, message: Message) -> bool:
    """Whether a span has what the message says: its content and the names of its calls."""
    content = str(message.get("content") or "").strip()
    return content in text and all(str(call["name"]) in text for call in _calls(message))


def _after_earlier(whole: str, messages: Messages, turn: int, cursor: int) -> int:
    """Where the message before a turn ends, so that its words are not taken for the answer."""
    content = str(messages[turn - 1].get("content") or "").strip() if turn else ""
    at = whole.find(content, cursor) if content else -1
    return cursor if at < 0 else at + len(content)


def _by_search(whole: str, message: Message, cursor: int) -> tuple[int, int] | None:
    """From the turn's first words to the end of its last call or of its content."""
    content = str(message.get("content") or "").strip()
    start, end = -1, cursor
    if content:
        start = whole.find(content, cursor)
        if start < 0:
            return None
        end = start + len(content)
    for call in _calls(message):
        name_at = whole.find(str(call["name"]), end)
        arguments = _json(call["arguments"])
        arguments_at = whole.find(arguments, name_at) if name_at >= 0 else -1
        if arguments_at < 0:
            return None
        start = name_at if start < 0 else start
        end = arguments_at + len(arguments)
    return (start, end) if 0 <= start < end else None


def _kinds(whole: str, bounds: tuple[int, int], message: Message) -> list[Span]:
    """Content is 'assistant'; calls with their markup, up to the end of the turn, 'tool_call'."""
    start, end = bounds
    if message.get("tool_calls"):
        content = str(message.get("content") or "").strip()
        at = whole.find(content, start, end) if content else start
        split = at + len(content) if at >= 0 else start
        spans = [Span(start, split, KIND_ASSISTANT), Span(split, end, KIND_TOOL_CALL)]
        return [span for span in spans if span.start < span.end]
    spans, at = [], start
    for match in _CALL_IN_TEXT.finditer(whole, start, end):
        spans += [
            Span(at, match.start(), KIND_ASSISTANT),
            Span(match.start(), match.end(), KIND_TOOL_CALL),
        ]
        at = match.end()
    spans.append(Span(at, end, KIND_ASSISTANT))
    return [span for span in spans if span.start < span.end]
