"""Damage tables that look like measured ones, for the allocator's tests."""

import numpy as np

from bitwright.damage.pricing import DamageTable
from bitwright.engine.ggml_types import TYPES

CATEGORIES = ("chat", "code", "math")


def bits(name):
    return TYPES[name].bpw


def table(options, seed=0, relative_se=0.1, categories=CATEGORIES):
    """Damage that falls fourfold per bit from a random probe, per tensor and category."""
    rng = np.random.default_rng(seed)
    probe = rng.lognormal(-4, 1.5, (len(options.tensors), 1, len(categories)))
    types = tuple(sorted({t for o in options.offered.values() for t in o}, key=bits))
    ratio = np.array([4.0 ** (bits("Q2_K") - bits(t)) for t in types])
    nats = probe * ratio[None, :, None]
    for i, name in enumerate(options.tensors):
        nats[i, [t not in options.offered[name] for t in types]] = np.nan
    measured = np.zeros(nats.shape[:2], bool)
    measured[:, 0] = True
    return DamageTable(options.tensors, types, categories, nats, relative_se * nats, measured)


def middle(options, part=0.4):
    least, most = options.smallest_bytes, options.largest_bytes
    return least + int(part * (most - least))
