"""Experts: how much text each one saw, what is never run, and the damage of a single one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.records import Chunk
from bitwright.damage.kld import make_reference, score
from bitwright.engine.ggml_types import fallback_type, tensor_type
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Bytes, Packer, quantize_rows, to_float32
from bitwright.engine.session import Session
from bitwright.engine.tensors import is_quantizable, role
from bitwright.errors import ConfigError, InputError

ENOUGH_ROWS = 64  # activations of an expert under which its importance is not to be trusted
UNSEEN_RATE = 3.0  # rule of three: unseen in n rows means a rate under 3 / n at 95 %
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often the experts of one tensor were chosen while the imatrix was collected.

    rows: (n_expert,) activations. tokens: of all calibration text. rare: experts with fewer than
    the wished rows. tokens_needed: text after which the rarest is expected to have them; a lower
    bound when ``unseen`` experts exist, since their rate is not known.
    """

    tensor: str
    rows: NDArray[np.float64]
    tokens: int
    rare: tuple[int, ...]
    unseen: tuple[int, ...]
    tokens_needed: int


def expert_coverage(
    imatrix: Imatrix, model: ModelFile, wished_rows: int = ENOUGH_ROWS
) -> tuple[Coverage, ...]:
    """Coverage of every tensor of several experts, in the model's order.

    A tensor without an entry saw nothing; its experts are all unseen.
    """
    tokens = imatrix.chunk_count * imatrix.chunk_size
    found = []
    for info in model.tensors:
        if info.n_matrices < 2 or not is_quantizable(info, model.arch):
            continue
        entry = imatrix.entries.get(info.name)
        rows = np.zeros(info.n_matrices) if entry is None else entry.counts.astype(np.float64)
        found.append(_coverage(info.name, rows, tokens, wished_rows))
    return tuple(found)


def _coverage(tensor: str, rows: NDArray[np.float64], tokens: int, wished_rows: int) -> Coverage:
    unseen = tuple(int(i) for i in np.flatnonzero(rows == 0))
    least = float(rows[rows > 0].min()) if (rows > 0).any() else 0.0
    # An unseen expert is rarer than the rarest seen one, and than the rule of three says.
    rate = min(least, UNSEEN_RATE) if unseen and least else least
    needed = math.ceil(tokens * wished_rows / rate) if rate > 0 and tokens else 0
    return Coverage(
        tensor=tensor,
        rows=rows,
        tokens=tokens,
        rare=tuple(int(i) for i in np.flatnonzero(rows < wished_rows)),
        unseen=unseen,
        tokens_needed=needed if (rows < wished_rows).any() else tokens,
    )


def coverage_lines(found: Sequence[Coverage], wished_rows: int = ENOUGH_ROWS) -> list[str]:
    """What to show before a long run: how well experts are covered, and what it would take."""
    lines = []
    for one in found:
        seen = len(one.rows) - len(one.unseen)
        line = f"{one.tensor}: {seen} of {len(one.rows)} experts seen, {int(one.rows.min())} to "
        line += f"{int(one.rows.max())} rows each"
        if one.rare:
            shown = ", ".join(map(str, one.rare[:SHOWN])) + (", …" * (len(one.rare) > SHOWN))
            least = "at least " if one.unseen else "about "
            need = f"{least}{one.tokens_needed:,} tokens" if one.tokens_needed else "other text"
            line += (
                f"; under {wished_rows} rows, not to be trusted: {shown} "
                f"(that many rows for all take {need}; this imatrix saw {one.tokens:,})"
            )
        lines.append(line)
    return lines


def list_unexecuted(session: Session, imatrix: Imatrix | None) -> list[str]:
    """Quantizable tensors that no pass runs, by role, and badly covered experts; one line each.

    Found by what the passes read, not by names: draft heads, projectors, per-layer tables.
    """
    model = session.model
    executed = set(session.weights)
    idle: dict[str, list[str]] = {}
    for info in model.tensors:
        if is_quantizable(info, model.arch) and info.name not in executed:
            idle.setdefault(role(info.name), []).append(info.name)
    lines = [
        f"{name}: no pass runs {len(tensors)} tensor(s) ({tensors[0]}); unmeasured, they get the "
        "declared type of their role"
        for name, tensors in idle.items()
    ]
    if imatrix is not None:
        rare = [one for one in expert_coverage(imatrix, model) if one.rare]
        lines += coverage_lines(rare)
    return lines


def expert_bytes(session: Session, packer: Packer, name: str, type_name: str, expert: int) -> Bytes:
    """The whole tensor in the session's working type, one expert rounded to ``type_name``.

    Raises:
        ConfigError: the tensor has no such expert.
    """
    info = session.model.tensor(name)
    if info.n_matrices < 2 or not 0 <= expert < info.n_matrices:
        raise ConfigError(
            f"{name} has {info.n_matrices} expert(s), number {expert} was asked for: "
            f"give 0 to {info.n_matrices - 1}"
        )
    kind = fallback_type(tensor_type(type_name).name, info.n_per_row)
    own, working = tensor_type(info.type).name, session.working_type
    importance = packer.importance(name, kind)
    parts = []
    raw = session.model.raw(name).reshape(info.n_matrices, -1)
    # Matrix by matrix, so that one expert at a time is in float32.
    for number in range(info.n_matrices):
        if number != expert and own == working:
            parts.append(raw[number])
            continue
        values = to_float32(raw[number], own, info.n_elements // info.n_matrices)
        values = values.reshape(-1, info.n_per_row)
        if number == expert:
            weights = None if importance is None else importance[number]
            packed = quantize_rows(values, kind, weights)
            values = to_float32(packed, kind, values.size).reshape(values.shape)
        parts.append(quantize_rows(values, working))
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class ExpertDamage:
    """Damage of one expert of one tensor: mean KLD over scored rows, nats; rows of imatrix."""

    tensor: str
    expert: int
    kld_nats: float
    seen_rows: float
    trusted: bool


def measure_experts(
    session: Session,
    packer: Packer,
    chunks: Sequence[Chunk],
    name: str,
    *,
    probe_type: str = "Q2_K",
    experts: Sequence[int] | None = None,
    wished_rows: int = ENOUGH_ROWS,
) -> list[ExpertDamage]:
    """Degrade one expert's slice at a time; those seen too rarely are flagged, not trusted.

    Raises:
        ConfigError: no such expert. InputError: no scored rows in the chunks.
    """
    info = session.model.tensor(name)
    wanted = range(info.n_matrices) if experts is None else experts
    entry = None if packer.imatrix is None else packer.imatrix.entries.get(name)
    seen = np.zeros(info.n_matrices) if entry is None else entry.counts.astype(np.float64)
    sums, rows = dict.fromkeys(wanted, 0.0), 0
    for chunk in chunks:
        scored, targets = chunk.scored(), chunk.targets()
        batch = (chunk.tokens, chunk.starts, chunk.rows())
        reference = make_reference(session.logits(*batch), targets, threads=session.threads)
        rows += int(scored.sum())
        for expert in wanted:
            data = expert_bytes(session, packer, name, probe_type, expert)
            with session.swapped(name, session.working_type, data):
                kld = score(reference, session.logits(*batch), targets).kld
            sums[expert] += float(kld[scored].sum())
    if not rows:
        raise InputError("the chunks have no scored rows: give text to measure experts on")
    return [
        ExpertDamage(name, e, total / rows, float(seen[e]), bool(seen[e] >= wished_rows))
        for e, total in sums.items()
    ]
