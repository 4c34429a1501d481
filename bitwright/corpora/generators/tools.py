"""Tool-calling conversations over the tools listed in ``corpora/builtin/tools.txt``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from bitwright.content import content_dir
from bitwright.corpora.generators.chatml import Expected, Message, Sample, Tool, call_text, turn
from bitwright.corpora.generators.dialogue import SYSTEMS, chat_turn
from bitwright.corpora.generators.draw import chance, integer, pick, until
from bitwright.corpora.generators.words import KINDS, Rng, Value

REFUSAL = "Sorry, I have no tool for that."
OFF_TOPIC = 0.15  # share of requests that no offered tool serves


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument: the key used in the phrasings, its possible names, its kind of value."""

    key: str
    names: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool: its possible names, arguments and phrasings of a request."""

    names: tuple[str, ...]
    arguments: tuple[Argument, ...]
    phrasings: tuple[str, ...]


def _argument(text: str) -> Argument:
    alias, kind = text.split(":")
    names = tuple(alias.split("|"))
    return Argument(names[0], names, kind)


def _tool_spec(block: str) -> ToolSpec:
    names, arguments, *phrasings = (line.strip() for line in block.splitlines())
    parsed = tuple(_argument(text) for text in arguments.split(", "))
    return ToolSpec(tuple(names.split("|")), parsed, tuple(phrasings))


@cache
def tool_table() -> tuple[ToolSpec, ...]:
    """All tools, in the file's order."""
    text = (content_dir("corpora") / "builtin" / "tools.txt").read_text(encoding="utf-8")
    blocks = text.strip().split("\n\n")
    return tuple(_tool_spec(block) for block in blocks if not block.startswith("#"))


def instantiate(rng: Rng, index: int) -> tuple[Tool, dict[str, str]]:
    """A concrete signature of tool ``index``, and the shown name of each argument key."""
    spec = tool_table()[index]
    one_name = len(spec.names) == 1 or chance(rng, 0.7)
    name = spec.names[0] if one_name else pick(rng, spec.names[1:])
    shown = {}
    for argument in spec.arguments:
        usual = len(argument.names) == 1 or chance(rng, 0.7)
        shown[argument.key] = argument.names[0] if usual else pick(rng, argument.names[1:])
    if len(set(shown.values())) < len(shown):
        shown = {key: key for key in shown}
    parameters = {shown[a.key]: KINDS[a.kind].json_type for a in spec.arguments}
    return Tool(name, parameters), shown


def heldout_phrasing(index: int) -> int:
    """Index of the one phrasing of tool ``index`` that training and corpora never use."""
    return index % len(tool_table()[index].phrasings)


def _polite(rng: Rng, text: str) -> str:
    """Optional politeness around a request."""
    r = rng.random()
    head = text.split(" ")[0]
    lower = text if head == "I" or "{" in head else text[0].lower() + text[1:]
    if text.endswith("?"):
        return text if r < 0.8 else "Hello, " + lower
    if r < 0.45:
        return text + pick(rng, ["", "."])
    if r < 0.65:
        return "Please " + lower + "."
    if r < 0.85:
        return text + ", please."
    return "Hi, " + lower + "."


def _request(
    rng: Rng, index: int, shown: Mapping[str, str], heldout: bool, phrasing: int | None = None
) -> tuple[str, dict[str, Value]]:
    """A user's request for tool ``index``: (text, arguments)."""
    spec = tool_table()[index]
    if phrasing is None:
        kept = [p for p in range(len(spec.phrasings)) if p != heldout_phrasing(index)]
        phrasing = pick(rng, kept)
    text = _polite(rng, spec.phrasings[phrasing])
    arguments: dict[str, Value] = {}
    for argument in spec.arguments:
        slot = "{" + argument.key + "}"
        if slot in text:
            kind = KINDS[argument.kind]
            value = until(rng, heldout, kind.make) if kind.open_ended else kind.make(rng)
            arguments[shown[argument.key]] = value
            text = text.replace(slot, str(value))
    return text, arguments


def _offered(rng: Rng) -> list[int]:
    """Indices of one to four offered tools, neighbours (near misses) more often."""
    count = 1 + int(rng.choice(4, p=[0.2, 0.35, 0.25, 0.2]))
    last = len(tool_table()) - 1
    first = integer(rng, 0, last)
    chosen = [first]
    while len(chosen) < count:
        near = first + integer(rng, -3, 3) if chance(rng, 0.4) else integer(rng, 0, last)
        if 0 <= near <= last and near not in chosen:
            chosen.append(near)
    return [chosen[i] for i in rng.permutation(count)]


def _unserved(rng: Rng, chosen: Sequence[int], heldout: bool) -> str:
    """A request for a tool that is neither offered nor close to an offered one."""
    last = len(tool_table()) - 1
    other = integer(rng, 0, last)
    while any(abs(other - index) < 4 for index in chosen):
        other = integer(rng, 0, last)
    return _request(rng, other, instantiate(rng, other)[1], heldout)[0]


def _exchange(
    rng: Rng,
    chosen: Sequence[int],
    schemas: Sequence[tuple[Tool, dict[str, str]]],
    heldout: bool,
    unseen_phrasing: bool,
    irrelevant: bool | None,
) -> tuple[str, str, Expected]:
    """One turn: (user, assistant, expected)."""
    off = chance(rng, OFF_TOPIC) if irrelevant is None else irrelevant
    if off and chance(rng, 0.5):
        return *chat_turn(rng, heldout), None
    if off:
        return _unserved(rng, chosen, heldout), REFUSAL, None
    k = integer(rng, 0, len(chosen) - 1)
    tool, shown = schemas[k]
    phrasing = heldout_phrasing(chosen[k]) if unseen_phrasing else None
    user, arguments = _request(rng, chosen[k], shown, heldout, phrasing)
    return user, call_text(tool.name, arguments), (tool.name, arguments)


def tool_sample(
    rng: Rng,
    heldout: bool = False,
    *,
    turns: int | None = None,
    unseen_phrasing: bool = False,
    irrelevant: bool | None = None,
) -> Sample:
    """A tool-calling conversation.

    Held-out conversations have one turn unless ``turns`` says otherwise; ``unseen_phrasing``
    takes the held-out phrasing (only meaningful with ``heldout``); ``irrelevant`` forces or
    forbids requests that no offered tool serves.
    """
    chosen = _offered(rng)
    schemas = [instantiate(rng, index) for index in chosen]
    if len({tool.name for tool, _ in schemas}) < len(schemas):
        return tool_sample(
            rng, heldout, turns=turns, unseen_phrasing=unseen_phrasing, irrelevant=irrelevant
        )
    messages: list[Message] = []
    if chance(rng, 0.2):
        messages.append({"role": "system", "content": pick(rng, SYSTEMS)})
    if turns is None:
        turns = 1 if heldout else 1 + int(rng.choice(4, p=[0.25, 0.3, 0.25, 0.2]))
    expected: Expected = None
    for _ in range(turns):
        user, answer, expected = _exchange(
            rng, chosen, schemas, heldout, unseen_phrasing, irrelevant
        )
        messages += turn(user, answer)
    return Sample(tuple(messages), tuple(tool for tool, _ in schemas), expected)
