"""Draws from a Generator, and the rule that holds values and questions out for evaluation."""

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

HELDOUT_MODULUS = 10  # 1 key in 10 is never used for training or calibration


def is_heldout(key: str) -> bool:
    """Whether a key (a question, an open-ended value) is reserved for evaluation."""
    return zlib.crc32(key.encode()) % HELDOUT_MODULUS == 0


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of the options, uniformly."""
    return options[int(rng.integers(len(options)))]


def integer(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer in [low, high]."""
    return int(rng.integers(low, high + 1))


def chance(rng: np.random.Generator, probability: float) -> bool:
    """True with the given probability."""
    return bool(rng.random() < probability)


def until(rng: np.random.Generator, heldout: bool, make: Callable[[np.random.Generator], T]) -> T:
    """Draw from ``make`` until the value is on the wanted side of the hold-out."""
    while True:
        value = make(rng)
        if is_heldout(str(value)) == heldout:
            return value
