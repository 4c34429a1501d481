"""The conversation generators that the demo model is trained on, by short name."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from bitwright.corpora.generators.arithmetic import math_sample
from bitwright.corpora.generators.chatml import Sample
from bitwright.corpora.generators.dialogue import chat_sample
from bitwright.corpora.generators.tools import tool_sample


class Generator(Protocol):
    """Draws one conversation of the training side, or of the held-out side."""

    def __call__(self, rng: np.random.Generator, heldout: bool = False) -> Sample:
        """One conversation."""


GENERATORS: Mapping[str, Generator] = {
    "tool": tool_sample,
    "math": math_sample,
    "chat": chat_sample,
}
