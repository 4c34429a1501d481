"""The graph's pure functions, on graphs small enough to check by hand."""

import pytest

from bitwright.engine.graph import (
    COMPUTE,
    START,
    Cut,
    Graph,
    Leaf,
    Node,
    analyse,
    cut_before,
    plan_capture,
    plan_logits,
)

W = {"a": 901, "b": 902, "c": 903, "embd": 904}
TOKENS, CACHE, MASK = 910, 911, 912
LEAVES = {address: Leaf(f"{name}.weight") for name, address in W.items()} | {
    TOKENS: Leaf("inp_tokens"),
    CACHE: Leaf("cache_k_l0"),
    MASK: Leaf("mask"),
}


def node(address: int, op: str, *sources: int, view_of: int | None = None) -> Node:
    return Node(address, code=len(op), op=op, sources=sources, view_of=view_of)


def chain() -> Graph:
    """embedding → a → (+) → b → c, with the embedding added back behind a."""
    nodes = [
        node(1, "GET_ROWS", W["embd"], TOKENS),
        node(2, "MUL_MAT", W["a"], 1),
        node(3, "ADD", 2, 1),
        node(4, "MUL_MAT", W["b"], 3),
        node(5, "MUL_MAT", W["c"], 4),
    ]
    return analyse(nodes, LEAVES)


def cached_attention() -> Graph:
    """Key a goes into the cache; the product of queries b reads the cache through a view."""
    nodes = [
        node(1, "GET_ROWS", W["embd"], TOKENS),
        node(2, "MUL_MAT", W["a"], 1),
        node(3, "VIEW", CACHE, view_of=CACHE),
        node(4, "SET_ROWS", 2, 3, view_of=CACHE),
        node(5, "MUL_MAT", W["b"], 1),
        node(6, "VIEW", CACHE, view_of=CACHE),
        node(7, "PERMUTE", 6, view_of=CACHE),
        node(8, "FLASH_ATTN_EXT", 5, 7, MASK),
        node(9, "MUL_MAT", W["c"], 8),
    ]
    return analyse(nodes, LEAVES)


def test_dependencies_follow_the_sources() -> None:
    assert chain().depends == tuple(map(frozenset, ([], [0], [0, 1], [2], [3])))


def test_cheap_results_are_never_cached() -> None:
    graph = chain()
    assert [set(s) for s in graph.crossing] == [set(), set(), {1}, {2}, {3}]


def test_the_first_use_of_every_leaf_is_found() -> None:
    graph = chain()
    assert {n: graph.first_use[f"{n}.weight"] for n in W} == {"embd": 0, "a": 1, "b": 3, "c": 4}
    assert graph.viewed == frozenset()


def test_a_reader_of_the_cache_depends_on_its_earlier_writer() -> None:
    graph = cached_attention()
    assert graph.depends[7] == {3, 4}
    assert graph.depends[3] >= {1}


def test_a_writer_behind_the_reader_is_no_dependency() -> None:
    nodes = [
        node(1, "VIEW", CACHE, view_of=CACHE),
        node(2, "MUL_MAT", W["a"], 1),
        node(3, "SET_ROWS", 2, CACHE, view_of=CACHE),
    ]
    graph = analyse(nodes, LEAVES)
    assert graph.depends[1] == frozenset()
    assert graph.depends[2] == {1}


def test_no_cut_between_a_cache_writer_and_its_reader() -> None:
    graph = cached_attention()
    assert 3 in graph.crossing[7]
    assert cut_before(graph, 7) == Cut(3, frozenset({1}))
    assert cut_before(graph, 8) == Cut(8, frozenset({7}))


def test_an_operation_in_place_is_seen_through_the_tensor_it_changed() -> None:
    nodes = [
        node(1, "MUL_MAT", W["a"], TOKENS),
        node(2, "SCALE", 1, view_of=1),
        node(3, "MUL_MAT", W["b"], 1),  # reads tensor 1, whose memory node 2 changed
    ]
    graph = analyse(nodes, LEAVES)
    assert graph.depends[2] == {0, 1}
    assert cut_before(graph, 2) is None or 1 not in cut_before(graph, 2).nodes


def test_a_weight_read_through_a_view_is_reported() -> None:
    nodes = [node(1, "VIEW", W["a"], view_of=W["a"]), node(2, "MUL_MAT", 1, TOKENS)]
    graph = analyse(nodes, LEAVES)
    assert graph.viewed == {"a.weight"}
    assert graph.first_use["a.weight"] == 0


def test_the_first_node_has_no_cut() -> None:
    graph = chain()
    assert cut_before(graph, graph.first_use["embd.weight"]) is None
    assert cut_before(graph, graph.first_use["a.weight"]) is None


def test_the_cut_moves_to_the_front_when_too_much_crosses() -> None:
    nodes = [node(1, "MUL_MAT", W["a"], TOKENS)]
    nodes += [node(i, "MUL_MAT", W["b"], 1) for i in (2, 3, 4)]
    nodes += [node(5, "ADD", 2, 3), node(6, "ADD", 5, 4), node(7, "MUL_MAT", W["c"], 6)]
    graph = analyse(nodes, LEAVES)
    assert cut_before(graph, 4, most=3) == Cut(4, frozenset({1, 2, 3}))
    assert cut_before(graph, 4, most=2) == Cut(2, frozenset({0, 1}))
    assert cut_before(graph, 4, most=1) == Cut(1, frozenset({0}))


def runs(flags: tuple[int, ...]) -> set[int]:
    return {i for i, flag in enumerate(flags) if flag & COMPUTE}


def test_the_plan_runs_what_follows_the_cut_and_the_cheap_part_it_needs() -> None:
    graph = chain()
    plan = plan_logits(graph, Cut(2, frozenset({1})))
    assert runs(plan.flags) == {0, 2, 3, 4}
    assert plan.inject == {1}
    assert [i for i, stop in enumerate(plan.stops) if stop] == [1]
    later = plan_logits(graph, Cut(4, frozenset({3})))
    assert runs(later.flags) == {4}


def test_the_capture_plan_computes_only_from_cut_to_cut() -> None:
    graph = chain()
    first = plan_capture(graph, START, Cut(2, frozenset({1})))
    assert runs(first.flags) == {0, 1}
    assert (first.inject, first.capture) == (frozenset(), frozenset({1}))
    second = plan_capture(graph, Cut(2, frozenset({1})), Cut(4, frozenset({3})))
    assert runs(second.flags) == {0, 2, 3}
    assert (second.inject, second.capture) == (frozenset({1}), frozenset({3}))


def test_nodes_llama_cpp_does_not_run_stay_off() -> None:
    nodes = [
        node(1, "MUL_MAT", W["a"], TOKENS),
        Node(2, 3, "ADD", (1,), flags=0),
        node(3, "MUL_MAT", W["b"], 1),
    ]
    plan = plan_logits(analyse(nodes, LEAVES), Cut(1, frozenset({0})))
    assert runs(plan.flags) == {2}


@pytest.mark.parametrize(
    ("nodes", "leaves", "why"),
    [
        ([], {}, "no node"),
        ([node(1, "ADD", TOKENS), node(1, "ADD", TOKENS)], LEAVES, "several graphs"),
        ([node(1, "ADD", 77)], {77: Leaf("CUDA0#l_out-3#0")}, "several devices"),
    ],
)
def test_a_recording_that_cannot_be_cut_says_why(
    nodes: list[Node], leaves: dict[int, Leaf], why: str
) -> None:
    graph = analyse(nodes, leaves)
    assert why in graph.obstacle
    assert cut_before(graph, len(nodes) - 1) is None
