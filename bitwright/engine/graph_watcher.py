"""llama.cpp's callback per graph node: records a pass, or steers one by a plan.

It runs once per node and pass, so what it reads and writes is prepared: one small window of
memory per node, and lists of flags and stops.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitwright.engine import lib
from bitwright.engine.graph import Graph, Leaf, Node, Plan
from bitwright.errors import EngineError

# Node number → the bytes of its result.
Values = dict[int, NDArray[np.uint8]]

# A node's op and its flags lie in one small window of its ggml_tensor.
_WINDOW_AT = lib.Tensor.op.offset
_FLAGS = (lib.Tensor.flags.offset - _WINDOW_AT) // 4
_Window = ctypes.c_int32 * (_FLAGS + 1)


class Tape:
    """A recorded graph and where its nodes lie in memory now."""

    __slots__ = ("addresses", "codes", "flags", "graph", "windows")

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        # A node too many meets an address and a code that no node has.
        self.addresses = [*(node.address for node in graph.nodes), 0]
        self.codes = [*(node.code for node in graph.nodes), -1]
        self.flags = [node.flags for node in graph.nodes]
        self.windows: list[Any] = [
            _Window.from_address(a + _WINDOW_AT) for a in self.addresses[:-1]
        ]


class GraphWatcher:
    """llama.cpp's callback per node: records a pass, or steers it by a plan."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.leaves: dict[int, Leaf] = {}
        self._known: set[int] = set()
        self._tape: Tape | None = None
        self._next = 0
        self._values: Values = {}
        self.captured: Values = {}

    def record(self) -> None:
        """Note every node of the next pass and let all of them run."""
        self.nodes, self.leaves, self._known, self._tape = [], {}, set(), None

    def follow(self, tape: Tape, plan: Plan, values: Values) -> None:
        """Let the next pass run by `plan`, putting back `values`."""
        self._tape, self._plan, self._values = tape, plan, values
        self._addresses, self._windows, self._codes = tape.addresses, tape.windows, tape.codes
        self._flags, self._stops = plan.flags, plan.stops
        self.captured, self._next = {}, 0

    def watch(self, address: int, ask: bool) -> bool:
        """Called once per node before it runs, and again behind the nodes to stop at."""
        if self._tape is None:
            return self._note(address)
        i = self._next
        if not ask:
            self._exchange(i - 1, address)
            return True
        if address != self._addresses[i]:
            self._move(i, address)
        window = self._windows[i]
        if window[0] != self._codes[i]:
            raise drift(f"node {i} is a {lib.op_name(window[0])}")
        # Written each time, so that it does not matter whether llama.cpp built the graph anew.
        window[_FLAGS] = self._flags[i]
        self._next = i + 1
        return self._stops[i]

    def _move(self, i: int, address: int) -> None:
        if i == len(self._windows):
            raise drift(f"it has more than {i} nodes")
        self._addresses[i] = address
        self._windows[i] = _Window.from_address(address + _WINDOW_AT)

    def _exchange(self, i: int, address: int) -> None:
        size = lib.tensor_nbytes(address)
        if i in self._plan.inject:
            value = self._values[i]
            if value.nbytes != size:
                raise drift(f"node {i} has {size} bytes instead of {value.nbytes}")
            lib.tensor_set(address, value.ctypes.data, 0, size)
        else:
            value = np.empty(size, np.uint8)
            lib.tensor_get(address, value.ctypes.data, 0, size)
            self.captured[i] = value

    def finish(self) -> None:
        """Give back the flags that llama.cpp set: it may use the same graph again."""
        if self._tape is not None:
            for window, flags in zip(self._windows[: self._next], self._tape.flags, strict=False):
                window[_FLAGS] = flags

    def check_complete(self) -> None:
        """Raise EngineError when the pass had fewer nodes than the recording."""
        if self._tape is not None and self._next != len(self._windows):
            raise drift(f"it has {self._next} nodes instead of {len(self._windows)}")

    def _note(self, address: int) -> bool:
        tensor = lib.Tensor.from_address(address)
        sources = tuple(source for source in tensor.src if source)
        code, view_of = tensor.op, tensor.view_src
        self.nodes.append(Node(address, code, lib.op_name(code), sources, view_of, tensor.flags))
        self._known.add(address)
        for source in sources:
            self._note_leaf(source)
        if view_of:
            self._note_leaf(view_of)
        return False

    def _note_leaf(self, address: int) -> None:
        if address in self._known:
            return
        self._known.add(address)
        tensor = lib.Tensor.from_address(address)
        self.leaves[address] = Leaf(tensor.name.decode("utf-8", errors="replace"), tensor.view_src)
        if tensor.view_src:
            self._note_leaf(tensor.view_src)


def drift(what: str) -> EngineError:
    """The error for a graph that is not the recorded one."""
    return EngineError(
        f"llama.cpp's graph is not the one that was recorded ({what}), so a partial pass would "
        "compute something else; use full passes"
    )
