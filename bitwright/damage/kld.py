"""Kullback-Leibler divergence per token, in float32, as exact as the damage of one tensor needs.

With p the reference's probabilities and z a row of logits,

    KLD = t(z) - t(z_reference),   t(z) = log Σ exp(z - max z) - p · (z - max z),

and t(z_reference) is the reference's entropy. Both terms go through the same float32 kernel, so
its systematic errors cancel; partial sums of `SEGMENT` items are added in float64. The error is
about 1e-6 nats of a token and below 1e-7 of a mean, several times faster than float64: the
CPU's `exp` decides how much.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitwright.errors import InputError, NotFiniteError

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Items per float32 partial sum: short enough for the rounding, long enough for BLAS.
SEGMENT = 4096
# Items of one block of rows: its buffer (float32) stays in the second-level cache.
BLOCK_ITEMS = 1 << 18
ONES = np.ones(SEGMENT, np.float32)


@dataclass(frozen=True, slots=True)
class Reference:
    """What scoring needs of the reference's logits for k rows over V tokens.

    probs: float32 (k, V), the only large part. entropy: nats, float64 (k,), from the scoring
    kernel itself (see the module). top1: most likely token, int64 (k,). targets: the tokens that
    the rows predict, int64 (k,), and target_nll: their negative log-likelihood, nats, float64 (k,).
    threads: on how many the rows are scored; the values are the same on any number.
    """

    probs: Floats
    entropy: Doubles
    top1: NDArray[np.int64]
    targets: NDArray[np.int64]
    target_nll: Doubles
    threads: int = 1

    @property
    def size_bytes(self) -> int:
        """Memory held, nearly all of it the probabilities."""
        return self.probs.nbytes


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Per row: KLD from the reference in nats, same most likely token, NLL of the target in nats.

    `kld` is not clipped at zero: rounding may leave -1e-7, and clipping would bias the mean.
    """

    kld: Doubles
    same_top1: NDArray[np.bool_]
    nll: Doubles


def make_reference(logits: Floats, targets: NDArray[np.integer], *, threads: int = 1) -> Reference:
    """Prepare the reference's logits (k, V) float32 for scoring; the logits are not kept.

    `threads`: for this and for every `score` against it.

    Raises:
        NotFiniteError: a logit is NaN or infinite.
        InputError: the targets do not belong to these rows.
    """
    target = _checked_targets(logits, targets)
    k, n_vocab = logits.shape
    reference = Reference(
        probs=np.empty((k, n_vocab), np.float32),
        entropy=np.empty(k),
        top1=np.empty(k, np.int64),
        targets=target,
        target_nll=np.empty(k),
        threads=threads,
    )

    def prepare(rows: slice, buffer: Floats) -> None:
        z, p = logits[rows], reference.probs[rows]
        top1 = _shift(z, buffer)
        total = _exp_sums(buffer)
        np.multiply(buffer, (1.0 / total).astype(np.float32)[:, None], out=p)
        _shift(z, buffer)
        dot = _row_dots(p, buffer)
        _check_finite(total + dot, rows, z)
        reference.top1[rows] = top1
        reference.entropy[rows] = np.log(total) - dot
        reference.target_nll[rows] = _target_nll(z, top1, total, target[rows])

    _over_blocks(prepare, k, n_vocab, threads)
    return reference


def score(reference: Reference, logits: Floats, targets: NDArray[np.integer]) -> TokenScores:
    """Score other logits (k, V) float32 of the same rows; the reference's own give exactly 0.

    Raises:
        NotFiniteError: a logit is NaN or infinite; the row and the token are named.
        InputError: other rows or another vocabulary than the reference's.
    """
    target = _checked_targets(logits, targets)
    k, n_vocab = reference.probs.shape
    if logits.shape != (k, n_vocab):
        raise InputError(
            f"{logits.shape[0]} rows of {logits.shape[1]} logits were given for a reference of {k} "
            f"rows of {n_vocab}: score the same tokens with a model of the same vocabulary"
        )
    if not np.array_equal(target, reference.targets):
        raise InputError("the targets differ from the reference's: score the same tokens with both")
    scores = TokenScores(np.empty(k), np.empty(k, np.bool_), np.empty(k))

    def compare(rows: slice, buffer: Floats) -> None:
        z = logits[rows]
        top1 = _shift(z, buffer)
        dot = _row_dots(reference.probs[rows], buffer)
        total = _exp_sums(buffer)
        _check_finite(total + dot, rows, z)
        scores.kld[rows] = np.log(total) - dot - reference.entropy[rows]
        scores.same_top1[rows] = top1 == reference.top1[rows]
        scores.nll[rows] = _target_nll(z, top1, total, target[rows])

    _over_blocks(compare, k, n_vocab, reference.threads)
    return scores


