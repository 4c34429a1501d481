"""The noise floor: KLD of the reference against itself under what users will really run.

Probes share one setting, so their own floor is next to zero. But a file is run with other thread
counts, attention kernels and number formats, and damage below what those change is of no use.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.damage.kld import Floats, Reference, make_reference, score
from bitwright.engine.loaded_model import DecodeContext, LoadedModel
from bitwright.engine.model_file import ModelFile
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import EngineError

FLOAT_TYPES = ("F16", "BF16", "F32")


def floors_in_session(session: Session, chunk: Chunk) -> dict[str, float]:
    """Mean |KLD| in nats of the reference with other threads and the other attention kernel.

    The session must be at its reference. NaN-free; a variant that llama.cpp refuses is left out.
    """
    reference = reference_of(session, chunk)
    options = session.options
    other_threads = session.threads - 1 if session.threads > 1 else 2
    variants: dict[str, tuple[int, bool | None]] = {
        f"{other_threads} threads": (other_threads, options.flash_attn),
        "flash attention on": (session.threads, True),
        "flash attention off": (session.threads, False),
    }
    found = {}
    for label, (threads, flash) in variants.items():
        nats = _floor(reference, chunk, partial(_decode, session, chunk, threads, flash))
        if nats is not None:
            found[label] = nats
    return found


def floors_of_formats(
    model: ModelFile, options: SessionOptions, own_type: str, chunk: Chunk, reference: Reference
) -> dict[str, float]:
    """Mean |KLD| in nats with the weights in another number format, each loaded anew.

    ``own_type``: what the reference was computed in. Only one model is in memory at a time, so
    close the reference's session before.
    """
    if not _is_float(model):
        return {}  # weights on a quantization grid cannot grow to a number format
    other = "F16" if own_type == "BF16" else "BF16"
    found = {}
    with Session(model, replace(options, working_type=other)) as session:
        nats = _floor(
            reference,
            chunk,
            lambda: session.logits(chunk.tokens, chunk.starts, chunk.rows()),
        )
    if nats is not None:
        found[f"{other} instead of {own_type}"] = nats
    return found


def floor_of_repacking(
    model: ModelFile, options: SessionOptions, threads: int, chunk: Chunk
) -> dict[str, float]:
    """Mean |KLD| in nats between the file as it is with and without CPU repacking.

    Float weights are never repacked, so this is measured only for a file that holds quantized
    ones; a float file says nothing about what repacking will do to its quantized copy.
    """
    if _is_float(model):
        return {}
    sides = []
    for repack in (False, True):
        with (
            LoadedModel(model, gpu_layers=options.gpu_layers, repack=repack) as loaded,
            DecodeContext(
                loaded,
                n_ctx=options.n_ctx,
                max_sequences=options.max_sequences,
                threads=threads,
                flash_attn=options.flash_attn,
            ) as context,
        ):
            sides.append(context.decode(chunk.tokens, chunk.starts, chunk.rows()).copy())
    reference = make_reference(sides[0], chunk.targets())
    nats = _floor(reference, chunk, lambda: sides[1])
    return {} if nats is None else {"CPU repacking": nats}


def reference_of(session: Session, chunk: Chunk) -> Reference:
    """What a chunk is scored against after the session is closed."""
    logits = session.logits(chunk.tokens, chunk.starts, chunk.rows())
    return make_reference(logits, chunk.targets())


def _is_float(model: ModelFile) -> bool:
    return all(t.type in FLOAT_TYPES for t in model.tensors if is_quantizable(t, model.arch))


def _floor(reference: Reference, chunk: Chunk, logits: Callable[[], Floats]) -> float | None:
    try:
        scores = score(reference, logits(), chunk.targets())
    except EngineError:  # a kernel that this backend does not have, or that overflows
        return None
    return float(np.abs(scores.kld).mean())


def _decode(session: Session, chunk: Chunk, threads: int, flash_attn: bool | None) -> Floats:
    with DecodeContext(
        session.loaded,
        n_ctx=session.options.n_ctx,
        max_sequences=session.options.max_sequences,
        threads=threads,
        flash_attn=flash_attn,
    ) as context:
        return context.decode(chunk.tokens, chunk.starts, chunk.rows()).copy()
