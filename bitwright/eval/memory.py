"""What fits in memory: the logits of the largest chunk, said before the first forward pass, and
how many answers can be written side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bitwright.corpora.records import Chunk
from bitwright.engine.decoder import DEFAULT_CTX, DecoderOptions
from bitwright.engine.model_file import ModelFile
from bitwright.errors import ConfigError

FLOAT_BYTES, HALF_BYTES = 4, 2
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


def fitting_slots(
    model: ModelFile, options: DecoderOptions, available_bytes: int | None
) -> DecoderOptions:
    """The options with as many slots as leave half of the free memory; at least one.

    Each slot keeps keys and values of its whole context. Results do not depend on how many run
    side by side.
    """
    each = kv_bytes(model, options.n_ctx)
    if available_bytes is None or each == 0:
        return options
    return replace(options, slots=max(1, min(options.slots, available_bytes // 2 // each)))


def kv_bytes(model: ModelFile, n_ctx: int) -> int:
    """Keys and values in F16 of one sequence; 0 where the file does not say its attention's shape.

    ``n_ctx`` 0: the decoder's own choice.
    """

    def fact(name: str) -> object:
        return model.meta(f"{model.arch}.{name}")

    layers, heads, width = (
        fact("block_count"),
        fact("attention.head_count"),
        fact("embedding_length"),
    )
    kv_heads = fact("attention.head_count_kv") or heads
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(width, int)):
        return 0
    per_layer = [kv_heads] * layers if isinstance(kv_heads, int) else kv_heads
    if not isinstance(per_layer, list | tuple):
        return 0
    key, value = (fact(f"attention.{name}_length") or width // heads for name in ("key", "value"))
    trained = fact("context_length")
    tokens = n_ctx or min(DEFAULT_CTX, trained if isinstance(trained, int) else DEFAULT_CTX)
    return HALF_BYTES * tokens * sum(map(int, per_layer)) * (int(str(key)) + int(str(value)))