def _checked_targets(logits: Floats, targets: NDArray[np.integer]) -> NDArray[np.int64]:
    target = np.asarray(targets, np.int64)
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise InputError(
            f"logits of shape {logits.shape} need one target per row, {target.shape} were given"
        )
    if len(target) and not 0 <= target.min() <= target.max() < logits.shape[1]:
        raise InputError(
            f"a target token is outside 0…{logits.shape[1] - 1}: the text was tokenized for "
            "another model"
        )
    return target


def _over_blocks(work: Callable[[slice, Floats], None], k: int, n_vocab: int, threads: int) -> None:
    """Call `work(rows, buffer)` for every block of rows, each thread with a buffer of its own.

    A row's result depends on nothing but the row. Raises what the first failing block raised.
    """
    step = max(1, BLOCK_ITEMS // n_vocab)
    starts = range(0, k, step)
    threads = max(1, min(threads, len(starts)))

    def share(mine: range) -> None:
        buffer = np.empty((min(step, k), n_vocab), np.float32)
        for start in mine:
            rows = slice(start, min(k, start + step))
            work(rows, buffer[: rows.stop - start])

    # Neighbouring rows to one thread: the blocks of a failing row come first in the first share.
    size = max(1, -(-len(starts) // threads))
    shares = [starts[i : i + size] for i in range(0, len(starts), size)]
    if threads == 1:
        for mine in shares:
            share(mine)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="kld") as pool:
        for done in [pool.submit(share, mine) for mine in shares]:
            done.result()


def _shift(z: Floats, buffer: Floats) -> NDArray[np.int64]:
    """Write z - max z of each row to `buffer`; returns the column of the maximum."""
    top1: NDArray[np.int64] = z.argmax(axis=1)
    with np.errstate(invalid="ignore"):  # inf - inf; _check_finite reports it
        np.subtract(z, np.take_along_axis(z, top1[:, None], 1), out=buffer)
    return top1


def _exp_sums(buffer: Floats) -> Doubles:
    """Turn the shifted rows into their exponentials, in place; returns the sums."""
    np.exp(buffer, out=buffer)
    return _row_dots(buffer, None)


def _row_dots(a: Floats, b: Floats | None) -> Doubles:
    """Σ a·b of each row (Σ a without `b`): float32 BLAS per segment, float64 over segments."""
    n_rows, n = a.shape
    whole = n - n % SEGMENT
    head = a[:, :whole].reshape(n_rows, -1, SEGMENT)
    other = ONES if b is None else b[:, :whole].reshape(n_rows, -1, SEGMENT)
    rest = ONES[: n - whole] if b is None else b[:, whole:]
    with np.errstate(invalid="ignore"):  # 0 · inf; _check_finite reports it
        sums: Doubles = np.vecdot(head, other).sum(axis=1, dtype=np.float64)
        sums += np.vecdot(a[:, whole:], rest)
    return sums


def _target_nll(
    z: Floats, top1: NDArray[np.int64], total: Doubles, targets: NDArray[np.int64]
) -> Doubles:
    rows = np.arange(len(z))
    gap: Doubles = z[rows, top1].astype(np.float64) - z[rows, targets]
    return np.log(total) + gap


def _check_finite(sums: Doubles, rows: slice, z: Floats) -> None:
    # Every term is finite only if every logit is: an infinite one leaves inf or NaN in a sum.
    bad = np.flatnonzero(~np.isfinite(sums))
    if len(bad) == 0:
        return
    row = int(bad[0])
    columns = np.flatnonzero(~np.isfinite(z[row]))
    token = f"token {int(columns[0])} ({z[row, columns[0]]})" if len(columns) else "all of them"
    raise NotFiniteError(
        f"row {rows.start + row} has a logit that is NaN or infinite, {token}: "
        "this result cannot be scored"
    )
