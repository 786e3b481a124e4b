"""A part of a captured model as a module, which takes and returns the values that cross its cuts.

The first segment takes the batch: one tensor, or a tuple of those that were captured. The last one
returns what the model does. Between them a dictionary of values goes on, with the number of rows.
Parameters have the names that they have in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from braid.autograd.nested import flatten, parts_of, rebuild, unflatten
from braid.errors import ConfigError
from braid.graph.captured import CapturedGraph, Node, Scaled, check_cuts

__all__ = ["Segment", "segments"]


def segments(
    graph: CapturedGraph, num_parts: int, cuts: Sequence[int] | None = None
) -> list[Segment]:
    """Cut a captured model into modules in a row.

    Args:
        graph: The model.
        num_parts: Number of segments.
        cuts: Positions of the nodes at which segments begin; chosen by parameters when None.

    Raises:
        ConfigError: The model cannot be cut so.
    """
    cuts = graph.cuts(num_parts) if cuts is None else list(cuts)
    check_cuts(cuts, len(graph.nodes))
    ends = [*cuts[1:], len(graph.nodes)]
    return [Segment(graph, begin, end) for begin, end in zip(cuts, ends, strict=True)]


class Segment(nn.Module):
    """Nodes `begin` to `end` of a graph.

    Args:
        graph: The model.
        begin: Position of the first node.
        end: Position after the last node.
    """

    def __init__(self, graph: CapturedGraph, begin: int, end: int) -> None:
        super().__init__()
        self._graph = graph
        self._nodes = graph.nodes[begin:end]
        self._is_first, self._is_last = begin == 0, end == len(graph.nodes)
        self._leaves = graph.crossing(end)
        self._tensors: dict[int, torch.Tensor] = {}
        for node in self._nodes:
            if node.kind == "module":  # under the name that it has: add_module takes no dots
                self._modules[str(node.target)] = graph.modules[str(node.target)]
            for value in node.inputs:
                if value in graph.tensors:
                    self._take(value)

    def _take(self, value: int) -> None:
        tensor = self._graph.tensors[value]
        self._tensors[value] = tensor
        if isinstance(tensor, nn.Parameter):
            self._parameters[self._graph.names[value]] = tensor

    def forward(self, value: Any) -> Any:
        """Run the nodes."""
        if self._is_first:
            _, inputs = flatten(value)
            if len(inputs) != self._graph.num_inputs:
                msg = (
                    f"the model was captured with {self._graph.num_inputs} tensors, got "
                    f"{len(inputs)}"
                )
                raise ConfigError(msg)
            rows = next(x.shape[0] for x in inputs if x.dim())
            known = dict(enumerate(inputs))
        else:
            rows, known = value["rows"], dict(value["values"])
        for node in self._nodes:
            self._call(node, known, rows)
        if self._is_last:
            results = [
                known[v] if v in known else self._graph.tensors[v] for v in self._graph.results
            ]
            return unflatten(self._graph.result_tree, results)
        return {"rows": rows, "values": {v: known[v] for v in self._leaves if v in known}}

    def _call(self, node: Node, known: dict[int, torch.Tensor], rows: int) -> None:
        inputs = [known[v] if v in known else self._tensors[v] for v in node.inputs]
        args, kwargs = unflatten(_filled(node.tree, rows), inputs)
        call = self._modules[str(node.target)] if node.kind == "module" else node.target
        assert callable(call)
        _, made = flatten(call(*args, **kwargs))
        known.update(zip(node.outputs, made, strict=True))


def _filled(tree: Any, rows: int) -> Any:
    """Return arguments with numbers in the place of those that depend on the rows."""
    if isinstance(tree, Scaled):
        return tree.factor * rows + tree.offset
    parts = parts_of(tree)
    if parts is None:
        return tree
    new = {key: _filled(value, rows) for key, value in parts.items()}
    return tree if all(new[key] is parts[key] for key in parts) else rebuild(tree, new)
