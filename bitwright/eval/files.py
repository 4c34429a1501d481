"""Scores GGUF files that lie on disk, ours or another tool's, and proves that written = planned."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from bitwright.corpora.records import Chunk
from bitwright.engine.model_file import ModelFile
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session, SessionOptions
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import InputError
from bitwright.eval.divergence import (
    MEMORY_BYTES,
    Chunks,
    Forward,
    Progress,
    ScoreTable,
    Subject,
    forward,
    score_subjects,
)


def score_file(
    session: Session,
    model: ModelFile,
    chunks_by_category: Chunks,
    *,
    label: str | None = None,
    options: SessionOptions | None = None,
    memory_bytes: int = MEMORY_BYTES,
    store: Path | None = None,
    key: str = "",
    progress: Progress | None = None,
) -> ScoreTable:
    """Score another file of the same model against the session's reference.

    ``model`` is opened with allow_requantize, since its weights are quantized. It runs in a second
    session with ``options`` (working type "file" by default, so its own bytes are computed with).

    Raises:
        InputError: the vocabularies differ, so the two probabilities are of different things.
        EngineError: NaN or Inf in any logits.
    """
    check_same_vocabulary(session.model, model)
    chosen = options or SessionOptions(working_type="file")
    subject = Subject(label or model.name, model.sha256(), partial(_file_opened, model, chosen))
    return score_subjects(
        session,
        [subject],
        chunks_by_category,
        memory_bytes=memory_bytes,
        store=store,
        key=key,
        progress=progress,
    )


def check_same_vocabulary(reference: ModelFile, other: ModelFile) -> None:
    """Both files must turn text into the same tokens.

    Raises:
        InputError: names the first property that differs, and both values.
    """
    ours, theirs = _vocabulary(reference), _vocabulary(other)
    for what, value in ours.items():
        if theirs[what] != value:
            raise InputError(
                f"{other.name} cannot be compared with {reference.name}: its {what} is "
                f"{theirs[what]}, the reference's is {value}; give a file made from that reference"
            )


def verify_written(
    session: Session,
    layout: Mapping[str, str],
    packer: Packer,
    written: ModelFile,
    chunk: Chunk,
    *,
    options: SessionOptions | None = None,
) -> float:
    """Largest |difference| between the logits of the layout in memory and of the written file.

    0.0 means bit for bit the same. The session ends restored.
    """
    try:
        session.apply(layout, packer)
        planned = forward(session, chunk).copy()
    finally:
        session.restore_all()
    chosen = replace(options or SessionOptions(), working_type="file")
    with Session(written, chosen) as second:
        return float(np.max(np.abs(forward(second, chunk) - planned), initial=0.0))


def _vocabulary(model: ModelFile) -> dict[str, object]:
    """What decides the meaning of token ids, most telling first.

    The chat template stays out: others may have corrected it, and it changes no probability of
    given tokens.
    """
    tokens = model.shards[0].kv["tokenizer.ggml.tokens"].raw
    with Tokenizer(model) as tokenizer:
        return {
            "vocabulary size": tokenizer.n_vocab,
            "kind of tokenizer": model.meta("tokenizer.ggml.model"),
            "BOS token": tokenizer.bos_id,
            "rule to add BOS": tokenizer.adds_bos,
            "token list (sha256)": sha256(tokens).hexdigest(),
        }


@contextmanager
def _file_opened(model: ModelFile, options: SessionOptions) -> Iterator[Forward]:
    with Session(model, options) as second:
        yield partial(forward, second)
