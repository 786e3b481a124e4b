r"""Profiled graphs in the text of PipeDream's profiler.

    node10 -- Conv2d(64, 128) -- forward_compute_time=1.5, backward_compute_time=2.9,
        activation_size=205520896.000, parameter_size=295424.000 -- stage_id=0
    \tnode9 -- node10

One line for each node (shown here as two) and one for each edge, in any order. Times are
milliseconds of one minibatch, sizes bytes; the stage is optional. A reader of the text sums the
activation sizes of nodes with several outputs, which are written as a list.

Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1; its released code defines the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["ProfiledGraph", "ProfiledNode", "format_graph", "parse_graph"]

NODE = re.compile(
    r"(?P<name>\S+) -- (?P<text>.*) -- forward_compute_time=(?P<forward>\S+), "
    r"backward_compute_time=(?P<backward>\S+), activation_size=(?P<activation>.+), "
    r"parameter_size=(?P<parameter>\S+?)(?: -- stage_id=(?P<stage>\d+))?"
)
EDGE = re.compile(r"\t(?P<source>\S+) -- (?P<target>\S+)")
MS = 1e-3


class ProfiledNode(NamedTuple):
    """A node of a profiled graph, with its times and sizes.

    Attributes:
        name: Name in the text.
        text: Description, such as a module with its settings.
        forward_s: Seconds of its forward.
        backward_s: Seconds of its backward.
        output_bytes: Size of its output.
        param_bytes: Size of its parameters.
        stage: Stage of the node; None before the graph is planned.
        saved_bytes: Bytes kept for backward, including the output; `output_bytes` if None, as in
            the text.
    """

    name: str
    text: str
    forward_s: float
    backward_s: float
    output_bytes: float
    param_bytes: float
    stage: int | None = None
    saved_bytes: float | None = None

    @property
    def kept_bytes(self) -> float:
        """Bytes kept for backward."""
        return self.output_bytes if self.saved_bytes is None else self.saved_bytes


class ProfiledGraph(NamedTuple):
    """A directed acyclic graph of profiled nodes.

    Attributes:
        nodes: Nodes by name, in the order of the text.
        edges: Names of the consumers of each node's output, in the order of the text.
    """

    nodes: Mapping[str, ProfiledNode]
    edges: Mapping[str, tuple[str, ...]]

    @property
    def sources(self) -> list[str]:
        """Nodes without inputs, in the order of the text."""
        consumers = {target for targets in self.edges.values() for target in targets}
        return [name for name in self.nodes if name not in consumers]

    def without(self, names: Iterable[str]) -> ProfiledGraph:
        """Return the graph without some nodes, and without their edges."""
        gone = set(names)
        return ProfiledGraph(
            {name: node for name, node in self.nodes.items() if name not in gone},
            {
                name: tuple(target for target in targets if target not in gone)
                for name, targets in self.edges.items()
                if name not in gone
            },
        )

    def order(self) -> list[str]:
        """Return the names in topological order: each node after its inputs.

        Raises:
            ConfigError: The graph has a cycle.
        """
        num_waiting = dict.fromkeys(self.nodes, 0)
        for targets in self.edges.values():
            for target in targets:
                num_waiting[target] += 1
        ready = [name for name, count in num_waiting.items() if not count]
        ordered = []
        while ready:
            name = ready.pop()
            ordered.append(name)
            for target in self.edges[name]:
                num_waiting[target] -= 1
                if not num_waiting[target]:
                    ready.append(target)
        if len(ordered) < len(self.nodes):
            stuck = ", ".join(sorted(name for name, count in num_waiting.items() if count)[:5])
            msg = f"the graph has a cycle, through or before {stuck}: remove an edge of the cycle"
            raise ConfigError(msg)
        return ordered


def parse_graph(text: str) -> ProfiledGraph:
    """Parse a graph in the text format of PipeDream's profiler.

    Raises:
        ConfigError: A line is malformed, a time or size is negative, a name is unknown or given
            twice, or the graph is empty or has a cycle; names the line.
    """
    nodes: dict[str, ProfiledNode] = {}
    pairs: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if (edge := EDGE.fullmatch(line)) is not None:
            pairs.append((number, edge["source"], edge["target"]))
        elif (match := NODE.fullmatch(line)) is not None:
            if match["name"] in nodes:
                msg = (
                    f"line {number}: node {match['name']!r} is defined twice: remove one of its "
                    "lines"
                )
                raise ConfigError(msg)
            nodes[match["name"]] = _node(match, number)
        else:
            msg = (
                f"line {number} is neither a node 'NAME -- TEXT -- forward_compute_time=..., "
                "backward_compute_time=..., activation_size=..., parameter_size=...' nor an edge "
                f"'<tab>NAME -- NAME': {line[:80]!r}"
            )
            raise ConfigError(msg)
    edges: dict[str, list[str]] = {name: [] for name in nodes}
    for number, source, target in pairs:
        if unknown := {source, target} - nodes.keys():
            msg = (
                f"line {number}: the edge names an undefined node, {min(unknown)!r}: add a line "
                "that defines it"
            )
            raise ConfigError(msg)
        edges[source].append(target)
    if not nodes:
        msg = "the graph has no nodes: pass a text with at least one"
        raise ConfigError(msg)
    graph = ProfiledGraph(nodes, {name: tuple(targets) for name, targets in edges.items()})
    graph.order()
    return graph


def format_graph(graph: ProfiledGraph) -> str:
    """Return a graph as text in PipeDream's format, which `parse_graph` reads."""
    lines = []
    for node in graph.nodes.values():
        stage = "" if node.stage is None else f" -- stage_id={node.stage}"
        lines.append(
            f"{node.name} -- {node.text} -- forward_compute_time={node.forward_s / MS:.3f}, "
            f"backward_compute_time={node.backward_s / MS:.3f}, "
            f"activation_size={node.output_bytes:.3f}, parameter_size={node.param_bytes:.3f}{stage}"
        )
    for name, targets in graph.edges.items():
        lines += [f"\t{name} -- {target}" for target in targets]
    return "\n".join(lines) + "\n"


def _node(match: re.Match[str], line: int) -> ProfiledNode:
    sizes = match["activation"].strip("[]").split("; ")
    try:
        numbers = [float(match["forward"]), float(match["backward"]), sum(map(float, sizes))]
        numbers.append(float(match["parameter"]))
    except ValueError as exc:
        msg = f"line {line}: {exc}"
        raise ConfigError(msg) from exc
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        msg = f"line {line}: times and sizes must be finite and not negative, got {numbers}"
        raise ConfigError(msg)
    forward, backward, output, param = numbers
    stage = None if match["stage"] is None else int(match["stage"])
    return ProfiledNode(
        match["name"], match["text"], forward * MS, backward * MS, output, param, stage
    )
