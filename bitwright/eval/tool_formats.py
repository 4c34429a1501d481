"""Calls in a model's answer, read strictly: what does not parse is a failure, never repaired.

Which form a model writes is known from its chat template; some models write another one all the
same (`form_of_answers`). Nothing is ever evaluated: Python-style calls are read from the syntax
tree and may hold literals only.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "no_call", "unparsable"]
# A model's answers are in another form than its template's where the template's is read in no more
# than RARE of them, and the other in at least MOSTLY; fewer answers than LEAST decide nothing.
RARE, MOSTLY, LEAST = 0.1, 0.5, 10


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name and its named arguments as plain values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parsed:
    """The calls of an answer in order; `problem` says why it is unparsable."""

    calls: tuple[Call, ...]
    status: Status
    problem: str = ""


class _Broken(ValueError):
    """The answer tries to call something and does not succeed in writing it."""


def parse_calls(text: str, form: str) -> Parsed:
    """The calls in an answer of a model that writes `form` (a key of FORMS)."""
    try:
        calls = FORMS[form](text.strip())
    except _Broken as problem:
        return Parsed((), "unparsable", str(problem))
    return Parsed(tuple(calls), "ok" if calls else "no_call")


def format_of(template: str) -> str:
    """The form that a chat template asks for or renders; Hermes where it says nothing."""
    for form, marks in _MARKS:
        if any(mark in template for mark in marks):
            return form
    return "hermes"


def form_of_answers(form: str, answers: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The form that answers are in, of (text, names of the offered tools) where a call is right.

    That is ``form``, of the template, unless they plainly are in another.
    """

    def readable(other: str) -> float:
        parsed = [(parse_calls(text, other), offered) for text, offered in answers]
        good = [p.calls and {c.name for c in p.calls} <= set(names) for p, names in parsed]
        return sum(map(bool, good)) / len(answers)

    if len(answers) < LEAST or readable(form) > RARE:
        return form
    best = max(FORMS, key=readable)
    return best if readable(best) >= MOSTLY else form


