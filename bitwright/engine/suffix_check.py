"""The self-check of partial passes, run once before a session is probed with them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.ggml_types import fits_row
from bitwright.engine.packing import Bytes, convert_rows, row_slices
from bitwright.engine.session import Session
from bitwright.engine.suffix import SuffixRunner
from bitwright.errors import EngineError

CHECK_TYPES = ("Q4_0", "F16", "BF16")
# Largest difference of a logit allowed where layers run on a GPU, whose kernels may sum in another
# order from pass to pass: a KLD of about its square. On a CPU the bits must be equal.
GPU_TOLERANCE = 1e-3


def check_suffix(
    runner: SuffixRunner,
    tokens: NDArray[np.int32],
    starts: Sequence[int],
    rows: NDArray[np.int64],
) -> tuple[bool, str]:
    """Whether partial passes give the bits of full ones, on an early and a late weight; and why.

    With layers on a GPU, logits within `GPU_TOLERANCE`.

    False means: probe with `Session.logits` and tell the user the reason. No weight may be
    swapped; afterwards none is.
    """
    session = runner.session
    stream = runner.start(tokens, starts, rows)
    allowed = GPU_TOLERANCE if session.options.gpu_layers else 0.0
    try:
        stream.reference_logits()
        usable = [
            name for name in session.weights if stream.cut(name) and _check_type(runner, name)
        ]
        for name in dict.fromkeys(usable[:1] + usable[-1:]):
            kind = _check_type(runner, name)
            assert kind is not None
            packed = _pack(session, name, kind)
            suffix = stream.logits_with_swap(name, kind, packed).copy()
            with session.swapped(name, kind, packed):
                full = session.logits(stream.tokens, stream.starts, stream.rows)
            worst = float(np.abs(suffix - full).max())
            if worst > allowed:
                return False, f"partial and full passes differ by {worst:.3g} with {name} at {kind}"
    except EngineError as failure:
        return False, str(failure)
    if not usable:
        return True, f"every pass is a full one: {stream.obstacle() or 'no weight has a cut'}"
    how = f"within {allowed:g} a logit" if allowed else "bit for bit"
    return True, f"partial passes equal full ones {how} ({usable[0]}, {usable[-1]})"


def _check_type(runner: SuffixRunner, name: str) -> str | None:
    """A type that this weight can be packed to for the check and that is not its own."""
    info = runner.session.model.tensor(name)
    taken = {info.type, runner.session.working_type}
    fitting = (t for t in CHECK_TYPES if t not in taken and fits_row(t, info.n_per_row))
    return next(fitting, None) if info.type in ("F32", "F16", "BF16") else None


def _pack(session: Session, name: str, kind: str) -> Bytes:
    info, raw = session.model.tensor(name), session.model.raw(name)
    slices = [convert_rows(raw, info, first, n, kind, None) for _, first, n in row_slices(info)]
    return np.concatenate(slices)
