"""Nodes of a captured graph as the placer sees them: names of devices, colocations, sizes.

A dict names devices of modules by patterns, and `@` another module's device:

    {"encoder.*": "/task:0", "head": "@token"}

A pattern holds for a module and all modules inside of it. Later patterns replace the fields that
they name, and a pattern goes before the scopes of `braid.device`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

import networkx as nx
import torch

from braid.errors import ConfigError, raise_all
from braid.parallel.graph import CapturedGraph, GraphNode, GraphNodes, Situation, last_uses
from braid.runtime.torch_internals import storage_id
from braid.strategies.placed.placer import Colocation, PlacerNode
from braid.strategies.placed.spec import DeviceSpec, merged

__all__ = ["DeviceMap", "colocations_of", "placer_nodes", "sizes_of_values"]

DeviceMap = Mapping[str, "str | DeviceSpec"]


def placer_nodes(
    graph: CapturedGraph, devices: DeviceMap, sizes: Mapping[int, tuple[int, int]] | None
) -> tuple[list[PlacerNode], list[Colocation]]:
    """Return the graph's nodes with the devices named for them, and pairs that need one device.

    Args:
        graph: The graph.
        devices: For each pattern of module names, a device, or `@` and another pattern.
        sizes: Bytes and rows of each value; see `sizes_of_values`. None if no cost is needed.

    Raises:
        ConfigError: A pattern matches no node, or patterns refer to each other in a cycle.
    """
    labels = graph.labels()
    matched = {pattern: _matching(graph, labels, pattern) for pattern in devices}
    references = {
        pattern: str(device)[1:] for pattern, device in devices.items() if str(device)[:1] == "@"
    }
    targets = {name: _matching(graph, labels, name) for name in references.values()}
    problems = [
        _unmatched(graph, labels, pattern)
        for pattern, positions in {**matched, **targets}.items()
        if not positions
    ]
    raise_all(problems)
    _check_cycles(references, matched, targets)
    named = {pattern: device for pattern, device in devices.items() if pattern not in references}
    makers = {value: i for i, node in enumerate(graph.nodes) for value in node.made}
    nodes = []
    for i, node in enumerate(graph.nodes):
        scopes = [*node.devices, *(spec for key, spec in named.items() if i in matched[key])]
        sources: dict[int, int] = {}
        flops = 0.0
        if sizes is not None:
            for value in node.inputs:
                if value in makers:
                    nbytes = sizes.get(value, (0, 0))[0]
                    sources[makers[value]] = sources.get(makers[value], 0) + nbytes
            rows = max((sizes.get(value, (0, 1))[1] for value in node.outputs), default=1)
            flops = 6.0 * rows * _num_params(graph, node)
        nodes.append(PlacerNode(labels[i], node.where, merged(scopes), flops, sources))
    colocations = list(colocations_of(graph))
    for pattern, reference in references.items():
        first = min(targets[reference])
        reason = f"{pattern!r} is placed with {reference!r}"
        colocations += [Colocation(first, second, reason) for second in sorted(matched[pattern])]
    return nodes, colocations


def colocations_of(graph: CapturedGraph) -> Iterator[Colocation]:
    """Yield pairs of nodes that must be on the same device.

    They call one module, share a parameter or buffer, or one of them writes in place to a tensor
    that an earlier node has made.
    """
    for position, reason in graph.refused_cuts().items():
        yield Colocation(position - 1, position, reason)
    written = {old for node in graph.nodes for old, _ in node.writes}
    users: dict[int, tuple[int, str]] = {}
    for i, node in enumerate(graph.nodes):
        for key, name in _tensors_of(graph, node, written):
            if key in users and users[key][0] != i:
                yield Colocation(users[key][0], i, f"they share {name}")
            users[key] = i, name


def _tensors_of(
    graph: CapturedGraph, node: GraphNode, written: set[int]
) -> Iterator[tuple[int, str]]:
    """Yield identities of tensors that have one place, with their names."""
    if node.kind == "module":
        module = graph.modules[str(node.target)]
        yield id(module), f"the module {node.target}"
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            yield storage_id(x.untyped_storage()), f"{node.target}.{name}"
    for value in node.inputs:
        if value not in graph.tensors:
            continue
        x = graph.tensors[value]
        if isinstance(x, torch.nn.Parameter) or value in written:
            yield storage_id(x.untyped_storage()), graph.names.get(value, f"tensor {value}")


def sizes_of_values(graph: CapturedGraph, inputs: list[torch.Tensor]) -> dict[int, tuple[int, int]]:
    """Return bytes of each value, and its rows: its elements divided by the size of its last dim.

    Runs the graph once; the caller restores buffers and generators.
    """
    nodes = GraphNodes(graph, range(len(graph.nodes)), graph.results)
    known = dict(enumerate(inputs))
    sizes: dict[int, tuple[int, int]] = {}
    now = Situation(len(inputs[graph.rows_of]), graph.is_training, inputs[graph.rows_of].device)
    dead = last_uses(graph.nodes, ())
    with torch.no_grad():
        for i, node in enumerate(graph.nodes):
            nodes.run(known, now, [[]], first=i)
            for value in node.made:
                x = known[value]
                sizes[value] = x.nbytes, x.numel() // max(x.shape[-1] if x.dim() else 1, 1)
            for value in dead[i]:
                known.pop(value, None)
    return sizes


def _num_params(graph: CapturedGraph, node: GraphNode) -> int:
    if node.kind != "module":
        return sum(graph.tensors[v].numel() for v in node.inputs if v in graph.names)
    module = graph.modules[str(node.target)]
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim  # a look-up
    return sum(p.numel() for p in module.parameters())


def _matching(graph: CapturedGraph, labels: tuple[str, ...], pattern: str) -> set[int]:
    positions = set()
    for i, node in enumerate(graph.nodes):
        names = [labels[i]]
        if node.kind == "module":
            parts = node.name.split(".")
            names += [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if any(fnmatchcase(name, pattern) for name in names):
            positions.add(i)
    return positions


def _unmatched(graph: CapturedGraph, labels: tuple[str, ...], pattern: str) -> str:
    """Return a text about a pattern that matches no node."""
    for name, module in graph.modules.items():
        inner = pattern.removeprefix(f"{name}.")
        if inner != pattern and any(
            fnmatchcase(path, inner) or path.startswith(f"{inner}.")
            for path, _ in module.named_modules()
        ):
            return (
                f"{pattern!r} is inside of {name}, which runs as one call and cannot be divided: "
                f"place {name!r} as a whole"
            )
    names = [node.name for node in graph.nodes if node.kind == "module"]
    close = get_close_matches(pattern, {*names, *labels}, n=3) or names[:3]
    return f"{pattern!r} in devices matches no module of the graph; use one of {', '.join(close)}"


def _check_cycles(
    references: Mapping[str, str], matched: Mapping[str, set[int]], targets: Mapping[str, set[int]]
) -> None:
    """Refuse references that lead back to where they begin: none of them has a device."""
    graph = nx.DiGraph()
    for pattern, reference in references.items():
        for other in references:
            if targets[reference] & matched[other]:
                graph.add_edge(pattern, other)
    cycles = list(nx.simple_cycles(graph))
    if cycles:
        cycle = cycles[0]
        text = ", ".join(f"{name!r} with {references[name]!r}" for name in cycle)
        msg = f"these nodes are colocated in a cycle: {text}. Give one of them a device"
        raise ConfigError(msg)