def write_calls(calls: list[Call], form: str) -> str:
    """Calls as a model of that form writes them: for gold answers and for tests."""
    if form in ("pythonic", "gemma"):
        texts = [
            f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls
        ]
        inside = f"[{', '.join(texts)}]"
        return f"```tool_code\n{inside}\n```" if form == "gemma" else inside
    key = "parameters" if form == "llama" else "arguments"
    bodies = [json.dumps({"name": c.name, key: dict(c.arguments)}) for c in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if form == "fenced":
        return "\n".join(f"```json\n{body}\n```" for body in bodies)
    if form == "llama":
        return "; ".join(bodies)
    inside = bodies[0] if len(bodies) == 1 else f"[{', '.join(bodies)}]"
    return f"[TOOL_CALLS]{inside}" if form == "mistral" else inside


def _hermes(text: str) -> list[Call]:
    """<tool_call>{...}</tool_call>, one or more, with prose around them."""
    opened, closed = text.count("<tool_call>"), text.count("</tool_call>")
    if not opened and not closed:
        if _looks_like_json_call(text):
            raise _Broken("a call without <tool_call>")
        return []
    bodies = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    if not opened == closed == len(bodies):
        raise _Broken("<tool_call> and </tool_call> do not pair up")
    return [_json_call(_json(body)) for body in bodies]


def _fenced(text: str) -> list[Call]:
    """Fenced blocks of JSON, one call or a list of them in each, with prose around them.

    An answer that is JSON as a whole counts too. No template asks for the fence, a model puts it
    there by habit; what a quantized file loses with it is the habit, not the call.
    """
    if _looks_like_json_call(text):
        return _bare_json(text)
    if text.count("```") % 2:
        raise _Broken("a fence that does not end")
    blocks = re.findall(r"```(\w*)[ \t]*\n(.*?)```", text, re.DOTALL)
    inside = [body.strip() for language, body in blocks if language in ("", "json")]
    calls = [body for body in inside if _looks_like_json_call(body)]
    return [call for body in calls for call in _bare_json(body)]


def _bare_json(text: str) -> list[Call]:
    """One JSON object or a list of them, and nothing else."""
    if not _looks_like_json_call(text):
        return []
    value = _json(text)
    return [_json_call(item) for item in (value if isinstance(value, list) else [value])]


def _llama(text: str) -> list[Call]:
    """{"name": ..., "parameters": ...}, several with ';' between them, or <function=name>{}."""
    text = text.removeprefix("<|python_tag|>").removesuffix("<|eom_id|>").strip()
    if "<function=" in text:
        found = re.findall(r"<function=([\w.\-]+)>(.*?)</function>", text, re.DOTALL)
        if len(found) != text.count("<function="):
            raise _Broken("<function=...> without </function>")
        return [_json_call({"name": name, "arguments": _json(body)}) for name, body in found]
    if text.startswith("[") and not _looks_like_json_call(text):
        return _pythonic(text)
    if not _looks_like_json_call(text):
        return []
    calls, decoder, at = [], json.JSONDecoder(parse_constant=_no_constant), 0
    if text.startswith("["):
        return _bare_json(text)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise _Broken(f"no JSON: {error}") from None
        calls.append(_json_call(value))
        rest = text[at:].lstrip()
        if rest and not rest.startswith(";"):
            raise _Broken("text after the call")
        at = len(text) - len(rest.removeprefix(";").lstrip())
    return calls


def _pythonic(text: str) -> list[Call]:
    """[f(a=1), g(b='x')], or one call without the brackets."""
    if not re.match(r"\[?\s*[A-Za-z_][\w.]*\s*\(", text):
        if text.startswith("[") or _looks_like_json_call(text):
            raise _Broken("not a list of Python calls")
        return []
    try:
        body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if text.startswith("["):
            raise _Broken("not valid Python") from None
        return []  # prose such as "Sum (of two) is ..."
    items = body.elts if isinstance(body, ast.List) else [body]
    return [_python_call(item) for item in items]


def _gemma(text: str) -> list[Call]:
    """Fenced tool_code or tool_call blocks with Python calls or JSON."""
    fences = re.findall(r"```(?:tool_code|tool_call|python|json)[ \t]*\n(.*?)```", text, re.DOTALL)
    if not fences:
        if "```tool" in text:
            raise _Broken("a fence that does not end")
        return _bare_json(text) if _looks_like_json_call(text) else _pythonic(text)
    calls: list[Call] = []
    for fence in fences:
        inside = fence.strip()
        found = _bare_json(inside) if _looks_like_json_call(inside) else _pythonic(inside)
        if not found:
            raise _Broken("a fence without a call")
        calls += found
    return calls


def _mistral(text: str) -> list[Call]:
    """[TOOL_CALLS] and a JSON list."""
    before, mark, after = text.partition("[TOOL_CALLS]")
    if not mark:
        return _bare_json(before)
    calls = _bare_json(after.strip())
    if not calls:
        raise _Broken("nothing after [TOOL_CALLS]")
    return calls


FORMS: Mapping[str, Callable[[str], list[Call]]] = {
    "hermes": _hermes,
    "fenced": _fenced,
    "json": _bare_json,
    "llama": _llama,
    "pythonic": _pythonic,
    "gemma": _gemma,
    "mistral": _mistral,
}
# The first form of which a mark stands in the template.
_MARKS = (
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("pythonic", ("func_name1(params_name1", "[func_name(", "Python list of function calls")),
    ("gemma", ("tool_code", "<start_of_turn>")),
    ("llama", ("<|python_tag|>", "<|start_header_id|>")),
    ("json", ('"name": function name', "JSON for a function call", '{"name":')),
)


def _looks_like_json_call(text: str) -> bool:
    return bool(re.match(r'\[?\s*\{\s*"', text))


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"no JSON: {error}") from None


def _json_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Broken("no object with a name")
    inner = [value[key] for key in ("arguments", "parameters") if key in value]
    if len(inner) > 1 or set(value) - {"name", "arguments", "parameters", "type", "id"}:
        raise _Broken("keys that a call does not have")
    arguments = inner[0] if inner else {}
    if not isinstance(arguments, dict):
        raise _Broken("arguments that are no object")
    return Call(value["name"], arguments)


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise _Broken("an element that is no call")
    if not isinstance(node.func, ast.Name | ast.Attribute):
        raise _Broken("a function that is no name")
    if node.args or any(k.arg is None for k in node.keywords):
        raise _Broken("arguments without names")
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise _Broken("an argument that is no literal") from None
    return Call(ast.unparse(node.func), arguments)
