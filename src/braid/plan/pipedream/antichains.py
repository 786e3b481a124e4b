r"""Cuts of a graph, as a DAG of antichains, over which a partition is a path.

Problem: a graph with branches has no single order of layers, and a cut between two stages may
cross several of its edges.

Idea: a state is an antichain: a set of nodes that do not depend on each other. A stage ends
with all nodes up to a state; the next states advance one of its nodes to a consumer. In a row
of layers, states are layers. A state hands on what later stages need: the outputs of all nodes up
to it that have a consumer behind it.

    a -> b -> d        states: {a} {b} {c} {b, c} {d}
     \-> c ->/

Cost: the number of antichains is at most exponential in the width of the graph; real models are
narrow.

Source: D. Narayanan et al., SOSP 2019, section 3.1; its released code for which antichains it
visits.
"""

from __future__ import annotations

from collections import deque
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import ConfigError
from braid.plan.pipedream.graph_text import ProfiledGraph

__all__ = ["States", "states_of"]

MAX_STATES = 20_000


class States(NamedTuple):
    """Sets of nodes at which a pipeline can be cut, in topological order, with their costs.

    Attributes:
        handed_on: Names of the nodes with outputs that each state passes to later stages.
        compute_s: Seconds of all nodes up to each state, forward and backward.
        saved_bytes: Bytes that all nodes up to each state keep for backward.
        param_bytes: Sizes of the parameters of all nodes up to each state.
        output_bytes: Bytes that each state passes to later stages.
        before: Whether state k precedes state j, [j, k].
        members: Names of all nodes up to each state.
    """

    handed_on: tuple[tuple[str, ...], ...]
    compute_s: NDArray[np.float64]
    saved_bytes: NDArray[np.float64]
    param_bytes: NDArray[np.float64]
    output_bytes: NDArray[np.float64]
    before: NDArray[np.bool_]
    members: tuple[frozenset[str], ...]


def states_of(graph: ProfiledGraph) -> States:
    """Return the states of a graph, at which a pipeline can be cut.

    Nodes with a description that begins with "Input" are skipped, and so are unused items of
    tuples. The graph's inputs belong to the first state.

    Raises:
        ConfigError: No node is left after skipping, or there are more than 20,000 states.
    """
    graph = graph.without([n for n in graph.sources if graph.nodes[n].text.startswith("Input")])
    graph = graph.without(
        name
        for name, targets in graph.edges.items()
        if not targets and graph.nodes[name].text.startswith("__getitem__")
    )
    if not graph.nodes:
        msg = "the graph has only inputs, so no layer can be divided: add nodes with a cost"
        raise ConfigError(msg)
    after = _search(graph)
    members = _order(after)
    place = {state: number for number, state in enumerate(members)}
    before = np.zeros((len(members), len(members)), np.bool_)
    for state in members:
        for follower in after[state]:
            before[place[follower]] |= before[place[state]]
            before[place[follower], place[state]] = True
    handed_on = tuple(_handed_on(graph, names) for names in members)
    nodes = graph.nodes

    def totals(key: str) -> NDArray[np.float64]:
        # exact sums: the order of a set must not decide between plans of the same time
        return np.array([fsum(getattr(nodes[n], key) for n in names) for names in members])

    return States(
        handed_on,
        totals("forward_s") + totals("backward_s"),
        totals("kept_bytes"),
        totals("param_bytes"),
        np.array([sum(nodes[n].output_bytes for n in names) for names in handed_on]),
        before,
        tuple(members),
    )


def _ancestors(graph: ProfiledGraph) -> dict[str, frozenset[str]]:
    """Return all nodes that each node depends on."""
    ancestors: dict[str, set[str]] = {name: set() for name in graph.nodes}
    for name in graph.order():
        for target in graph.edges[name]:
            ancestors[target] |= ancestors[name] | {name}
    return {name: frozenset(names) for name, names in ancestors.items()}


def _search(graph: ProfiledGraph) -> dict[frozenset[str], list[frozenset[str]]]:
    """Return the states that can be reached from the first source, with those that follow each.

    A state is given by all nodes up to it.
    """
    ancestors = _ancestors(graph)
    after: dict[frozenset[str], list[frozenset[str]]] = {}
    todo = deque([frozenset(graph.sources[:1])])
    while todo:
        state = todo.popleft()
        if state in after:
            continue
        if len(after) == MAX_STATES:
            msg = (
                f"the graph has more than {MAX_STATES:,} cuts: merge parallel branches into "
                "single nodes"
            )
            raise ConfigError(msg)
        consumers = dict.fromkeys(
            target
            for name in graph.nodes
            if name in state
            for target in graph.edges[name]
            if target not in state
        )
        after[state] = [state | ancestors[target] | {target} for target in consumers]
        todo.extend(after[state])
    return after


def _order(after: dict[frozenset[str], list[frozenset[str]]]) -> list[frozenset[str]]:
    """Return the states such that each stands before those that follow it."""
    num_waiting = dict.fromkeys(after, 0)
    for followers in after.values():
        for follower in set(followers):
            num_waiting[follower] += 1
    ready = deque(state for state, count in num_waiting.items() if not count)
    ordered = []
    while ready:
        state = ready.popleft()
        ordered.append(state)
        for follower in dict.fromkeys(after[state]):
            num_waiting[follower] -= 1
            if not num_waiting[follower]:
                ready.append(follower)
    return ordered


def _handed_on(graph: ProfiledGraph, members: frozenset[str]) -> tuple[str, ...]:
    """Return the members with an output that nodes outside use, or that the graph returns."""
    return tuple(
        name
        for name in graph.nodes
        if name in members
        and (not graph.edges[name] or any(t not in members for t in graph.edges[name]))
    )
