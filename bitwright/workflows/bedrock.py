"""Bedrock: the fewest bytes at which the groups are shown safe together.

What is safe alone may not be safe together. The first layout has every group at its lowest safe
type. Where the whole of it is not shown under every threshold, groups are raised until one is;
then the bytes that were too many are taken back, step by step, while it stays safe. Every layout
that was measured is recorded.
"""

from collections.abc import Mapping, Sequence

from bitwright.allocator.option_set import OptionSet
from bitwright.allocator.variants import (
    Group,
    assembled,
    back_off,
    nearer_correction,
    next_correction,
    predicted,
    steps_bytes,
)
from bitwright.errors import BudgetError
from bitwright.workflows.layout_meter import Joint, Meter

Steps = dict[str, str]  # group → step
Nats = dict[str, float]
Prices = Mapping[str, Mapping[str, Mapping[str, float]]]  # group → step → category


class Settling:
    """Measures layouts of the groups one after the other and keeps the record."""

    def __init__(
        self,
        meter: Meter,
        groups: Sequence[Group],
        prices: Prices,
        lowest: Mapping[str, str],
        options: OptionSet,
    ) -> None:
        self.meter, self.groups, self.prices = meter, groups, prices
        self.lowest, self.options = lowest, options

    def measure(self, chosen: Steps) -> tuple[Joint, list[str], Nats]:
        """The layout's damage, the categories not shown safe, and measured over predicted."""
        number = len(self.meter.rounds) + 1
        types = self.options.complete(assembled(self.groups, chosen))
        joint = self.meter.measure(f"bedrock-{number}", types)
        sums = predicted(self.groups, self.prices, chosen)
        unsafe = self.meter.unsafe(joint)
        self.meter.rounds.append(
            {
                "round": number,
                "size_bytes": steps_bytes(self.groups, chosen),
                "raised": sorted(n for n, step in chosen.items() if step != self.lowest[n]),
                "predicted_nats": dict(sums),
                "measured_nats": {c: [i.value, i.low, i.high] for c, i in joint.items()},
                "not_shown_safe": list(unsafe),
                "kept": False,
            }
        )
        highs = {c: i.high if i.high is not None else (i.value or 0.0) for c, i in joint.items()}
        return joint, unsafe, next_correction({}, sums, highs)

    def proposed(self, correction: Nats, number: int = 1) -> Steps:
        """The fewest bytes whose corrected sums are under the thresholds.

        Raises:
            BudgetError: not even the highest steps are.
        """
        return back_off(
            self.groups, self.prices, self.lowest, self.meter.thresholds_nats, correction, number
        )


def settle(
    meter: Meter,
    groups: Sequence[Group],
    prices: Prices,
    lowest: Mapping[str, str],
    options: OptionSet,
) -> tuple[Steps, Nats]:
    """Bedrock's steps, shown safe together if that is possible, and measured over predicted."""
    settling = Settling(meter, groups, prices, lowest, options)
    chosen: Steps = dict(lowest)
    correction: Nats = {}
    note = meter.ctx.reporter.note
    for number in range(1, meter.ctx.spec.variants.back_off_rounds + 1):
        joint, unsafe, ratio = settling.measure(chosen)
        if not unsafe:
            meter.rounds[-1]["kept"] = True
            return (
                _taken_back(settling, chosen, ratio, correction) if correction else (chosen, ratio)
            )
        if all(joint[c].high is None for c in unsafe):
            note(
                f"too little text to show anything on {', '.join(unsafe)}: give more select chunks"
            )
            break
        note(f"safe alone, not shown safe together on {', '.join(unsafe)}: backing off")
        # Never less than before, so that the rounds end.
        correction = {c: max(r, correction.get(c, 0.0)) for c, r in ratio.items()}
        last = chosen
        try:
            chosen = settling.proposed(correction, number)
        except BudgetError:
            chosen = {g.name: g.steps[0] for g in groups}
            note("backed off to the top of every ladder")
        if chosen == last:
            break
    meter.rounds[-1]["kept"] = True
    return chosen, correction


def _taken_back(
    settling: Settling, safe: Steps, ratio: Nats, correction: Nats
) -> tuple[Steps, Nats]:
    """Fewer bytes while they are shown safe; ``correction`` is what the safe layout was had with.

    Damages add up worse the larger they are, so what was learnt on an unsafe layout asks for too
    many bytes: the safe layout's own ratio asks for fewer, and where that is too few, the middle.
    """
    meter = settling.meter
    kept = meter.rounds[-1]
    unsafe_with: Nats | None = None
    for _ in range(meter.ctx.spec.variants.refine_rounds):
        trial = nearer_correction(ratio, correction, unsafe_with)
        try:
            chosen = settling.proposed(trial)
        except BudgetError:
            break
        if steps_bytes(settling.groups, chosen) >= steps_bytes(settling.groups, safe):
            break
        _, unsafe, measured = settling.measure(chosen)
        if unsafe:
            unsafe_with = trial
            continue
        kept["kept"] = False
        kept = meter.rounds[-1]
        kept["kept"] = True
        safe, ratio, correction = chosen, measured, trial
    return safe, ratio
