"""Scores whole layouts in memory: KLD, top-1 and likelihood of each token against the reference.

The reference's probabilities are large (4 bytes × vocabulary × token), so chunks are taken in
blocks whose references fit a memory cap. Each block: the reference once, then each file once on
all chunks of the block. What a file scored on a block is stored at once, so a killed run goes on
with the next block or file and ends with the same arrays.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.records import Chunk
from bitwright.damage.kld import Reference, make_reference, score
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.errors import ConfigError, NotFiniteError
from bitwright.eval.memory import available_memory, require_memory
from bitwright.eval.tokens import (
    TokenTable,
    concatenate,
    empty_table,
    load_tables,
    save_tables,
)

Progress = Callable[[int, int, str], None]
Forward = Callable[[Chunk], NDArray[np.float32]]
Chunks = Mapping[str, Sequence[Chunk]]

MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout to score in memory. ``key`` names what else decides its bytes (the imatrix)."""

    label: str
    layout: Mapping[str, str]
    packer: Packer
    key: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """Anything that gives logits: ``opened()`` holds it ready and yields its forward function."""

    label: str
    key: str
    opened: Callable[[], AbstractContextManager[Forward]]


@dataclass(frozen=True, slots=True)
class Block:
    """Chunks whose references are in memory at one time; ``key`` is the hash of their tokens."""

    chunks: tuple[Chunk, ...]
    key: str


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """All token tables of an evaluation, by (label, category)."""

    labels: tuple[str, ...]
    categories: tuple[str, ...]
    tables: Mapping[tuple[str, str], TokenTable]

    def table(self, label: str, category: str) -> TokenTable:
        """One file on one category."""
        return self.tables[label, category]

    def merged(self, other: "ScoreTable") -> "ScoreTable":
        """This table with the other's files added; both must have the same categories."""
        if other.categories != self.categories:
            raise ValueError(f"categories differ: {self.categories} and {other.categories}")
        return ScoreTable(
            self.labels + other.labels, self.categories, {**self.tables, **other.tables}
        )


