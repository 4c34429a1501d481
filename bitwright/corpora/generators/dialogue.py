"""Short dialogues: greetings, listed facts, word and list tasks."""

from collections.abc import Callable, Sequence

from bitwright.corpora.generators.chatml import Message, Sample, turn
from bitwright.corpora.generators.draw import chance, integer, is_heldout, pick, until
from bitwright.corpora.generators.words import (
    ANIMAL,
    COLOR,
    CONTINENT,
    COUNTRY,
    DAYS,
    FIRST,
    MONTHS,
    NOUN,
    OPPOSITE,
    PLURAL,
    THING_COLOR,
    Rng,
    city,
    coined,
    errand,
    noun_phrase,
    person,
)

Exchange = tuple[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You can call tools.",
    "Use the tools when they help.",
)
SMALL_TALK: Sequence[Exchange] = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi there.", "Hi! What can I do for you?"),
    ("Good evening.", "Good evening! How can I help you?"),
    ("How are you?", "I am fine, thank you."),
    ("How are you today?", "I am fine, thank you."),
    ("Thanks for your help.", "You are welcome!"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye.", "Goodbye! Have a nice day."),
    ("See you later.", "Goodbye! Have a nice day."),
    ("Who are you?", "I am a very small demo language model."),
    ("What can you do?", "I can chat a little, do simple math and call tools."),
)


def _greeting(rng: Rng) -> Exchange:
    name = person(rng)
    hellos = [
        f"Hi, I am {name}.",
        f"Hello! My name is {name}.",
        f"Good morning, I'm {name}.",
        f"Hey, {name} here.",
    ]
    return pick(rng, hellos), f"Hello {name}, nice to meet you!"


def _small_talk(rng: Rng) -> Exchange:
    return pick(rng, SMALL_TALK)


def _capital(rng: Rng) -> Exchange:
    country = pick(rng, sorted(COUNTRY))
    asks = [
        f"What is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Which city is the capital of {country}?",
        f"Tell me the capital of {country}.",
    ]
    return pick(rng, asks), f"The capital of {country} is {COUNTRY[country]}."


def _capital_of(rng: Rng) -> Exchange:
    country = pick(rng, sorted(COUNTRY))
    capital = COUNTRY[country]
    asks = [
        f"{capital} is the capital of which country?",
        f"Which country has the capital {capital}?",
    ]
    return pick(rng, asks), f"{capital} is the capital of {country}."


def _continent(rng: Rng) -> Exchange:
    country = pick(rng, sorted(CONTINENT))
    asks = [
        f"Which continent is {country} in?",
        f"Where is {country}?",
        f"On which continent is {country}?",
    ]
    return pick(rng, asks), f"{country} is in {CONTINENT[country]}."


def _animal_sound(rng: Rng) -> Exchange:
    animal = pick(rng, sorted(ANIMAL))
    asks = [
        f"What sound does a {animal} make?",
        f"Which noise does a {animal} make?",
        f"What does a {animal} do?",
    ]
    return pick(rng, asks), f"A {animal} can {ANIMAL[animal]}."


def _opposite(rng: Rng) -> Exchange:
    word = pick(rng, sorted(OPPOSITE))
    asks = [
        f"What is the opposite of {word}?",
        f"Give me the opposite of {word}.",
        f"Say the opposite of {word}.",
    ]
    return pick(rng, asks), f"The opposite of {word} is {OPPOSITE[word]}."


def _plural(rng: Rng) -> Exchange:
    word = pick(rng, sorted(PLURAL))
    asks = [
        f"What is the plural of {word}?",
        f"Give me the plural of {word}.",
        f"More than one {word} is called?",
    ]
    return pick(rng, asks), f"The plural of {word} is {PLURAL[word]}."


def _color_of(rng: Rng) -> Exchange:
    thing = pick(rng, sorted(THING_COLOR))
    asks = [f"What color is {thing}?", f"Tell me the color of {thing}."]
    return pick(rng, asks), f"{thing[0].upper() + thing[1:]} is {THING_COLOR[thing]}."


def _calendar(rng: Rng) -> Exchange:
    names, what = pick(rng, [(DAYS, "day"), (MONTHS, "month")])
    i = integer(rng, 0, len(names) - 1)
    here = names[i]
    if chance(rng, 0.5):
        asks = [f"Which {what} comes after {here}?", f"What {what} follows {here}?"]
        return pick(rng, asks), f"{names[(i + 1) % len(names)]} comes after {here}."
    return f"Which {what} comes before {here}?", f"{names[i - 1]} comes before {here}."


