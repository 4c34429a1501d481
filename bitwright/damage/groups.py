"""Groups of tensors degraded together: a cheap first map, and a check of additivity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.corpora.records import Chunk
from bitwright.damage.damage_map import DamageMap, mean_kld, standard_error
from bitwright.damage.kld import Floats, make_reference, score
from bitwright.damage.ledger import Ledger, ProbeId, Sums, chunk_id
from bitwright.damage.probe import (
    PackedTensors,
    Progress,
    probe_types,
    probed_tensors,
    span_sums,
    with_rows,
)
from bitwright.engine.packing import Bytes
from bitwright.engine.session import Session
from bitwright.engine.suffix import Stream, SuffixRunner
from bitwright.engine.tensors import layer, role

BANDS = 3
PREFIX = "group:"


@dataclass(frozen=True, slots=True)
class GroupDamage:
    """One group on one category: mean KLD over scored rows with all members degraded, nats.

    sum_of_members: of their single damages in a map, None without one. Above 1, ``ratio`` says
    that single damages overstate what the group loses together.
    """

    group: str
    members: tuple[str, ...]
    category: str
    kld_nats: float
    se: float
    n_tokens: int
    sum_of_members: float | None

    @property
    def ratio(self) -> float | None:
        """Sum of the members' damages over the group's."""
        if self.sum_of_members is None or self.kld_nats <= 0:
            return None
        return self.sum_of_members / self.kld_nats


def plan_groups(tensors: Sequence[str], bands: int = BANDS) -> dict[str, tuple[str, ...]]:
    """'role' or 'role 1/3' … → members, in the tensors' order; bands are thirds of the depth."""
    depth = 1 + max((n for t in tensors if (n := layer(t)) is not None), default=0)
    found: dict[str, list[str]] = {}
    for name in tensors:
        number = layer(name)
        band = "" if number is None else f" {1 + number * bands // depth}/{bands}"
        found.setdefault(role(name) + band, []).append(name)
    return {group: tuple(members) for group, members in found.items()}


def measure_groups(
    session: Session,
    packed: PackedTensors,
    chunks: Mapping[str, Sequence[Chunk]],
    ledger: Ledger,
    *,
    probe_type: str = "Q2_K",
    bands: int = BANDS,
    runner: SuffixRunner | None = None,
    damage_map: DamageMap | None = None,
    progress: Progress | None = None,
) -> list[GroupDamage]:
    """Degrade role × depth-band groups on every chunk; the ledger's results are not repeated.

    With a runner whose partial passes are exact, each pass starts at the group's first member.
    """
    groups = plan_groups(probed_tensors(session), bands)
    used = with_rows(chunks)
    done, total = 0, len(groups) * sum(map(len, used.values()))
    session.restore_all()
    for category, found in used.items():
        for chunk in found:
            known = ledger.probes(chunk_id(chunk), category)
            missing = [g for g in groups if (PREFIX + g, probe_type) not in known]
            done += len(groups) - len(missing)
            if not missing:
                continue
            forward = _GroupForward(session, chunk, runner)
            reference = make_reference(
                forward.reference(), chunk.targets(), threads=session.threads
            )
            for group in missing:
                pairs = probe_types(session.model, groups[group], probe_type)
                logits = forward.degraded([(n, t, packed.get(n, t)) for n, t in pairs])
                sums = span_sums(score(reference, logits, chunk.targets()), chunk.scored())
                session.restore_all()
                ledger.record(ProbeId(PREFIX + group, probe_type, chunk_id(chunk), category), sums)
                done += 1
                if progress is not None:
                    progress(done, total, f"{category}: {group}")
    return [
        _damage(group, members, category, ledger, found, probe_type, damage_map)
        for group, members in groups.items()
        for category, found in used.items()
    ]


class _GroupForward:
    """Passes over one chunk with several weights degraded, partial where they can be."""

    def __init__(self, session: Session, chunk: Chunk, runner: SuffixRunner | None) -> None:
        self.session = session
        self.batch = (chunk.tokens, chunk.starts, chunk.rows())
        self.stream: Stream | None = None if runner is None else runner.start(*self.batch)

    def reference(self) -> Floats:
        if self.stream is not None:
            return self.stream.reference_logits()
        return self.session.logits(*self.batch)

    def degraded(self, members: Sequence[tuple[str, str, Bytes]]) -> Floats:
        """Logits with all members swapped; the caller restores them."""
        order = {name: i for i, name in enumerate(self.session.weights)}
        first = min((name for name, _, _ in members), key=order.__getitem__)
        stream = self.stream
        # A member without a cut may be read through a view, or stand before every cut.
        partial = stream is not None and all(stream.cut(name) for name, _, _ in members)
        if stream is not None and partial:
            stream.advance(first)
        for name, type_name, data in members:
            self.session.set_tensor(name, type_name, data)
        if stream is not None and partial:
            return stream.logits(first)
        return self.session.logits(*self.batch)


def _damage(
    group: str,
    members: tuple[str, ...],
    category: str,
    ledger: Ledger,
    chunks: Sequence[Chunk],
    probe_type: str,
    damage_map: DamageMap | None,
) -> GroupDamage:
    key = (PREFIX + group, probe_type)
    sums: list[Sums] = [ledger.probes(chunk_id(c), category)[key]["scored"] for c in chunks]
    total = None
    if damage_map is not None:
        rows = damage_map.probe_rows
        mine = rows[
            (rows["span"] == "scored")
            & (rows["category"] == category)
            & rows["tensor"].isin(list(members))
        ]
        total = float(mine["kld_nats"].sum()) if len(mine) == len(members) else None
    return GroupDamage(
        group,
        members,
        category,
        mean_kld(sums),
        standard_error(sums),
        sum(s.n for s in sums),
        total,
    )


def group_lines(found: Sequence[GroupDamage]) -> list[str]:
    """The groups as text, the most damaged first within each category."""
    lines = []
    for one in sorted(found, key=lambda g: (g.category, -g.kld_nats)):
        ratio = "" if one.ratio is None else f"  sum of members / group {one.ratio:.2f}"
        lines.append(
            f"{one.category:<14} {one.group:<22} {len(one.members):>3} tensors "
            f"{one.kld_nats:.5f} ± {one.se:.5f} nats{ratio}"
        )
    return lines
