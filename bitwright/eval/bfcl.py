"""BFCL's single-turn questions and accepted answers, from the `bfcl-eval` package or a folder.

Nothing of it is shipped here. The package's own code needs dozens of libraries; only its data files
are read: BFCL_v4_CATEGORY.json and possible_answer/BFCL_v4_CATEGORY.json, JSON Lines.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bitwright.errors import InputError
from bitwright.eval.items import Item
from bitwright.eval.task_suite import BY_DATA
from bitwright.eval.tool_formats import Call
from bitwright.eval.tool_match import Gold

CATEGORIES = (
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    "live_irrelevance",
)
# BFCL's names of types → JSON schema's
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def bfcl_folder(data: Path | None) -> Path:
    """The folder of the data files: `data`, `data`/bfcl, or the installed package's.

    Raises:
        InputError: there is none; the message says how to get it.
    """
    candidates = [data, data / "bfcl"] if data is not None else []
    spec = find_spec("bfcl_eval")
    if spec is not None and spec.submodule_search_locations:
        candidates.append(Path(next(iter(spec.submodule_search_locations))) / "data")
    for folder in candidates:
        if any(folder.glob("BFCL_v4_*.json")):
            return folder
    raise InputError(
        "BFCL's files are not here: `pip install --no-deps bfcl-eval==2026.3.23`, or give a folder "
        f"that holds BFCL_v4_*.json {BY_DATA}"
    )


def bfcl_items(category: str, data: Path | None = None) -> list[Item]:
    """All items of a category; an irrelevance category has no right call.

    Raises:
        InputError: unknown category, missing file, or a row that is not of BFCL's form.
    """
    if category not in CATEGORIES:
        raise InputError(f"bfcl:{category} is none of {', '.join(CATEGORIES)}")
    folder, name = bfcl_folder(data), f"BFCL_v4_{category}.json"
    rows = _read(folder / name)
    answers: Mapping[str, Any] = {}
    if "irrelevance" not in category:
        found = _read(folder / "possible_answer" / name)
        answers = {row["id"]: row["ground_truth"] for row in found}
    try:
        return [_item(row, answers.get(row["id"], [])) for row in rows]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(f"{name} is not of BFCL v4's form ({error!r}); take 2026.3.23") from None


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON Lines: {error}") from None


def _item(row: Mapping[str, Any], truth: Sequence[Mapping[str, Any]]) -> Item:
    functions = [json_schema(function) for function in row["function"]]
    tools = tuple({"type": "function", "function": function} for function in functions)
    types = {f["name"]: _types(f) for f in functions}
    gold, calls = [], []
    for right in truth:
        ((name, arguments),) = right.items()
        gold.append(Gold(name, arguments, types.get(name, {}), loose=True))
        calls.append(Call(name, _first_values(arguments)))
    messages = tuple(row["question"][0])
    return Item(row["id"], messages, tools, gold=tuple(gold), calls=tuple(calls))


def json_schema(value: Any) -> Any:
    """BFCL's function description with JSON schema's names of types."""
    if isinstance(value, Mapping):
        return {
            key: TYPES.get(inner, inner)
            if key == "type" and isinstance(inner, str)
            else json_schema(inner)
            for key, inner in value.items()
        }
    return [json_schema(inner) for inner in value] if isinstance(value, list) else value


def _types(function: Mapping[str, Any]) -> dict[str, str]:
    """Types to be checked: objects, arrays and strings are left to the accepted values.

    BFCL accepts values of other types there (a variable's name, a list in a string).
    """
    properties = function.get("parameters", {}).get("properties", {})
    kinds = {name: str(p.get("type", "any")) for name, p in properties.items()}
    return {n: k for n, k in kinds.items() if k in ("integer", "number", "boolean")}


def _first_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One exact call: the first accepted value of each argument that may not be left out."""
    return {
        name: _plain(_first(accepted)) for name, accepted in arguments.items() if "" not in accepted
    }


def _first(accepted: Sequence[Any]) -> Any:
    return next((value for value in accepted if value != ""), accepted[0] if accepted else None)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _plain(_first(inner) if isinstance(inner, list) else inner)
            for key, inner in value.items()
            if not (isinstance(inner, list) and "" in inner)
        }
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
