"""Measures whole layouts in memory, chunk by chunk, and never the same one twice.

What a search needs of a layout is its mean KLD on some categories of the ``select`` split. Sums
per chunk and document go to a file of the run folder, so that a killed search replays what it
knows in milliseconds and goes on with the same decisions.

The reference's probabilities lie in files without a name, which the system keeps in memory as far
as there is room: a large vocabulary takes 80 MB for 128 tokens, and a search that saw only what
fits a fixed share of the memory would judge on two or three chunks.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.allocator.layout import Layout, layout_sha256
from bitwright.corpora.records import Chunk
from bitwright.damage.kld import Reference, make_reference, score
from bitwright.engine.atomic import check_space, storage_errors
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.eval.divergence import document_ids, forward
from bitwright.eval.suite import DivergenceSuite
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of
from bitwright.workflows.stage_damage import make_packer

Doubles = NDArray[np.float64]

EMBEDDING = "token_embd.weight"  # its rows are the vocabulary
# Of references: as much for the target as for all other categories together.
DISK_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Joint:
    """KLD sums (chunks, documents) of a layout on one category, nats; counts of the same shape.

    A pruned measurement has fewer chunks than the category.
    """

    kld: Doubles
    tokens: Doubles

    @property
    def mean(self) -> float:
        """Nats per token."""
        return float(self.kld.sum() / self.tokens[: len(self.kld)].sum())

    def less(self, other: "Joint") -> tuple[float, float]:
        """(mean difference to ``other``, its standard error by document), on common chunks."""
        n = min(len(self.kld), len(other.kld))
        difference = (self.kld[:n] - other.kld[:n]).sum(axis=0)
        count = self.tokens[:n].sum(axis=0)
        used = count > 0
        difference, count = difference[used], count[used]
        mean = float(difference.sum() / count.sum())
        if len(count) < 2:
            return mean, math.inf
        spread = np.square(difference - mean * count).sum() * len(count) / (len(count) - 1)
        return mean, float(np.sqrt(spread) / count.sum())


Stop = Callable[[Joint], bool]


class JointMeter:
    """Layouts in, KLD out. A context manager: the model is loaded at the first measurement.

    chunks: those that a measurement is over: of each category the first whose references fit its
    part of ``disk_bytes``, at least one. imatrices: name → what layouts may be packed with, the
    first unless another is named.
    """

    def __init__(
        self,
        ctx: RunContext,
        chunks: Mapping[str, Sequence[Chunk]],
        imatrices: Mapping[str, Imatrix],
        suite: DivergenceSuite,
        *,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        self.ctx, self.suite = ctx, suite
        self.packers: dict[str, Packer] = {
            name: make_packer(ctx, name, one) for name, one in imatrices.items()
        }
        self.first = next(iter(imatrices))
        self._hashes = {name: one.sha256() for name, one in imatrices.items()}
        self._n_vocab = ctx.model.tensor(EMBEDDING).shape[-1]
        self._given = chunks
        self.chunks = _within(chunks, self._n_vocab, disk_bytes, ctx.spec.target)
        self.documents = {c: document_ids(found) for c, found in self.chunks.items()}
        self.tokens = {c: self._counts(c) for c in self.chunks}
        self.measured, self.replayed = 0, 0
        self._session: Session | None = None
        self._references: dict[tuple[str, int], Reference] = {}
        self._held: dict[str, tuple[str, str]] = {}
        self.key = key_of(
            "joint",
            [ctx.model.sha256(), ctx.engine_key(), self._hashes[self.first], METRICS_VERSION],
            {c: chunks_sha256(found) for c, found in self.chunks.items()},
        )
        self._path = ctx.folder.path / "select" / f"joint-{self.key[:16]}.jsonl"
        self._known = _load(self._path)

    def measure(
        self,
        types: Mapping[str, str],
        category: str,
        stop: Stop | None = None,
        imatrix: str | None = None,
    ) -> Joint | None:
        """Joint damage of a layout on a category; None where it has no tokens.

        ``stop`` is asked after each chunk with what is known by then. ``imatrix``: the name of
        the one to pack with, the first by default.

        Raises:
            NotDone: the run folder is read only, and this was not measured.
        """
        name = imatrix or self.first
        layout = self.identity(types, name)
        rows: list[list[float]] = []
        for index in range(len(self.chunks[category])):
            known = self._known.get((layout, category, index))
            if known is None:
                known = self._measure(types, name, layout, category, index)
            else:
                self.replayed += 1
            rows.append(known)
            joint = Joint(np.array(rows), self.tokens[category])
            if stop is not None and index + 1 < len(self.chunks[category]) and stop(joint):
                return joint
        if not rows or self.tokens[category].sum() == 0:
            return None
        return Joint(np.array(rows), self.tokens[category])

    def identity(self, types: Mapping[str, str], imatrix: str) -> str:
        """What a measurement is filed under: the layout, and another imatrix than the first."""
        layout = layout_sha256(Layout(types))
        return layout if imatrix == self.first else f"{layout}@{self._hashes[imatrix]}"

    def is_whole(self, joint: Joint, category: str) -> bool:
        """Whether all chunks of the category were measured."""
        return len(joint.kld) == len(self.chunks[category])

    def left_out(self, category: str) -> str:
        """That measurements are over part of the category's text, or empty."""
        scored = sum(1 for chunk in self._given[category] if len(chunk.rows()))
        kept = len(self.chunks[category])
        if scored == kept:
            return ""
        return (
            f"a search measures the first {kept} of {scored} select chunks of {category}: the"
            " references of more would take too much of the disk"
        )

    def close(self) -> None:
        """Free the model."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _counts(self, category: str) -> Doubles:
        return np.array(
            [self._by_document(k, np.ones(len(k.rows()))) for k in self.chunks[category]]
        )

    def _by_document(self, chunk: Chunk, values: Doubles) -> list[float]:
        """Sums over the category's own spans, per document."""
        names = self.documents[chunk.category]
        place = np.array([names.index(name) for name in chunk.documents])[chunk.row_documents()]
        counts = np.isin(chunk.row_kinds(), self.suite.category(chunk.category).codes())
        sums: list[float] = np.bincount(place[counts], values[counts], len(names)).tolist()
        return sums

    def _measure(
        self, types: Mapping[str, str], imatrix: str, layout: str, category: str, index: int
    ) -> list[float]:
        self.ctx.folder.check_writable()
        session = self._open(category)
        self._hold(session, types, imatrix)
        chunk, reference = self.chunks[category][index], self._references[category, index]
        kld = score(reference, forward(session, chunk), chunk.targets()).kld
        found = self._by_document(chunk, np.asarray(kld, np.float64))
        self._known[layout, category, index] = found
        self._append([layout, category, index, found])
        self.measured += 1
        return found

    def _open(self, category: str) -> Session:
        """The session, with the references of a category's chunks."""
        if self._session is None:
            self._session = Session(self.ctx.model, self.ctx.options)
        if (category, 0) not in self._references:
            self._hold(self._session, {}, self.first)
            size = sum(_size_bytes(chunk, self._n_vocab) for chunk in self.chunks[category])
            check_space(self.ctx.folder.path / "references", size)
            for index, chunk in enumerate(self.chunks[category]):
                logits = forward(self._session, chunk)
                made = make_reference(logits, chunk.targets(), threads=self._session.threads)
                self._references[category, index] = _on_disk(made, self.ctx.folder.path)
        return self._session

    def _hold(self, session: Session, types: Mapping[str, str], imatrix: str) -> None:
        """Bring the session to a layout by changing only what differs from the last one."""
        wanted = {
            n: types[n]
            for n in session.weights
            if n in types and types[n] != self.ctx.model.tensor(n).type
        }
        for name in [n for n in self._held if n not in wanted]:
            session.restore(name)
            del self._held[name]
        for name, kind in wanted.items():
            if self._held.get(name) != (kind, imatrix):
                session.set_tensor(name, kind, self.packers[imatrix].pack(name, kind))
                self._held[name] = kind, imatrix

    def _append(self, row: list[object]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="ascii") as file:
            if self.measured == 0:
                file.write("\n")  # ends a line that a kill may have torn
            file.write(json.dumps(row, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _on_disk(reference: Reference, folder: Path) -> Reference:
    """The same with its probabilities in a file that is gone when they are no longer used."""
    if not reference.probs.size:
        return reference
    with storage_errors(folder / "references"), tempfile.TemporaryFile(dir=folder) as file:
        reference.probs.tofile(file)
        file.flush()
        return replace(
            reference, probs=np.memmap(file, np.float32, "r", shape=reference.probs.shape)
        )


def _within(
    chunks: Mapping[str, Sequence[Chunk]], n_vocab: int, disk_bytes: int, target: str
) -> dict[str, list[Chunk]]:
    """The first chunks of each category whose references fit its part; at least one."""
    part = disk_bytes / 2
    kept: dict[str, list[Chunk]] = {}
    for category, found in chunks.items():
        scored = [chunk for chunk in found if len(chunk.rows())]
        sizes = np.cumsum([_size_bytes(chunk, n_vocab) for chunk in scored])
        share = part if category == target else part / max(1, len(chunks) - 1)
        kept[category] = scored[: max(1, int(np.searchsorted(sizes, share, side="right")))]
    return kept


def _size_bytes(chunk: Chunk, n_vocab: int) -> int:
    """Of a chunk's reference: float32 probabilities."""
    return 4 * n_vocab * len(chunk.rows())


def _load(path: Path) -> dict[tuple[str, str, int], list[float]]:
    """What earlier measurements left; a line that a kill tore is measured again."""
    known: dict[tuple[str, str, int], list[float]] = {}
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return known
    for line in lines:
        try:
            layout, category, index, found = json.loads(line)
        except ValueError:
            continue
        known[layout, category, index] = found
    return known
