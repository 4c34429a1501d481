"""A recorded compute graph, and what of it one weight can change: pure functions on records.

Nodes are numbered in the order they are executed. A node depends on its sources, seen through
views, and on every earlier node that wrote into the same memory in place: attention reads the KV
cache through a view that has no edge to the node that filled it. To start at a position, the
results that cross it are put back from a reference pass; what no matrix product went into
(embedding rows, masks) is cheap and is computed again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

COMPUTE = 16  # GGML_TENSOR_FLAG_COMPUTE of ggml.h: backends pass over a node without it
VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
HEAVY = frozenset(
    {"MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "FLASH_ATTN_EXT", "CONV_2D", "SSM_CONV", "SSM_SCAN"}
    | {"GATED_DELTA_NET", "GATED_LINEAR_ATTN", "RWKV_WKV6", "RWKV_WKV7", "SOLVE_TRI"}
)
# Enough to start at any weight's own product: the residual and the norm, beside query and key, or
# beside the chosen experts, their shares, their hidden values and the shared expert's.
MOST_CACHED = 6


@dataclass(frozen=True, slots=True)
class Node:
    """One executed tensor. `view_of`: address of the tensor whose memory it is part of."""

    address: int
    code: int
    op: str
    sources: tuple[int, ...]
    view_of: int | None = None
    flags: int = COMPUTE


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that nodes read and none computes: a weight, an input or a cache."""

    name: str
    view_of: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """What was recorded and what follows from it.

    `depends[i]`: nodes that node i needs directly. `crossing[p]`: nodes before p, with a matrix
    product behind them, that a node from p on needs. `first_use`: leaf name → first node that
    reads it. `viewed`: leaves read through a view. `obstacle`: why it cannot be cut, or ''.
    """

    nodes: tuple[Node, ...]
    depends: tuple[frozenset[int], ...]
    crossing: tuple[frozenset[int], ...]
    first_use: Mapping[str, int]
    viewed: frozenset[str]
    obstacle: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Nodes from `position` on can be computed once the results of `nodes` are known."""

    position: int
    nodes: frozenset[int]


START = Cut(0, frozenset())


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass: the flags of each node, the nodes to stop behind, and what to do there."""

    flags: tuple[int, ...]
    stops: tuple[bool, ...]
    inject: frozenset[int]
    capture: frozenset[int]


def analyse(nodes: Sequence[Node], leaves: Mapping[int, Leaf]) -> Graph:
    """Dependencies, crossing sets and first uses of a recorded pass."""
    obstacle = find_obstacle(nodes, leaves)
    depends = () if obstacle else dependencies(nodes, leaves)
    first_use, viewed = leaf_uses(nodes, leaves)
    return Graph(
        nodes=tuple(nodes),
        depends=depends,
        crossing=crossing_sets(nodes, depends),
        first_use=first_use,
        viewed=viewed,
        obstacle=obstacle,
    )


def find_obstacle(nodes: Sequence[Node], leaves: Mapping[int, Leaf]) -> str:
    """Why positions in this recording do not mean what they should, or ''."""
    if not nodes:
        return "the backend showed no node"
    if len({node.address for node in nodes}) < len(nodes):
        return "one batch runs as several graphs"
    # The scheduler names a tensor that it copies between backends 'CUDA0#l_out-3#0'.
    if any(leaf.name.count("#") >= 2 for leaf in leaves.values()):
        return "the graph is split over several devices"
    return ""


def dependencies(nodes: Sequence[Node], leaves: Mapping[int, Leaf]) -> tuple[frozenset[int], ...]:
    """For each node the nodes it needs; a view needs none, it is resolved where it is read."""
    index = {node.address: i for i, node in enumerate(nodes)}
    writers: dict[int, set[int]] = {}
    found: list[frozenset[int]] = []

    def resolve(address: int) -> Iterator[int]:
        yield from writers.get(_root(address, nodes, index, leaves), ())
        i = index.get(address)
        if i is None:
            return
        if nodes[i].op not in VIEWS:
            yield i
            return
        for source in nodes[i].sources:
            yield from resolve(source)

    for i, node in enumerate(nodes):
        if node.op in VIEWS:
            found.append(frozenset())
            continue
        read = node.sources if node.view_of is None else (*node.sources, node.view_of)
        found.append(frozenset(j for address in read for j in resolve(address) if j < i))
        if node.view_of is not None:
            writers.setdefault(_root(node.view_of, nodes, index, leaves), set()).add(i)
    return tuple(found)


