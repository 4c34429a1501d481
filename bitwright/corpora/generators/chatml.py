"""The demo model's conversation format: special tokens, chat template, direct rendering."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALL_END, TOOLS, TOOLS_END = "<tool_call>", "</tool_call>", "<tools>", "</tools>"
CONTROL_TOKENS = (BOS, START, END)
USER_TOKENS = (CALL, CALL_END, TOOLS, TOOLS_END)
SPECIAL_TOKENS = CONTROL_TOKENS + USER_TOKENS

Message = Mapping[str, str]
Expected = str | int | tuple[str, Mapping[str, str | int]] | None


@dataclass(frozen=True, slots=True)
class Tool:
    """A compact signature: argument name → JSON type."""

    name: str
    parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation, and the right answer to its last turn.

    ``expected`` is the text (chat), the number (math), or (tool name, arguments); None where a
    tool conversation should end in plain text.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    expected: Expected


def turn(user: str, assistant: str) -> list[Message]:
    """One exchange as two messages."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def quote(value: str | int) -> str:
    """A JSON scalar; the generators never need escapes."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def tool_line(tool: Tool) -> str:
    """One signature line: ``{"name": ..., "parameters": {arg: type}}``."""
    args = ", ".join(f'"{name}": "{kind}"' for name, kind in tool.parameters.items())
    return f'{{"name": "{tool.name}", "parameters": {{{args}}}}}'


def call_text(name: str, arguments: Mapping[str, str | int]) -> str:
    """The assistant's tool call, as trained."""
    args = ", ".join(f'"{key}": {quote(value)}' for key, value in arguments.items())
    return f'{CALL}\n{{"name": "{name}", "arguments": {{{args}}}}}\n{CALL_END}'


def segments(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = False
) -> list[tuple[str, bool]]:
    """(text, is_target) pieces of a conversation; targets are what the assistant says."""
    out: list[tuple[str, bool]] = []
    rest = list(messages)
    system = rest.pop(0)["content"] if rest and rest[0]["role"] == "system" else ""
    if tools:
        block = TOOLS + "\n" + "".join(tool_line(tool) + "\n" for tool in tools) + TOOLS_END
        system = f"{system}\n{block}" if system else block
    if system:
        out.append((f"{START}system\n{system}{END}\n", False))
    for message in rest:
        out.append((f"{START}{message['role']}\n", False))
        out.append((message["content"] + END, message["role"] == "assistant"))
        out.append(("\n", False))
    if generate:
        out.append((f"{START}assistant\n", False))
    return out


def render(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool = False
) -> str:
    """The conversation as one string, without BOS (the tokenizer adds it)."""
    return "".join(text for text, _ in segments(messages, tools, generate=generate))


# Jinja form of `render`, stored in the demo model's GGUF. Tools may be compact ({arg: type}) or
# OpenAI style (`function` wrapper, JSON-schema `properties`); both render compactly.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='', start=0) -%}"
    "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{%- set ns.system = messages[0]['content'] -%}{%- set ns.start = 1 -%}{%- endif -%}"
    "{%- if ns.system or tools -%}{{- '<|im_start|>system\\n' + ns.system -}}"
    "{%- if tools -%}{%- if ns.system -%}{{- '\\n' -}}{%- endif -%}{{- '<tools>\\n' -}}"
    "{%- for tool in tools -%}"
    "{%- set f = tool['function'] if tool['function'] is defined else tool -%}"
    "{%- set ps = f['parameters'] if f['parameters'] is defined else {} -%}"
    "{%- if ps['properties'] is defined -%}{%- set ps = ps['properties'] -%}{%- endif -%}"
    "{{- '{\"name\": \"' + f['name'] + '\", \"parameters\": {' -}}"
    "{%- for k in ps -%}"
    "{%- set ty = ps[k] if ps[k] is string else ps[k]['type'] -%}"
    "{{- '\"' + k + '\": \"' + ty + '\"' -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}"
    "{%- endfor -%}{{- '}}\\n' -}}{%- endfor -%}{{- '</tools>' -}}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if loop.index0 >= ns.start -%}"
    "{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    "{%- if m['content'] -%}{{- m['content'] -}}{%- endif -%}"
    "{%- if m['tool_calls'] is defined and m['tool_calls'] -%}{%- for tc in m['tool_calls'] -%}"
    "{%- set c = tc['function'] if tc['function'] is defined else tc -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + c['name'] + '\", \"arguments\": ' -}}"
    "{%- if c['arguments'] is string -%}{{- c['arguments'] -}}"
    "{%- else -%}{{- c['arguments'] | tojson -}}{%- endif -%}"
    "{{- '}\\n</tool_call>' -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
