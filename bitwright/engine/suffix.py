"""Forward passes that compute only what one swapped weight can change, exact to the bit.

Everything before the weight's cut equals the reference, so its results are put back and the
nodes behind them lose their compute flag, through llama.cpp's public `cb_eval`. A stream walks
one batch through the graph: weights in graph order, one cut kept in memory. Where the graph
gives no cut (a weight of the first node, several graphs or devices) the pass is a full one.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.graph import (
    MOST_CACHED,
    START,
    Cut,
    Node,
    Plan,
    analyse,
    cut_before,
    plan_capture,
    plan_logits,
)
from bitwright.engine.graph_watcher import GraphWatcher, Tape, Values
from bitwright.engine.loaded_model import DecodeContext
from bitwright.engine.packing import Bytes
from bitwright.engine.session import Session
from bitwright.errors import EngineError, NotFiniteError

Floats = NDArray[np.float32]

MOST_TAPES = 8


class SuffixRunner:
    """Partial passes over a session's model. A context manager; close it before the session.

    It decodes in a context of its own with the session's options, so logits equal those of
    `Session.logits` bit for bit. `suffix_passes` and `full_passes` count what was really run.
    """

    def __init__(self, session: Session, *, most_cached: int = MOST_CACHED) -> None:
        self.session = session
        self.most_cached = most_cached
        self.suffix_passes = 0
        self.full_passes = 0
        self._tapes: dict[tuple[Node, ...], Tape] = {}
        self._watcher = GraphWatcher()
        options = session.options
        self._context = DecodeContext(
            session.loaded,
            n_ctx=options.n_ctx,
            max_sequences=options.max_sequences,
            threads=session.threads,
            flash_attn=options.flash_attn,
            watcher=self._watcher.watch,
        )

    def start(
        self, tokens: NDArray[np.int32], starts: Sequence[int], rows: NDArray[np.int64]
    ) -> "Stream":
        """A stream over one batch, as `Session.logits` takes it; computes nothing yet."""
        rows = np.asarray(rows, np.int64)
        self.session.check_batch(tokens, np.asarray(starts, np.int64), rows)
        return Stream(self, np.array(tokens, np.int32), tuple(starts), rows)

    def record(self, stream: "Stream") -> tuple[Floats, Tape]:
        """A full pass with the weights as they are; its logits and its graph."""
        self._watcher.record()
        self.full_passes += 1
        view = self._context.decode(stream.tokens, stream.starts, stream.rows)
        nodes = self._watcher.nodes
        # Equal nodes at equal addresses: the same graph, whatever number of tokens it is for.
        key = tuple(nodes)
        if key not in self._tapes:
            if len(self._tapes) == MOST_TAPES:
                self._tapes.pop(next(iter(self._tapes)))
            self._tapes[key] = Tape(analyse(nodes, self._watcher.leaves))
        return view, self._tapes[key]

    def follow(
        self, stream: "Stream", tape: Tape, plan: Plan, values: Values
    ) -> tuple[Floats, Values]:
        """A partial pass; its logits, and the results that the plan captures."""
        self._watcher.follow(tape, plan, values)
        try:
            view = self._context.decode(stream.tokens, stream.starts, stream.rows)
        finally:
            self._watcher.finish()
        self._watcher.check_complete()
        return view, self._watcher.captured

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class Stream:
    """One batch on its way through the graph, from cut to cut; made by `SuffixRunner.start`.

    Its cached results belong to the weights of the reference pass: `reference_logits` and
    `advance` must run while no weight is swapped, `logits` while exactly its weight is.
    """

    def __init__(
        self,
        runner: SuffixRunner,
        tokens: NDArray[np.int32],
        starts: tuple[int, ...],
        rows: NDArray[np.int64],
    ) -> None:
        self.runner = runner
        self.tokens = tokens
        self.starts = starts
        self.rows = rows
        self._tape: Tape | None = None
        self._cut = START
        self._values: Values = {}

    def reference_logits(self) -> Floats:
        """Logits (rows, n_vocab) of the unswapped model, as a view: copy before the next call."""
        view, self._tape = self.runner.record(self)
        self._check_finite(view, "the reference")
        return view

    def cut(self, name: str) -> Cut | None:
        """Where a pass with weight `name` swapped can start; None means a full pass."""
        graph = self._recorded().graph
        position = graph.first_use.get(name)
        # A view in a graph that is used again would keep the weight's old type.
        if position is None or name in graph.viewed:
            return None
        return cut_before(graph, position, self.runner.most_cached)

    def advance(self, name: str) -> bool:
        """Compute and keep the results at the cut of weight `name`, from those at the last cut.

        False when it has no cut. Going back in graph order is allowed and starts from the front.
        """
        target = self.cut(name)
        if target is None:
            return False
        if target.position < self._cut.position:
            self._cut, self._values = START, {}
        if target.nodes - self._cut.nodes:
            tape = self._recorded()
            plan = plan_capture(tape.graph, self._cut, target)
            _, captured = self.runner.follow(self, tape, plan, self._values)
            self._values = self._values | captured
        self._values = {i: self._values[i] for i in target.nodes}
        self._cut = target
        return True

    def logits(self, name: str) -> Floats:
        """Logits with weight `name` as it is now, all others as in the reference; a view.

        Call `advance(name)` before the swap. Raises EngineError naming the weight and the token
        when a logit is NaN or infinite, and when the graph is not the recorded one.
        """
        target = self.cut(name)
        if target is None:
            view = self._full(name)
        elif target != self._cut:
            raise EngineError(
                f"the stream stands at node {self._cut.position}, {name} starts at node "
                f"{target.position}; call advance({name!r}) before the weight is swapped"
            )
        else:
            tape = self._recorded()
            plan = plan_logits(tape.graph, target)
            view, _ = self.runner.follow(self, tape, plan, self._values)
            self.runner.suffix_passes += 1
        self._check_finite(view, name)
        return view

    def logits_with_swap(self, name: str, type_name: str, packed: Bytes) -> Floats:
        """`advance`, then logits with weight `name` replaced as by `Session.set_tensor`; a view.

        The weight is restored before it returns. For weights in graph order a whole round costs
        one more full pass for all the advancing together.
        """
        self.advance(name)
        with self.runner.session.swapped(name, type_name, packed):
            return self.logits(name)

    def _full(self, name: str) -> Floats:
        graph = self._recorded().graph
        if name in graph.viewed:
            # Only the session knows when to throw away a graph that holds an outdated view.
            self.runner.full_passes += 1
            return self.runner.session.logits(self.tokens, self.starts, self.rows)
        return self.runner.record(self)[0]

    def obstacle(self) -> str:
        """Why every pass over this batch is a full one, or ''."""
        return self._recorded().graph.obstacle

    def _recorded(self) -> Tape:
        if self._tape is None:
            self.reference_logits()
        assert self._tape is not None
        return self._tape

    def _check_finite(self, view: Floats, what: str) -> None:
        # A sum is finite only if every term is, and costs a fraction of the pass.
        with np.errstate(invalid="ignore", over="ignore"):
            bad = np.flatnonzero(~np.isfinite(view.sum(axis=1)))
        if bad.size:
            position = int(self.rows[bad[0]])
            sequence = int(np.searchsorted(self.starts, position, side="right")) - 1
            raise NotFiniteError(
                f"{bad.size} of {len(self.rows)} rows of logits are NaN or infinite with {what}, "
                f"first at token {position} (sequence {sequence}); this cannot be scored"
            )


def strided(rows: NDArray[np.int64], stride: int, offset: int = 0) -> NDArray[np.int64]:
    """Every stride-th of the rows: ranks weights as all of them do, where the tail does not.

    At least one row is kept. `offset` (below stride) picks which; racing rounds vary it.
    """
    return rows[min(offset % stride, len(rows) - 1) :: stride] if len(rows) else rows
