"""Whether calls are the right ones: names, arguments, types, optional values, any order.

The accepted values of an argument are listed, as in BFCL (Patil et al. 2025, "The Berkeley Function
Calling Leaderboard"): the empty string among them means that it may be left out, and a value may
itself be an object whose members list their accepted values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from bitwright.eval.tool_formats import Call, Parsed

CORRECT = "correct"
# From "nothing there" to "nearly right": the best order of parallel calls is the last of these.
FAILURES = (
    "too_long",
    "truncated",
    "no_call",
    "unparsable",
    "called_when_irrelevant",
    "wrong_count",
    "wrong_name",
    "missing_argument",
    "extra_argument",
    "wrong_type",
    "wrong_value",
)
EMPTY: Sequence[Any] = ([], None)
MAX_PARALLEL = 6  # 720 orders; more calls are matched in the order given


@dataclass(frozen=True, slots=True)
class Gold:
    """A right call: for each argument the accepted values; `types` are JSON types by argument.

    `loose`: strings are compared without case, spaces and punctuation (BFCL's rule).
    """

    name: str
    arguments: Mapping[str, Sequence[Any]]
    types: Mapping[str, str] = field(default_factory=dict)
    loose: bool = False


def judge(parsed: Parsed, gold: Sequence[Gold]) -> str:
    """CORRECT or one of FAILURES; no gold call means that none is right."""
    if not gold:
        return CORRECT if parsed.status == "no_call" else "called_when_irrelevant"
    if parsed.status != "ok":
        return parsed.status
    if len(parsed.calls) != len(gold):
        return "wrong_count"
    orders = permutations(parsed.calls) if len(gold) <= MAX_PARALLEL else [parsed.calls]
    best = FAILURES[0]
    for order in orders:
        found = [match_call(call, right) for call, right in zip(order, gold, strict=True)]
        wrong = [verdict for verdict in found if verdict != CORRECT]
        if not wrong:
            return CORRECT
        best = max(best, min(wrong, key=FAILURES.index), key=FAILURES.index)
    return best


def names_match(parsed: Parsed, gold: Sequence[Gold]) -> bool:
    """Whether the right functions were chosen, whatever their arguments; none where none fits."""
    called = sorted(call.name for call in parsed.calls)
    if not gold:
        return parsed.status == "no_call"
    return parsed.status == "ok" and called == sorted(right.name for right in gold)


def match_call(call: Call, gold: Gold) -> str:
    """CORRECT, or what is wrong with one call."""
    if call.name != gold.name:
        return "wrong_name"
    for name, accepted in gold.arguments.items():
        if name not in call.arguments and "" not in accepted:
            return "missing_argument"
    if set(call.arguments) - set(gold.arguments):
        return "extra_argument"
    for name, value in call.arguments.items():
        if not has_type(value, gold.types.get(name, "any")):
            return "wrong_type"
    for name, value in call.arguments.items():
        accepted = gold.arguments[name] or EMPTY  # BFCL lists nothing where nothing is right
        if not any(same_value(value, right, gold.loose) for right in accepted):
            return "wrong_value"
    return CORRECT


def has_type(value: Any, kind: str) -> bool:
    """Whether a value is of a JSON type; an integer is a number too, a boolean is neither."""
    if kind in ("integer", "number", "float"):
        number = (int,) if kind == "integer" else (int, float)
        return isinstance(value, number) and not isinstance(value, bool)
    known: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "boolean": bool,
        "array": (list, tuple),
        "tuple": (list, tuple),
        "object": dict,
        "dict": dict,
    }
    return kind not in known or isinstance(value, known[kind])


def same_value(value: Any, right: Any, loose: bool) -> bool:
    """Equal, with booleans apart from numbers and 5 equal to 5.0; members of objects accept lists.

    A member that lists its values as in BFCL may be one of them, or left out where '' is one.
    """
    if isinstance(value, bool) != isinstance(right, bool):
        return False
    if isinstance(right, str) or isinstance(value, str):
        if not (isinstance(right, str) and isinstance(value, str)):
            return False
        return _loose(value) == _loose(right) if loose else value == right
    if isinstance(right, Mapping):
        return isinstance(value, Mapping) and _same_members(value, right, loose)
    if isinstance(right, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(right)
            and all(same_value(v, r, loose) for v, r in zip(value, right, strict=True))
        )
    return bool(value == right)


def _same_members(value: Mapping[str, Any], right: Mapping[str, Any], loose: bool) -> bool:
    if set(value) - set(right):
        return False
    for name, accepted in right.items():
        choices = accepted if isinstance(accepted, list) and loose else [accepted]
        if name not in value:
            if not (loose and "" in choices):
                return False
        elif not any(same_value(value[name], choice, loose) for choice in choices):
            return False
    return True


def _loose(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
