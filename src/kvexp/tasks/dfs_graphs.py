"""Small connected graphs, and the state of a depth-first search on them after so many steps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Literal, NamedTuple

Edges = tuple[tuple[int, int], ...]
Kind = Literal["tree", "sparse"]
MIN_NODES = 6
"""Fewest nodes of a graph: with five, the only sparse one has every edge."""

_NEIGHBOURS, _REWIRED = 4, 0.1  # of a sparse graph: neighbours on the ring, probability that an edge moves


class State(NamedTuple):
    """A search after a step: the current node (None once it has left the start), the path to it from the
    start, which ends with it, and the visited nodes in increasing order.
    """

    node: int | None
    stack: tuple[int, ...]
    visited: tuple[int, ...]


def simulate(edges: Iterable[tuple[int, int]], start: int, steps: int) -> State:
    """Return the state of a depth-first search after `steps` steps; after none it stands at `start`.

    A step visits the smallest unvisited neighbour of the current node or, where there is none, goes back by
    one node. A graph of n nodes has 2n - 1 steps, with the last of which the search leaves the start.

    Raises:
        ValueError: the search ends before that many steps.
    """
    neighbours: dict[int, set[int]] = {start: set()}
    for a, b in edges:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    stack, visited = [start], {start}
    for step in range(steps):
        if not stack:
            raise ValueError(f"the search ends after {step} steps, before step {steps}")
        fresh = neighbours[stack[-1]] - visited
        if fresh:
            stack.append(min(fresh))
            visited.add(stack[-1])
        else:
            stack.pop()
    return State(stack[-1] if stack else None, tuple(stack), tuple(sorted(visited)))


def draw_graph(kind: Kind, nodes: int, rng: random.Random) -> Edges:
    """Return the sorted edges, smaller node first, of a random connected graph of the nodes 0 to `nodes` - 1.

    "tree" is uniform over labelled trees, "sparse" a connected small-world graph of Watts and Strogatz with
    four neighbours of each node on the ring, a tenth of whose edges is moved.
    """
    import networkx

    seed = rng.getrandbits(32)  # networkx has random streams of its own
    if kind == "tree":
        graph = networkx.random_labeled_tree(nodes, seed=seed)
    else:
        graph = networkx.connected_watts_strogatz_graph(nodes, _NEIGHBOURS, _REWIRED, seed=seed)
    return tuple(sorted((min(edge), max(edge)) for edge in graph.edges))