class KeptReferences:
    """One session's probabilities of blocks, kept while they fit a memory cap.

    A search scores layout after layout on the same blocks: each reference is then made once.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self.memory_bytes = memory_bytes
        self._held: dict[str, list[Reference]] = {}

    def get(self, block: Block) -> list[Reference] | None:
        """What was kept of the block, one reference per chunk."""
        return self._held.get(block.key)

    def keep(self, block: Block, references: list[Reference]) -> None:
        """Keep them if there is room."""
        others = [r for key, many in self._held.items() if key != block.key for r in many]
        if sum(r.size_bytes for r in (*others, *references)) <= self.memory_bytes:
            self._held[block.key] = references


def score_layouts(
    session: Session,
    candidates: Sequence[Candidate],
    chunks_by_category: Chunks,
    *,
    memory_bytes: int = MEMORY_BYTES,
    store: Path | None = None,
    key: str = "",
    progress: Progress | None = None,
    kept: KeptReferences | None = None,
) -> ScoreTable:
    """Score each layout against the session's own model on the chunks of each category.

    ``store`` is a folder for finished parts; ``key`` names what decides the reference's logits
    (model, engine settings) and must be given with it. ``progress(done, total, label)`` counts
    forward passes. ``kept``: references of earlier calls with the same session. The session ends
    restored.

    Raises:
        ConfigError: two candidates share a label.
        EngineError: NaN or Inf in any logits.
    """
    subjects = [
        Subject(c.label, _candidate_key(c), partial(_layout_applied, session, c))
        for c in candidates
    ]
    try:
        return score_subjects(
            session,
            subjects,
            chunks_by_category,
            memory_bytes=memory_bytes,
            store=store,
            key=key,
            progress=progress,
            kept=kept,
        )
    finally:
        session.restore_all()


def score_subjects(
    session: Session,
    subjects: Sequence[Subject],
    chunks_by_category: Chunks,
    *,
    memory_bytes: int,
    store: Path | None,
    key: str,
    progress: Progress | None,
    kept: KeptReferences | None = None,
) -> ScoreTable:
    """The loop over blocks that layouts and files share; see score_layouts."""
    labels = tuple(s.label for s in subjects)
    if len(set(labels)) < len(labels):
        raise ConfigError(f"two files to score share a label: {', '.join(labels)}")
    require_memory(chunks_by_category, session.n_vocab, available_memory())
    documents = {c: document_ids(chunks) for c, chunks in chunks_by_category.items()}
    blocks = plan_blocks(chunks_by_category, session.n_vocab, memory_bytes)
    counter = _Counter(sum(len(b.chunks) for b in blocks) * (len(subjects) + 1), progress)
    parts: dict[tuple[str, str], list[TokenTable]] = {}
    for block in blocks:
        for table in _score_block(
            session, subjects, block, documents, store, key, counter, kept or KeptReferences(0)
        ):
            parts.setdefault((table.label, table.category), []).append(table)
    tables = {
        (label, category): concatenate(parts[label, category])
        if (label, category) in parts
        else empty_table(label, category, names)
        for label in labels
        for category, names in documents.items()
    }
    return ScoreTable(labels, tuple(documents), tables)


def document_ids(chunks: Sequence[Chunk]) -> tuple[str, ...]:
    """The distinct document ids of the chunks, in order of appearance."""
    return tuple(dict.fromkeys(name for chunk in chunks for name in chunk.documents))


def plan_blocks(chunks_by_category: Chunks, n_vocab: int, memory_bytes: int) -> list[Block]:
    """Chunks in order, cut where the next float32 reference would exceed the cap.

    A single chunk above the cap is a block of its own: it cannot be cut.
    """
    groups: list[list[Chunk]] = []
    used_bytes = 0
    for chunk in (c for chunks in chunks_by_category.values() for c in chunks):
        size_bytes = 4 * n_vocab * len(chunk.rows())
        if size_bytes == 0:
            continue  # nothing to score, and a forward pass without rows is refused
        if not groups or used_bytes + size_bytes > memory_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(chunk)
        used_bytes += size_bytes
    return [Block(tuple(group), _block_key(group)) for group in groups]


def noise_floor(session: Session, chunks_by_category: Chunks) -> dict[str, float | None]:
    """Mean |KLD| of the reference against itself, decoded again, in nats by category.

    Uses the first chunk of each category. What lies below twice this value is not measurable.
    """
    session.restore_all()
    floor: dict[str, float | None] = {}
    for category, chunks in chunks_by_category.items():
        scored = [chunk for chunk in chunks if len(chunk.rows())][:1]
        floor[category] = _self_divergence(session, scored[0]) if scored else None
    return floor


def _self_divergence(session: Session, chunk: Chunk) -> float:
    reference = make_reference(forward(session, chunk), chunk.targets(), threads=session.threads)
    again = score(reference, forward(session, chunk), chunk.targets())
    return float(np.mean(np.abs(again.kld)))


def forward(session: Session, chunk: Chunk) -> NDArray[np.float32]:
    """Logits (k, n_vocab) of the chunk's scored rows; a view that the next call overwrites."""
    return session.logits(chunk.tokens, chunk.starts, chunk.rows())


@contextmanager
def _layout_applied(session: Session, candidate: Candidate) -> Iterator[Forward]:
    # Left in place: the next layout changes only what differs, the next reference restores.
    session.apply(candidate.layout, candidate.packer)
    yield partial(forward, session)


@dataclass(slots=True)
class _Counter:
    """Counts forward passes for the progress callback."""

    total: int
    progress: Progress | None
    done: int = 0

    def advance(self, n: int, label: str) -> None:
        if n == 0:
            return
        self.done += n
        if self.progress is not None:
            self.progress(self.done, self.total, label)


