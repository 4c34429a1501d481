"""Measures whole layouts on the select split, in one session."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bitwright.corpora.records import Corpus
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.eval.divergence import Candidate, KeptReferences, score_layouts
from bitwright.eval.scores import category_rng
from bitwright.eval.statistics import Interval
from bitwright.eval.suite import load_suite
from bitwright.eval.thresholds import state_of
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of
from bitwright.workflows.stage_evaluate import report_options, split_chunks
from bitwright.workflows.stage_ladders import RESAMPLES, kld_interval

Joint = dict[str, Interval]  # category → KLD of the whole layout


class Meter:
    """Measures whole layouts on the select split, each once; a context manager.

    The model is loaded at the first layout that the run folder does not hold, and its references
    are made once for all layouts.
    """

    def __init__(
        self,
        ctx: RunContext,
        corpora: Mapping[str, Corpus],
        packer: Packer,
        imatrix: Imatrix,
        thresholds_nats: Mapping[str, float],
    ) -> None:
        self.ctx, self.packer, self.imatrix_sha256 = ctx, packer, imatrix.sha256()
        self.thresholds_nats = thresholds_nats
        self.rounds: list[dict[str, Any]] = []
        self.chunks = split_chunks(ctx, corpora, "select")
        self.key = key_of("reference", ctx.model.sha256(), ctx.engine_key(), METRICS_VERSION)
        self.known: dict[str, Joint] = {}  # by layout
        self.stack = ExitStack()
        self.session: Session | None = None
        self.kept = KeptReferences()

    def measure(self, label: str, types: Mapping[str, str]) -> Joint:
        """KLD of each category with its interval."""
        layout = key_of(dict(types), self.imatrix_sha256)
        if layout not in self.known:
            self.known[layout] = self._measured(label, types, layout)
        return self.known[layout]

    def unsafe(self, joint: Joint) -> list[str]:
        """Categories not shown under their threshold."""
        return [c for c, t in self.thresholds_nats.items() if state_of(joint[c], t) != "under"]

    def _measured(self, label: str, types: Mapping[str, str], layout: str) -> Joint:
        candidate = Candidate(label, types, self.packer, self.imatrix_sha256)
        inputs = {
            "reference": self.key,
            "chunks": {c: chunks_sha256(found) for c, found in self.chunks.items()},
            "layout": layout,
            "resamples": RESAMPLES,
        }

        def compute() -> tuple[dict[str, Any], list[Path]]:
            scored = score_layouts(
                self._open(), [candidate], self.chunks, kept=self.kept, progress=self._step
            )
            suite = load_suite("divergence")
            found = {
                c: kld_interval(
                    scored.table(label, c).select(suite.category(c).codes()),
                    category_rng(suite, c),
                )
                for c in self.chunks
            }
            return {c: interval.as_dict() for c, interval in found.items()}, []

        stage = f"joint/{label}"
        found = self.ctx.folder.stage(stage, key_of("joint", inputs), compute, inputs=inputs)
        return {c: Interval(**found[c]) for c in self.thresholds_nats}

    def _open(self) -> Session:
        if self.session is None:
            self.session = self.stack.enter_context(
                Session(self.ctx.model, report_options(self.ctx))
            )
        return self.session

    def _step(self, done: int, total: int, label: str) -> None:
        self.ctx.reporter.step(done, total, label)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stack.close()
