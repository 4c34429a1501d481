"""Which tensors to measure at further types, once all were measured at the probe type."""

from collections.abc import Mapping, Sequence

import numpy as np

from bitwright.damage.damage_map import DamageMap
from bitwright.damage.pricing import TRAP_FACTOR, Errors, Offered, usual_ratios
from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.tensors import role

# Roles that hold most of the bytes, or act on every token: one wrong price costs most there.
BIG_ROLES = ("output", "token_embd", "ffn_gate", "ffn_up", "ffn_gate_exps", "ffn_up_exps")
PER_TYPE = 4  # tensors measured at each further type, spread over the damages
SHARE = 0.5  # of the number of tensors: most second probes, all reasons together
MIN_STEP = 0.1  # log error: types nearer than this to the probe say nothing about the curve

Pair = tuple[str, str]


def second_probes(
    damage_map: DamageMap, errors: Errors, offered: Offered, *, span: str = "scored"
) -> list[Pair]:
    """(tensor, type) pairs worth measuring, the most needed first, each once.

    First tensors whose errors mislead (one massive channel dominates the weighted norm), at
    all their types; then the big spenders at two types; then tensors spread over the damages, at
    every type, for the curve. At most `SHARE` of the tensors' number, the first kind excepted.
    """
    nats = _mean_damage(damage_map, span)
    types = {t: damage_map.types()[t][0] for t in nats if t in offered}
    further = {t: _further(t, kind, errors, offered[t]) for t, kind in types.items()}
    trapped = [(t, y) for t in misleading(types, errors, offered) for y in further[t]]
    wanted = [*_big_spenders(nats, further), *_spread(nats, further)]
    most = max(2 * PER_TYPE, int(SHARE * len(types)))
    rest = [pair for pair in dict.fromkeys(wanted) if pair not in set(trapped)]
    return [*dict.fromkeys(trapped), *rest[:most]]


def misleading(types: Mapping[str, str], errors: Errors, offered: Offered) -> list[str]:
    """Tensors with an error ratio `TRAP_FACTOR` away from the usual one, either way."""
    usual = usual_ratios({t: (kind,) for t, kind in types.items()}, errors, offered)
    found = []
    for tensor, base in types.items():
        below = errors[tensor, base]
        for type_name in offered[tensor]:
            middle, own = usual.get((type_name, base), 0.0), errors[tensor, type_name]
            if below > 0 and middle > 0 and own > 0 and type_name != base:
                away = abs(np.log(own / below / middle))
                if away > np.log(TRAP_FACTOR):
                    found.append(tensor)
                    break
    return found


def _mean_damage(damage_map: DamageMap, span: str) -> dict[str, float]:
    rows = damage_map.rows[damage_map.rows["span"] == span]
    first = {tensor: types[0] for tensor, types in damage_map.types().items()}
    nats: dict[str, float] = dict.fromkeys(first, 0.0)
    columns = (rows[c].tolist() for c in ("tensor", "type", "kld_nats"))
    for tensor, type_name, kld in zip(*columns, strict=True):
        if type_name == first[tensor]:
            nats[tensor] += kld
    return nats


def _further(tensor: str, base: str, errors: Errors, names: Sequence[str]) -> list[str]:
    """Offered quantized types whose error differs from the probe's, from few to many bits."""
    at = errors[tensor, base]
    found = [
        t
        for t in names
        if t != base
        and tensor_type(t).is_quantized
        and errors[tensor, t] > 0
        and at > 0
        and abs(np.log(errors[tensor, t] / at)) > MIN_STEP
    ]
    return sorted(found, key=lambda t: (tensor_type(t).bpw, t))


def _big_spenders(
    nats: Mapping[str, float], further: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """The most damaged tensor of each big role, one and two thirds up its ladder."""
    found = []
    for name in BIG_ROLES:
        mine = [t for t in further if role(t) == name and further[t]]
        if mine:
            worst = max(mine, key=lambda t: (nats[t], t))
            steps = further[worst]
            picked = dict.fromkeys((len(steps) // 3, 2 * len(steps) // 3))
            found += [(worst, steps[i]) for i in picked]
    return found


def _spread(
    nats: Mapping[str, float], further: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """For each type in turn some tensors, evenly over the order of damages."""
    order = sorted((t for t in further if further[t]), key=lambda t: (-nats[t], t))
    types = sorted({y for steps in further.values() for y in steps})
    columns = []
    for number, type_name in enumerate(types):
        mine = [t for t in order if type_name in further[t]]
        # Shifted from type to type, so that more tensors get a second measurement.
        places = np.linspace(0, len(mine) - 1, PER_TYPE + 1)[:-1] + number
        columns.append([(mine[int(i) % len(mine)], type_name) for i in dict.fromkeys(places)])
    width = max(map(len, columns), default=0)
    return [column[i] for i in range(width) for column in columns if i < len(column)]
