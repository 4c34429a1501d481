"""KLD kernel against float64, its tolerances, and what it refuses."""

import warnings

import numpy as np
import pytest

from bitwright.damage.kld import BLOCK_ITEMS, SEGMENT, make_reference, score
from bitwright.errors import EngineError, InputError

VOCABULARIES = (2_048, 49_152, 151_936, 256_000)


def made_logits(k: int, n_vocab: int, spread: float, seed: int = 0) -> np.ndarray:
    """Rows whose largest logit stands about `spread` above the lowest."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((k, n_vocab), dtype=np.float32) * np.float32(spread / 8)
    z[np.arange(k), rng.integers(0, n_vocab, k)] += np.float32(spread / 2)
    return z


def noisy(z: np.ndarray, size: float, seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(z.shape, dtype=np.float32)
    return z + np.float32(size) * noise


def log_probs64(z: np.ndarray) -> np.ndarray:
    shifted = z.astype(np.float64) - z.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def kld64(z: np.ndarray, other: np.ndarray) -> np.ndarray:
    p, q = log_probs64(z), log_probs64(other)
    return (np.exp(p) * (p - q)).sum(axis=1)


@pytest.mark.parametrize("n_vocab", VOCABULARIES)
@pytest.mark.parametrize("spread", [8.0, 30.0])
def test_equals_float64(n_vocab: int, spread: float) -> None:
    k = 6
    z = made_logits(k, n_vocab, spread)
    targets = np.arange(k) * 7
    reference = make_reference(z, targets)
    for size in (1.0, 0.05, 0.002):
        other = noisy(z, size)
        scores = score(reference, other, targets)
        exact = kld64(z, other)
        np.testing.assert_allclose(scores.kld, exact, rtol=2e-6, atol=2e-6)
        assert abs(scores.kld.mean() - exact.mean()) < 1e-6 + 1e-6 * exact.mean()
        nll = -log_probs64(other)[np.arange(k), targets]
        np.testing.assert_allclose(scores.nll, nll, rtol=0, atol=1e-6)
        assert (scores.same_top1 == (other.argmax(1) == z.argmax(1))).all()
    np.testing.assert_allclose(
        reference.target_nll, -log_probs64(z)[np.arange(k), targets], rtol=0, atol=1e-6
    )
    entropy = -(np.exp(log_probs64(z)) * log_probs64(z)).sum(axis=1)
    np.testing.assert_allclose(reference.entropy, entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("true_kld", "tolerance"), [(1e-2, 0.02), (1e-3, 0.05), (1e-4, 0.2)])
def test_relative_error_of_each_row_at_a_large_vocabulary(
    true_kld: float, tolerance: float
) -> None:
    z = made_logits(8, 256_000, 30.0)
    first = kld64(z, noisy(z, 0.01)).mean()
    other = noisy(z, 0.01 * np.sqrt(true_kld / first))  # KLD grows with the square
    exact = kld64(z, other)
    assert exact.mean() == pytest.approx(true_kld, rel=0.3)
    measured = score(make_reference(z, np.zeros(8, int)), other, np.zeros(8, int)).kld
    assert (np.abs(measured - exact) <= tolerance * exact.mean()).all()
    assert measured.mean() == pytest.approx(exact.mean(), rel=tolerance / 10)


@pytest.mark.parametrize("n_vocab", [2, SEGMENT - 1, SEGMENT, SEGMENT + 1, BLOCK_ITEMS + 3])
def test_the_reference_itself_scores_exactly_zero(n_vocab: int) -> None:
    z = made_logits(5, n_vocab, 20.0)
    reference = make_reference(z, np.zeros(5, int))
    again = score(reference, z.copy(), np.zeros(5, int))
    assert (again.kld == 0.0).all()
    assert again.same_top1.all()
    assert (again.nll == reference.target_nll).all()


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    z = made_logits(4, 5_000, 10.0)
    scores = score(make_reference(z, np.zeros(4, int)), z + np.float32(64), np.zeros(4, int))
    assert np.abs(scores.kld).max() < 2e-6


def test_certain_rows_and_far_logits_stay_finite() -> None:
    z = np.zeros((2, 3_000), np.float32)
    z[:, 5] = 3e4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference = make_reference(z, np.full(2, 5))
        same = score(reference, z, np.full(2, 5))
        other = z.copy()
        other[1, 7] = 4e4
        swapped = score(reference, other, np.full(2, 5))
    assert (same.kld == 0).all()
    assert (same.nll == 0).all()
    assert swapped.kld == pytest.approx([0.0, 1e4])
    assert swapped.same_top1.tolist() == [True, False]


def test_rows_do_not_depend_on_the_block_they_are_in() -> None:
    n_vocab = BLOCK_ITEMS // 4  # four rows a block
    z = made_logits(6, n_vocab, 12.0)
    other = noisy(z, 0.1)
    targets = np.arange(6)
    together = score(make_reference(z, targets), other, targets)
    alone = score(make_reference(z[5:], targets[5:]), other[5:], targets[5:])
    assert together.kld[5] == alone.kld[0]


def test_the_reference_keeps_no_view_of_the_logits() -> None:
    z = made_logits(3, 1_000, 10.0)
    kept = z.copy()
    reference = make_reference(z, np.zeros(3, int))
    z[:] = 0.0
    assert (score(reference, kept, np.zeros(3, int)).kld == 0).all()
    assert reference.size_bytes == 4 * 3 * 1_000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_vocab", [1_000, 10_000])
def test_broken_logits_are_refused_by_row_and_token(value: float, n_vocab: int) -> None:
    z = made_logits(40, n_vocab, 10.0)
    targets = np.zeros(40, int)
    reference = make_reference(z, targets)
    z[37, n_vocab - 2] = value
    with pytest.raises(EngineError, match=rf"row 37 .*token {n_vocab - 2} "):
        score(reference, z, targets)
    with pytest.raises(EngineError, match=rf"row 37 .*token {n_vocab - 2} "):
        make_reference(z, targets)


def test_a_whole_row_of_nan_is_refused() -> None:
    z = np.full((1, 10), np.nan, np.float32)
    with pytest.raises(EngineError, match="row 0 "):
        make_reference(z, np.zeros(1, int))


def test_other_rows_vocabularies_and_targets_are_refused() -> None:
    z = made_logits(3, 1_000, 10.0)
    reference = make_reference(z, np.zeros(3, int))
    with pytest.raises(InputError, match="3 rows of 999"):
        score(reference, z[:, :999], np.zeros(3, int))
    with pytest.raises(InputError, match="targets differ"):
        score(reference, z, np.ones(3, int))
    with pytest.raises(InputError, match="another model"):
        make_reference(z, np.full(3, 1_000))
    with pytest.raises(InputError, match="one target per row"):
        make_reference(z, np.zeros(2, int))


def test_no_rows_give_no_scores() -> None:
    empty = np.empty((0, 100), np.float32)
    scores = score(make_reference(empty, np.empty(0, int)), empty, np.empty(0, int))
    assert len(scores.kld) == len(scores.nll) == 0


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    k = 41
    z, targets = made_logits(k, 49_152, 12.0), np.arange(k)
    other = noisy(z, 0.1)
    one = make_reference(z, targets)
    many = make_reference(z, targets, threads=threads)
    for field in ("probs", "entropy", "top1", "target_nll"):
        assert np.array_equal(getattr(one, field), getattr(many, field)), field
    a, b = score(one, other, targets), score(many, other, targets)
    assert np.array_equal(a.kld, b.kld)
    assert np.array_equal(a.nll, b.nll)
    assert np.array_equal(a.same_top1, b.same_top1)
    other[[7, 33], 5] = np.nan
    with pytest.raises(EngineError, match="row 7 "):
        score(many, other, targets)
