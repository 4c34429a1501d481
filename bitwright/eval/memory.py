"""Whether the logits of the largest chunk fit in memory, said before the first forward pass."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bitwright.corpora.records import Chunk
from bitwright.errors import ConfigError

FLOAT_BYTES = 4
COPIES = 2  # llama.cpp's output buffer, and the reference's probabilities


def require_memory(
    chunks_by_category: Mapping[str, Sequence[Chunk]], n_vocab: int, available_bytes: int | None
) -> None:
    """Chunks are scored one after the other, so the largest one decides.

    Raises:
        ConfigError: it does not fit; the message says what would.
    """
    chunks = [chunk for many in chunks_by_category.values() for chunk in many]
    rows = max((len(chunk.rows()) for chunk in chunks), default=0)
    require_rows(rows, n_vocab, available_bytes)


def require_rows(rows: int, n_vocab: int, available_bytes: int | None) -> None:
    """The same for a chunk that is not built yet; None where free memory is not known.

    Raises:
        ConfigError: it does not fit; the message says what would.
    """
    needed = chunk_bytes(rows, n_vocab)
    if available_bytes is not None and needed > available_bytes:
        fits = max(1, available_bytes // chunk_bytes(1, n_vocab))
        raise ConfigError(
            f"a chunk of {rows} scored tokens × {n_vocab} logits needs {needed / 1e9:.1f} GB and "
            f"{available_bytes / 1e9:.1f} GB are free: use a context (--ctx, or n_ctx of the "
            f"workflow) of at most {fits} tokens"
        )


def chunk_bytes(rows: int, n_vocab: int) -> int:
    """What scoring a chunk holds at one time."""
    return COPIES * FLOAT_BYTES * rows * n_vocab


def available_memory() -> int | None:
    """Free memory in bytes, as Linux counts it; None where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None
