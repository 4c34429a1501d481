"""What is known of a continuation: its log-likelihood, in sum and by token."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Pair = tuple[Tokens, Tokens]  # context and continuation


@dataclass(frozen=True, slots=True)
class Score:
    """log p of a continuation in nats, per token and in sum; `greedy`: each token was the top one.

    `too_long`: it did not fit the context and nothing was scored (sum is -inf).
    """

    logprob: float
    greedy: bool
    per_token: NDArray[np.float64]
    too_long: bool = False


TOO_LONG = Score(-float("inf"), False, np.empty(0), too_long=True)
