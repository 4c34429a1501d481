"""Damages with a known truth: rows differ together, and each tensor differs from that."""

import numpy as np

ROW_SPREAD, OWN_SPREAD = 0.7, 0.9  # of logarithms, as on measured maps


def made_sums(
    rng: np.random.Generator, tensors: int, blocks: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """True damage per row (T,), and Σ over the rows of each block (T, B)."""
    truth = np.exp(rng.normal(-6, 1.3, tensors))
    common = rng.lognormal(-(ROW_SPREAD**2) / 2, ROW_SPREAD, (blocks, rows))
    own = rng.lognormal(-(OWN_SPREAD**2) / 2, OWN_SPREAD, (tensors, blocks, rows))
    return truth, truth[:, None] * (common * own).sum(axis=2)
