"""Token tables with a known truth: documents of uneven length, correlated and heavy-tailed KLD."""

import numpy as np

from bitwright.eval.tokens import TokenTable


def table(
    kld: np.ndarray,
    document: np.ndarray,
    *,
    label: str = "a",
    category: str = "code",
    top1: np.ndarray | None = None,
    nll: np.ndarray | None = None,
    kind: int | np.ndarray = 2,
) -> TokenTable:
    n = len(kld)
    document = np.asarray(document, dtype=np.int32)
    count = int(document.max()) + 1 if n else 0
    return TokenTable(
        label=label,
        category=category,
        kld=np.asarray(kld, dtype=np.float64),
        same_top1=np.ones(n, dtype=bool) if top1 is None else top1,
        nll=np.full(n, 2.0) if nll is None else nll,
        nll_ref=np.full(n, 2.0),
        kind=np.broadcast_to(np.asarray(kind, dtype=np.uint8), n).copy(),
        document=document,
        documents=tuple(f"d{i}" for i in range(count)),
    )


def draw_pair(
    rng: np.random.Generator, n_documents: int, tail: str, ratio: float = 0.9
) -> tuple[TokenTable, TokenTable]:
    """Two files on the same tokens: E[KLD of b] = 0.05 nats, E[KLD of a] = ratio · 0.05."""
    if tail == "dominated":
        return _draw_dominated(rng, n_documents, ratio)
    lengths = rng.integers(20, 120, n_documents)
    document = np.repeat(np.arange(n_documents), lengths)
    n = len(document)
    if tail == "lognormal":
        token = np.exp(rng.normal(-(1.5**2) / 2, 1.5, n))
    elif tail == "pareto":
        token = 1.5 * rng.pareto(2.5, n)
    else:
        token = rng.exponential(1.0, n)
    hard = np.exp(rng.normal(-0.125, 0.5, n_documents))[document]
    b = 0.05 * token * hard
    shift = np.exp(rng.normal(-0.02, 0.2, n_documents))[document]
    a = ratio * b * shift * np.exp(rng.normal(-0.125, 0.5, n))
    return table(a, document, label="a"), table(b, document, label="b")


def _draw_dominated(
    rng: np.random.Generator, n_documents: int, ratio: float
) -> tuple[TokenTable, TokenTable]:
    """A few documents carry most of the KLD, and not the same share in both files."""
    lengths = rng.integers(20, 60, n_documents)
    document = np.repeat(np.arange(n_documents), lengths)
    shared = rng.normal(-0.72, 1.2, n_documents)
    b = 0.05 * np.exp(shared + rng.normal(-0.5, 1.0, n_documents))[document]
    a = 0.05 * ratio * np.exp(shared + rng.normal(-0.18, 0.6, n_documents))[document]
    return table(a, document, label="a"), table(b, document, label="b")