def _root(
    address: int, nodes: Sequence[Node], index: Mapping[int, int], leaves: Mapping[int, Leaf]
) -> int:
    """The tensor that owns the memory of this one."""
    while True:
        i = index.get(address)
        leaf = leaves.get(address)
        owner = nodes[i].view_of if i is not None else leaf.view_of if leaf else None
        if owner is None:
            return address
        address = owner


def crossing_sets(
    nodes: Sequence[Node], depends: Sequence[frozenset[int]]
) -> tuple[frozenset[int], ...]:
    """For each position p the nodes i < p that p or later needs and that are dear to compute."""
    heavy: list[bool] = []
    last_use = list(range(len(nodes)))
    for i, needs in enumerate(depends):
        heavy.append(nodes[i].op in HEAVY or any(heavy[j] for j in needs))
        for j in needs:
            last_use[j] = i
    sets: list[frozenset[int]] = []
    live: set[int] = set()
    for i in range(len(depends)):
        live = {j for j in live if last_use[j] >= i}
        sets.append(frozenset(live))
        if heavy[i] and last_use[i] > i:
            live.add(i)
    return tuple(sets)


def leaf_uses(
    nodes: Sequence[Node], leaves: Mapping[int, Leaf]
) -> tuple[dict[str, int], frozenset[str]]:
    """First node that reads each leaf, by name, and the names that are read through a view."""
    index = {node.address: i for i, node in enumerate(nodes)}
    first: dict[str, int] = {}
    viewed: set[str] = set()
    for i, node in enumerate(nodes):
        for source in node.sources:
            root = _root(source, nodes, index, leaves)
            if root in index or root not in leaves:
                continue
            name = leaves[root].name
            first.setdefault(name, i)
            if root != source:
                viewed.add(name)
    return first, frozenset(viewed)


def cut_before(graph: Graph, position: int, most: int = MOST_CACHED) -> Cut | None:
    """The latest cut at or before `position` with at most `most` results to put back.

    None where nothing would be saved. A result that was written in place is never put back: its
    memory holds more than the result.
    """
    if graph.obstacle:
        return None
    for p in range(position, 0, -1):
        nodes = graph.crossing[p]
        if len(nodes) <= most and all(graph.nodes[i].view_of is None for i in nodes):
            return Cut(p, nodes) if nodes else None
    return None


def plan_logits(graph: Graph, cut: Cut) -> Plan:
    """Put the cut's results back and compute everything from its position on."""
    return _plan(graph, range(cut.position, len(graph.nodes)), cut, frozenset())


def plan_capture(graph: Graph, cut: Cut, target: Cut) -> Plan:
    """From the results of `cut` compute those of the later cut `target` that it does not hold."""
    missing = target.nodes - cut.nodes
    return _plan(graph, missing, cut, missing)


def _plan(graph: Graph, wanted: Collection[int], cut: Cut, capture: frozenset[int]) -> Plan:
    needed = _closure(graph, wanted, cut.nodes)
    inject = cut.nodes & needed
    compute = needed - inject
    stop = inject | capture
    return Plan(
        flags=tuple(
            node.flags if i in compute or node.op in VIEWS else node.flags & ~COMPUTE
            for i, node in enumerate(graph.nodes)
        ),
        stops=tuple(i in stop for i in range(len(graph.nodes))),
        inject=inject,
        capture=capture,
    )


def _closure(graph: Graph, wanted: Collection[int], known: frozenset[int]) -> frozenset[int]:
    """The wanted nodes and all they need, not going on behind known ones."""
    seen: set[int] = set()
    waiting = list(wanted)
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        if i not in known:
            waiting.extend(graph.depends[i])
    return frozenset(seen)