def _score_block(
    session: Session,
    subjects: Sequence[Subject],
    block: Block,
    documents: Mapping[str, tuple[str, ...]],
    store: Path | None,
    key: str,
    counter: _Counter,
    kept: KeptReferences,
) -> list[TokenTable]:
    """Token tables of every subject on one block: from the store, or measured and stored."""
    paths = {s.label: _part_path(store, s, block, key) for s in subjects}
    found: dict[str, list[TokenTable]] = {}
    for label, path in paths.items():
        loaded = None if path is None else load_tables(path, path.stem, label, documents)
        if loaded is not None:
            found[label] = loaded
    missing = [s for s in subjects if s.label not in found]
    references = kept.get(block) or []
    spared = len(found) + (not missing or bool(references))
    session.restore_all()
    for chunk in block.chunks if missing and not references else ():
        with _naming("the reference", chunk):
            references.append(
                make_reference(forward(session, chunk), chunk.targets(), threads=session.threads)
            )
        counter.advance(1, "reference")
    if missing:
        kept.keep(block, references)
    counter.advance(len(block.chunks) * spared, "from the run folder")
    for subject in missing:
        tables = _measure(subject, block, references, documents, counter)
        path = paths[subject.label]
        if path is not None:
            save_tables(tables, path, path.stem)
        found[subject.label] = tables
    return [table for s in subjects for table in found[s.label]]


def _measure(
    subject: Subject,
    block: Block,
    references: Sequence[Reference],
    documents: Mapping[str, tuple[str, ...]],
    counter: _Counter,
) -> list[TokenTable]:
    """One subject on all chunks of a block: one table per category."""
    parts: dict[str, list[TokenTable]] = {}
    with subject.opened() as logits_of:
        for chunk, reference in zip(block.chunks, references, strict=True):
            with _naming(subject.label, chunk):
                table = _chunk_table(subject.label, chunk, reference, logits_of(chunk), documents)
            parts.setdefault(chunk.category, []).append(table)
            counter.advance(1, subject.label)
    return [concatenate(tables) for tables in parts.values()]


@contextmanager
def _naming(label: str, chunk: Chunk) -> Iterator[None]:
    """Says whose logits, on which chunk, are no numbers."""
    try:
        yield
    except NotFiniteError as error:
        raise NotFiniteError(
            f"{label} on {chunk.category} chunk {chunk.index}: {error}; nothing of it was kept"
        ) from None


def _chunk_table(
    label: str,
    chunk: Chunk,
    reference: Reference,
    logits: NDArray[np.float32],
    documents: Mapping[str, tuple[str, ...]],
) -> TokenTable:
    scores = score(reference, logits, chunk.targets())
    names = documents[chunk.category]
    position = {name: i for i, name in enumerate(names)}
    # Index of each sequence's document in the category's list, then of each row's.
    of_sequence = np.array([position[name] for name in chunk.documents], dtype=np.int32)
    return TokenTable(
        label=label,
        category=chunk.category,
        kld=np.asarray(scores.kld, dtype=np.float64),
        same_top1=np.asarray(scores.same_top1, dtype=np.bool_),
        nll=np.asarray(scores.nll, dtype=np.float64),
        nll_ref=np.asarray(reference.target_nll, dtype=np.float64),
        kind=chunk.row_kinds(),
        document=of_sequence[chunk.row_documents()],
        documents=names,
    )


def _part_path(store: Path | None, subject: Subject, block: Block, key: str) -> Path | None:
    """Where a subject's part of a block lies: named by everything that decides its content."""
    if store is None:
        return None
    return store / f"{_digest(key, subject.key, block.key)}.npz"


def _candidate_key(candidate: Candidate) -> str:
    rules = "\n".join(f"{name}={type_}" for name, type_ in sorted(candidate.layout.items()))
    return _digest(candidate.key, rules)


def _block_key(chunks: Sequence[Chunk]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(repr((chunk.category, chunk.starts, chunk.documents)).encode())
        digest.update(np.ascontiguousarray(chunk.tokens, dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(chunk.kinds, dtype=np.uint8).tobytes())
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
