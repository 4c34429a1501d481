"""Word lists and makers of names, items, dates and codes for the built-in generators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bitwright.corpora.generators.draw import chance, integer, pick

Rng = np.random.Generator
Value = str | int


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words(
    "Anna Ben Carla David Elena Frank Grace Hugo Irene Jack Kate Leo Maria Nina Oscar Paula "
    "Quinn Rosa Sam Tina Uma Victor Wendy Yusuf Zoe Adam Bella Chen Diego Emma Felix Gina Henry "
    "Ivan Julia Karim Laura Mike Noah Olga Peter Rita Simon Tom Vera Will Omar Priya Lucy Max"
)
CITY = _words(
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Dublin Athens Cairo Tokyo Delhi Lima "
    "Boston Chicago Denver Seattle Toronto Sydney Mumbai Prague Warsaw Zurich Munich Naples Porto "
    "Geneva Kyoto Osaka Seoul Dallas Austin Miami Quito Bogota Havana Nairobi Lagos Tunis Riga "
    "Tallinn Hamburg Milan Lyon Nice Ghent Bergen Malmo Turin"
)
ONSET = _words("b d f g h j k l m n p r s t v w z br dr gr kr tr st sh ch th cl pl")
VOWEL = _words("a e i o u a e i o ai ea ou")
CODA = [*_words("n r l s m t k nd rt x th ck"), ""]
COUNTRY = {
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Hungary": "Budapest",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
}
CONTINENT = {
    "France": "Europe",
    "Germany": "Europe",
    "Spain": "Europe",
    "Italy": "Europe",
    "Norway": "Europe",
    "Egypt": "Africa",
    "Kenya": "Africa",
    "Japan": "Asia",
    "China": "Asia",
    "Peru": "South America",
    "Chile": "South America",
    "Canada": "North America",
    "Cuba": "North America",
}
COLOR = _words("red blue green yellow white black orange purple pink brown")
NOUN = _words(
    "apple bread chair table lamp book phone shoe jacket bottle pencil camera guitar carpet basket "
    "bicycle blanket candle mirror pillow ticket hammer helmet laptop wallet umbrella kettle cup "
    "plate spoon towel clock"
)
ADJ = _words(
    "cheap small large warm light heavy simple modern quiet fast new old soft strong bright wooden "
    "cotton leather plastic round"
)
ANIMAL = {
    "dog": "bark",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "lion": "roar",
    "sheep": "bleat",
    "horse": "neigh",
    "pig": "oink",
    "bee": "buzz",
    "frog": "croak",
    "owl": "hoot",
    "snake": "hiss",
}
OPPOSITE = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "open": "closed",
    "happy": "sad",
    "old": "young",
    "light": "dark",
    "full": "empty",
    "early": "late",
    "high": "low",
    "hard": "soft",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "long": "short",
    "loud": "quiet",
}
PLURAL = {
    "child": "children",
    "foot": "feet",
    "tooth": "teeth",
    "mouse": "mice",
    "man": "men",
    "woman": "women",
    "box": "boxes",
    "city": "cities",
    "leaf": "leaves",
    "knife": "knives",
    "book": "books",
    "house": "houses",
    "tree": "trees",
    "baby": "babies",
    "bus": "buses",
}
THING_COLOR = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "blood": "red",
    "a carrot": "orange",
    "milk": "white",
    "the sun": "yellow",
    "chocolate": "brown",
}
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
VERB = _words(
    "buy call check clean fix wash paint pack water return feed order move print sign read send "
    "visit find sell"
)
LANG = _words(
    "French German Spanish Italian Japanese Chinese Arabic Greek Polish Turkish Dutch Korean"
)
CURRENCY = _words("USD EUR GBP JPY CHF CAD AUD INR SEK NOK")
CUISINE = _words("Italian Mexican Thai Indian Greek French Chinese Korean Turkish Spanish")
GENRE = _words("comedy drama horror action romance fantasy mystery history crime science")
ROOM = _words("kitchen bedroom bathroom garage hallway office garden attic basement balcony")
TOPIC = _words("sports politics health business music travel space energy science cinema")
UNITS = _words("miles kilometers meters feet pounds kilograms liters gallons inches grams")
SPORT = _words("running swimming cycling rowing walking yoga tennis boxing hiking dancing")
DISH = _words("soup salad curry pizza pasta stew cake pie rice omelette")
DOMAIN = _words("mail post web site home corp shop work")
SUFFIX = _words("txt csv json py md log")


def coined(rng: Rng, syllables: int | None = None) -> str:
    """A pronounceable made-up word: forces copying rather than recall."""
    count = syllables or integer(rng, 2, 3)
    return "".join(pick(rng, ONSET) + pick(rng, VOWEL) for _ in range(count)) + pick(rng, CODA)


def person(rng: Rng) -> str:
    """A first name, real or coined."""
    return pick(rng, FIRST) if chance(rng, 0.4) else coined(rng, 2).capitalize()


def city(rng: Rng) -> str:
    """A city, real or coined."""
    return pick(rng, CITY) if chance(rng, 0.4) else coined(rng, 2).capitalize()


def noun_phrase(rng: Rng) -> str:
    """An item with one or two adjectives."""
    r = rng.random()
    if r < 0.4:
        return pick(rng, ADJ) + " " + pick(rng, NOUN)
    if r < 0.7:
        return pick(rng, COLOR) + " " + pick(rng, NOUN)
    return pick(rng, ADJ) + " " + pick(rng, COLOR) + " " + pick(rng, NOUN)


def errand(rng: Rng) -> str:
    """Something to do with an item, such as 'wash the red cup'."""
    return pick(rng, VERB) + " the " + (pick(rng, NOUN) if chance(rng, 0.5) else noun_phrase(rng))


def title(rng: Rng) -> str:
    """A two-word name of an event, a song or a place."""
    r = rng.random()
    if r < 0.4:
        return pick(rng, ADJ).capitalize() + " " + pick(rng, NOUN).capitalize()
    if r < 0.7:
        return coined(rng, 2).capitalize() + " " + pick(rng, NOUN).capitalize()
    return pick(rng, COLOR).capitalize() + " " + coined(rng, 2).capitalize()


def letters(rng: Rng, count: int) -> str:
    """Capital letters."""
    return "".join(chr(65 + integer(rng, 0, 25)) for _ in range(count))


def date(rng: Rng) -> str:
    """An ISO date, a month and day, or a weekday."""
    r = rng.random()
    if r < 0.4:
        year, month, day = integer(rng, 2024, 2029), integer(rng, 1, 12), integer(rng, 1, 28)
        return f"{year}-{month:02d}-{day:02d}"
    if r < 0.7:
        return f"{pick(rng, MONTHS)} {integer(rng, 1, 28)}"
    return pick(rng, DAYS)


def clock(rng: Rng) -> str:
    """A time of day, to five minutes."""
    return f"{integer(rng, 6, 23):02d}:{5 * integer(rng, 0, 11):02d}"


def word(rng: Rng) -> str:
    """One word, coined or a noun."""
    return coined(rng, 2) if chance(rng, 0.5) else pick(rng, NOUN)


def email(rng: Rng) -> str:
    """An address that belongs to nobody."""
    user = coined(rng, 2) if chance(rng, 0.6) else pick(rng, FIRST).lower()
    return f"{user}@{pick(rng, DOMAIN)}.com"


def file_name(rng: Rng) -> str:
    """A file name with a common suffix."""
    stem = coined(rng, 2) if chance(rng, 0.5) else pick(rng, NOUN)
    return f"{stem}.{pick(rng, SUFFIX)}"


def expression(rng: Rng) -> str:
    """A small sum as text."""
    return f"{integer(rng, 2, 99)} {pick(rng, '+-*/')} {integer(rng, 2, 99)}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tool argument; open-ended values take part in the hold-out."""

    json_type: str
    make: Callable[[Rng], Value]
    open_ended: bool = False


