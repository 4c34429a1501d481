"""From a row of JSONL, Parquet or a hub data set to a Document."""

import json
from collections.abc import Mapping, Sequence

from bitwright.corpora.recipe import Fields
from bitwright.corpora.records import Document
from bitwright.errors import InputError

Row = Mapping[str, object]

_JSON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "dict": "object",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def clean(text: str) -> str:
    """Lone surrogates (valid in JSON, not in UTF-8) and NUL characters become U+FFFD."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return whole.replace("\0", "\ufffd")


def row_format(row: Row, fields: Fields, wanted: str, where: str) -> str:
    """'messages', 'calls' or 'text': what the recipe says, or what the row has."""
    needed = {"messages": fields.messages, "calls": fields.calls, "text": fields.text}
    names = [wanted] if wanted != "auto" else list(needed)
    for name in names:
        if row.get(needed[name]) is not None:
            return name
    keys = ", ".join(sorted(str(key) for key in row)) or "none"
    raise InputError(
        f"{where} has the keys {keys}, but none of {', '.join(needed[n] for n in names)}: "
        "name the right keys under fields in the recipe"
    )


def row_document(
    row: Row, *, fields: Fields, wanted: str, category: str, source: str, id: str
) -> Document | None:
    """One document, or None if the row holds nothing to score (no text, no assistant turn).

    Raises:
        InputError: the row lacks the keys or has another shape; ``id`` says where.
    """
    kind = row_format(row, fields, wanted, id)
    if kind == "text":
        text = clean(_string(row[fields.text], id, fields.text))
        return Document(id, category, source, text=text) if text.strip() else None
    tools = _tools(row.get(fields.tools), id)
    if kind == "messages":
        raw = _list(row[fields.messages], id, fields.messages)
        messages = tuple(_message(item, fields, id) for item in raw)
    else:
        messages = _call_messages(row, fields, id)
    if not any(message["role"] == "assistant" for message in messages):
        return None
    return Document(id, category, source, messages=messages, tools=tools or None)


def _string(value: object, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: {key} must be text, it is {type(value).__name__}")
    return value


def _parsed(value: object, where: str, key: str) -> object:
    """Some data sets store lists as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}: {key} holds text that is not JSON ({error})") from None


def _list(value: object, where: str, key: str) -> Sequence[object]:
    parsed = _parsed(value, where, key)
    if not isinstance(parsed, list | tuple):
        raise InputError(f"{where}: {key} must be a list, it is {type(parsed).__name__}")
    return parsed


def _mapping(value: object, where: str, key: str) -> Row:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {key} must be an object, it is {type(value).__name__}")
    return value


def _content(value: object, where: str) -> str:
    """Text, nothing, or OpenAI's list of text parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    parts = [_mapping(part, where, "a content part") for part in _list(value, where, "content")]
    if any(part.get("type") != "text" for part in parts):
        raise InputError(f"{where}: only text content can be used, no images or sound")
    return clean("".join(_string(part.get("text"), where, "text") for part in parts))


def _message(item: object, fields: Fields, where: str) -> dict[str, object]:
    raw = _mapping(item, where, "a message")
    given = _string(raw.get(fields.role), where, f"a message's {fields.role}")
    role = fields.roles.get(given, given)
    if role not in _ROLES:
        raise InputError(
            f"{where}: the role {given!r} is unknown: map it under fields.roles in the recipe"
        )
    role = "system" if role == "developer" else role
    message: dict[str, object] = {"role": role, "content": _content(raw.get(fields.content), where)}
    calls = raw.get("tool_calls") or ([raw["function_call"]] if raw.get("function_call") else None)
    if calls:
        listed = _list(calls, where, "tool_calls")
        message["tool_calls"] = [_call(call, where) for call in listed]
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _call(item: object, where: str) -> dict[str, object]:
    """OpenAI's form with the arguments as an object, which most templates write as JSON."""
    raw = _mapping(item, where, "a tool call")
    inner = _mapping(raw.get("function", raw), where, "a tool call")
    name = _string(inner.get("name", inner.get("api_name")), where, "a tool call's name")
    given = inner.get("arguments", inner.get("parameters", {}))
    arguments = _mapping(_parsed(given or {}, where, "arguments"), where, "arguments")
    call: dict[str, object] = {
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }
    if isinstance(raw.get("id"), str):
        call["id"] = raw["id"]
    return call


def _call_messages(row: Row, fields: Fields, where: str) -> tuple[dict[str, object], ...]:
    query = clean(_string(row.get(fields.query), where, fields.query))
    calls = [_call(call, where) for call in _list(row[fields.calls], where, fields.calls)]
    user: dict[str, object] = {"role": "user", "content": query}
    if not calls:
        return (user,)
    return (user, {"role": "assistant", "content": "", "tool_calls": calls})


def _tools(value: object, where: str) -> tuple[dict[str, object], ...]:
    if value is None:
        return ()
    return tuple(openai_tool(tool, where) for tool in _list(value, where, "tools"))


def openai_tool(item: object, where: str) -> dict[str, object]:
    """An OpenAI tool definition from one, or from a flat {name, description, parameters}."""
    raw = _mapping(item, where, "a tool")
    inner = _mapping(raw.get("function", raw), where, "a tool")
    function: dict[str, object] = {
        "name": _string(inner.get("name", inner.get("api_name")), where, "a tool's name")
    }
    description = inner.get("description", inner.get("api_description"))
    if isinstance(description, str):
        function["description"] = description
    given = inner.get("parameters") or {}
    parameters = _mapping(_parsed(given, where, "parameters"), where, "a tool's parameters")
    function["parameters"] = _schema(parameters, inner.get("required"))
    return {"type": "function", "function": function}


def _schema(parameters: Row, required: object) -> Row:
    if isinstance(parameters.get("properties"), Mapping):
        return parameters
    schema: dict[str, object] = {
        "type": "object",
        "properties": {name: _property(value) for name, value in parameters.items()},
    }
    if isinstance(required, list | tuple):
        schema["required"] = [name for name in required if name in parameters]
    return schema


def _property(value: object) -> dict[str, object]:
    """A parameter's schema; Python's type names become JSON Schema's."""
    if isinstance(value, str):
        return {"type": json_type(value)}
    if not isinstance(value, Mapping):
        return {"type": "string"}
    out = {str(key): item for key, item in value.items()}
    if isinstance(out.get("type"), str):
        out["type"] = json_type(str(out["type"]))
    return out


def json_type(name: str) -> str:
    """'str, optional' → string, 'List[int]' → array; an unknown name stays as it is."""
    base = name.split(",")[0].split("[")[0].strip()
    return _JSON_TYPES.get(base.lower(), base)