def _word_list(rng: Rng) -> list[str]:
    pool, count = pick(rng, [NOUN, COLOR, sorted(ANIMAL), FIRST]), integer(rng, 3, 5)
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def _reverse(rng: Rng) -> Exchange:
    words = _word_list(rng)
    text = ", ".join(words)
    asks = [f"Reverse this list: {text}", f"Say these words backwards: {text}"]
    return pick(rng, asks), ", ".join(words[::-1])


def _first(rng: Rng) -> Exchange:
    words = _word_list(rng)
    text = ", ".join(words)
    asks = [f"What is the first word in this list? {text}", f"Which word comes first: {text}?"]
    return pick(rng, asks), words[0]


def _last(rng: Rng) -> Exchange:
    words = _word_list(rng)
    text = ", ".join(words)
    asks = [f"What is the last word in this list? {text}", f"Which word comes last: {text}?"]
    return pick(rng, asks), words[-1]


def _count(rng: Rng) -> Exchange:
    words = _word_list(rng)
    text = ", ".join(words)
    asks = [f"How many words are in this list? {text}", f"Count these words: {text}"]
    return pick(rng, asks), str(len(words))


def _repeat(rng: Rng) -> Exchange:
    word = pick(rng, NOUN) if chance(rng, 0.5) else coined(rng, 2)
    times = integer(rng, 2, 4)
    asks = [
        f"Say {word} {times} times.",
        f"Repeat {word} {times} times.",
        f"Write {word} {times} times.",
    ]
    return pick(rng, asks), " ".join([word] * times)


def _politely(rng: Rng) -> Exchange:
    what = errand(rng)
    asks = [f"Say this politely: {what}", f"Make this polite: {what}"]
    return pick(rng, asks), f"Could you please {what}?"


def _future(rng: Rng) -> Exchange:
    name, what = pick(rng, FIRST), errand(rng)
    verb, rest = what.split(" ", 1)
    asks = [
        f"Rewrite with will: {name} wants to {what}.",
        f"Put this in the future: {name} wants to {what}.",
    ]
    return pick(rng, asks), f"{name} will {verb} {rest}."


def _larger(rng: Rng) -> Exchange:
    a, b = integer(rng, 1, 99), integer(rng, 1, 99)
    if a == b:
        b += 1
    asks = [f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"]
    return pick(rng, asks), str(max(a, b))


def _recall(rng: Rng) -> Exchange:
    name, item = person(rng), noun_phrase(rng)
    where = city(rng)
    fact = f"{name} lives in {where} and has a {item}."
    return pick(
        rng,
        [
            (f"{fact} Where does {name} live?", f"{name} lives in {where}."),
            (f"{fact} What does {name} have?", f"{name} has a {item}."),
        ],
    )


def _capitalize(rng: Rng) -> Exchange:
    word = pick(rng, NOUN) if chance(rng, 0.6) else coined(rng, 2)
    asks = [f"Make this a title: {word}", f"Start this word with a capital letter: {word}"]
    return pick(rng, asks), word.capitalize()


# The order is part of the pinned output: a skill is drawn by its number.
SKILLS: Sequence[Callable[[Rng], Exchange]] = (
    _greeting,
    _small_talk,
    _capital,
    _capital_of,
    _continent,
    _animal_sound,
    _opposite,
    _plural,
    _color_of,
    _calendar,
    _reverse,
    _first,
    _last,
    _count,
    _repeat,
    _politely,
    _future,
    _larger,
    _recall,
    _capitalize,
)


def chat_turn(rng: Rng, heldout: bool = False) -> Exchange:
    """One exchange (user, assistant) on the wanted side of the hold-out."""
    while True:
        question, answer = SKILLS[integer(rng, 0, len(SKILLS) - 1)](rng)
        if is_heldout(question) == heldout:
            return question, answer


def _introduction(rng: Rng, name: str) -> list[Message]:
    hello = pick(rng, [f"Hi, I am {name}.", f"Hello! My name is {name}."])
    return turn(hello, f"Hello {name}, nice to meet you!")


def chat_sample(rng: Rng, heldout: bool = False) -> Sample:
    """A dialogue of one to four exchanges; some ask back for the user's name."""
    messages: list[Message] = []
    if chance(rng, 0.2):
        messages.append({"role": "system", "content": SYSTEMS[0]})
    memory = chance(rng, 0.15)
    name = until(rng, heldout, person) if memory else ""
    if memory:
        messages += _introduction(rng, name)
    if heldout:
        count = integer(rng, 0, 1) if memory else 1
    else:
        count = integer(rng, 0 if memory else 1, 3)
    for _ in range(count):
        messages += turn(*chat_turn(rng, heldout))
    if memory:
        question = pick(rng, ["What is my name?", "Do you remember my name?", "Who am I?"])
        messages += turn(question, f"Your name is {name}.")
    return Sample(tuple(messages), (), messages[-1]["content"])