KINDS: Mapping[str, Kind] = {
    "name": Kind("string", person, True),
    "city": Kind("string", city, True),
    "item": Kind("string", noun_phrase, True),
    "task": Kind("string", errand, True),
    "title": Kind("string", title, True),
    "word": Kind("string", word, True),
    "email": Kind("string", email, True),
    "file": Kind("string", file_name, True),
    "code": Kind("string", lambda r: f"{letters(r, 2)}{integer(r, 100, 999)}", True),
    "symbol": Kind("string", lambda r: letters(r, 3), True),
    "phone": Kind("string", lambda r: f"555-{integer(r, 0, 9999):04d}", True),
    "date": Kind("string", date),
    "time": Kind("string", clock),
    "country": Kind("string", lambda r: pick(r, sorted(COUNTRY))),
    "lang": Kind("string", lambda r: pick(r, LANG)),
    "currency": Kind("string", lambda r: pick(r, CURRENCY)),
    "cuisine": Kind("string", lambda r: pick(r, CUISINE)),
    "genre": Kind("string", lambda r: pick(r, GENRE)),
    "room": Kind("string", lambda r: pick(r, ROOM)),
    "color": Kind("string", lambda r: pick(r, COLOR)),
    "topic": Kind("string", lambda r: pick(r, TOPIC)),
    "unit": Kind("string", lambda r: pick(r, UNITS)),
    "sport": Kind("string", lambda r: pick(r, SPORT)),
    "dish": Kind("string", lambda r: pick(r, NOUN[:2] + COLOR[:3]) + " " + pick(r, DISH)),
    "small": Kind("integer", lambda r: integer(r, 2, 12)),
    "int": Kind("integer", lambda r: integer(r, 10, 99)),
    "amount": Kind("number", lambda r: integer(r, 5, 990)),
    "year": Kind("integer", lambda r: integer(r, 1960, 2029)),
    "expr": Kind("string", expression),
}
