"""Sums and one- to three-step word problems; answers end in ``#### N``."""

from bitwright.corpora.generators.chatml import Message, Sample, turn
from bitwright.corpora.generators.draw import chance, integer, is_heldout, pick
from bitwright.corpora.generators.words import FIRST, Rng

THINGS = (
    *("apples", "books", "coins", "pencils", "cards", "stones"),
    *("eggs", "cups", "balls", "stamps", "shells", "roses"),
)
BOXES = ("boxes", "bags", "baskets", "jars")
ANOTHER_STEP = (0.4, 0.4, 0.2)  # probability of 0, 1, 2 further steps


def _start(rng: Rng) -> int:
    """A one- or two-digit starting number, small ones more often."""
    return integer(rng, 2, 20) if chance(rng, 0.65) else integer(rng, 11, 40)


def _operand(rng: Rng, most: int) -> int:
    """The number added or taken away: mostly one digit, never above ``most``."""
    return integer(rng, 1, min(most, 9)) if chance(rng, 0.75) else integer(rng, 1, min(most, 20))


def _take_away(rng: Rng, total: int, who: str, pronoun: str) -> tuple[str, str, int]:
    less = _operand(rng, total - 1)
    sentence = pick(
        rng,
        [
            f"{who} gives away {less}.",
            f"{pronoun} loses {less}.",
            f"{pronoun} sells {less} of them.",
            f"Then {less} are taken away.",
        ],
    )
    return sentence, f"{total} - {less} = {total - less}", total - less


def _multiply(rng: Rng, total: int, pronoun: str) -> tuple[str, str, int]:
    times = integer(rng, 2, 5)
    sentence = pick(
        rng,
        [f"Then the number grows {times} times.", f"{pronoun} now gets {times} times as many."],
    )
    return sentence, f"{total} * {times} = {total * times}", total * times


def _divide(rng: Rng, total: int, who: str, pronoun: str) -> tuple[str, str, int] | None:
    for parts in (2, 3, 4, 5):
        if total % parts == 0 and total > parts and chance(rng, 0.5):
            sentence = pick(
                rng,
                [
                    f"{who} splits them into {parts} equal parts and keeps one.",
                    f"{pronoun} keeps one of {parts} equal shares.",
                ],
            )
            return sentence, f"{total} / {parts} = {total // parts}", total // parts
    return None


def _add(rng: Rng, total: int, who: str, pronoun: str) -> tuple[str, str, int]:
    more = _operand(rng, 20)
    sentence = pick(
        rng,
        [
            f"{who} gets {more} more.",
            f"{pronoun} finds {more} more.",
            f"{pronoun} buys {more} more.",
            f"Then {more} are added.",
        ],
    )
    return sentence, f"{total} + {more} = {total + more}", total + more


def _step(rng: Rng, total: int, who: str, pronoun: str) -> tuple[str, str, int]:
    """One sentence changing ``total``: (sentence, equation, new total)."""
    operation = int(rng.choice(4, p=[0.4, 0.35, 0.15, 0.1]))
    if operation == 1 and total > 2:
        return _take_away(rng, total, who, pronoun)
    if operation == 2 and total <= 9:
        return _multiply(rng, total, pronoun)
    if operation == 3 and total <= 60:
        divided = _divide(rng, total, who, pronoun)
        if divided is not None:
            return divided
    return _add(rng, total, who, pronoun)


def _bare_sum(rng: Rng) -> tuple[str, str, int]:
    a = _start(rng)
    operation = int(rng.choice(3, p=[0.45, 0.35, 0.2]))
    b = _operand(rng, 20 if operation == 0 else a - 1)
    if operation == 2:
        a, b = integer(rng, 2, 9), integer(rng, 2, 9)
    value = (a + b, a - b, a * b)[operation]
    text = f"{a} {'+-*'[operation]} {b}"
    question = pick(rng, ["What is {}?", "Calculate {}.", "How much is {}?"]).format(text)
    return question, f"{text} = {value}\n#### {value}", value


def _story(rng: Rng, groups: bool) -> tuple[str, str, int]:
    who, things = pick(rng, FIRST), pick(rng, THINGS)
    pronoun = pick(rng, ["She", "He", who])
    if groups:
        count, each = integer(rng, 2, 9), integer(rng, 2, 9)
        text = f"{who} has {count} {pick(rng, BOXES)} with {each} {things} each."
        total = count * each
        equations = [f"{count} * {each} = {total}"]
        steps = int(rng.choice(3, p=ANOTHER_STEP))
    else:
        total = _start(rng)
        starts = [
            f"{who} has {total} {things}.",
            f"There are {total} {things} on a table.",
            f"{who} starts with {total} {things}.",
        ]
        text, equations = pick(rng, starts), []
        steps = 1 + int(rng.choice(3, p=ANOTHER_STEP))
    for _ in range(steps):
        sentence, equation, total = _step(rng, total, who, pronoun)
        text += " " + sentence
        equations.append(equation)
    endings = [
        f"How many {things} are there now?",
        f"How many {things} does {who} have now?",
        f"How many {things} are left?",
    ]
    question = text + " " + pick(rng, endings)
    return question, "\n".join(equations) + f"\n#### {total}", total


def problem(rng: Rng) -> tuple[str, str, int]:
    """One problem: (question, worked solution, answer)."""
    r = rng.random()
    return _bare_sum(rng) if r < 0.4 else _story(rng, groups=r < 0.5)


def math_sample(rng: Rng, heldout: bool = False) -> Sample:
    """A conversation with one problem (held out) or one to four (training side)."""
    messages: list[Message] = []
    answer = 0
    for _ in range(1 if heldout else integer(rng, 1, 4)):
        question, solution, answer = problem(rng)
        while is_heldout(question) != heldout:
            question, solution, answer = problem(rng)
        messages += turn(question, solution)
    return Sample(tuple(messages), (), answer)
