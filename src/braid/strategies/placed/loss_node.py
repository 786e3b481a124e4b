"""The loss as one more node of the graph, behind the results; its target is fed like the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from braid import rpc
from braid.comm.autograd.nested import TensorPlace, unflatten
from braid.parallel.graph import CapturedGraph, GraphNode
from braid.strategies.placed.partition import NodeValues

__all__ = ["LossSpec", "node_values", "with_loss"]

rpc.register(TensorPlace)


@rpc.register
@dataclass(frozen=True, slots=True)
class LossSpec:
    """Loss function of a placed model's output and target.

    Attributes:
        function: Function (output, target) that returns a number.
        target: Target, with placeholders instead of tensors.
        num_targets: Number of tensors of the target.
    """

    function: Callable[..., Any]
    target: Any
    num_targets: int


def with_loss(graph: CapturedGraph, loss: LossSpec | None) -> tuple[CapturedGraph, int, range]:
    """Return a graph with a loss as its last node, and the numbers of the loss and the targets.

    The numbers count the values of the graph. Without a loss, the graph is unchanged and the
    number of the loss is -1.
    """
    if loss is None:
        return graph, -1, range(0)
    first = 1 + max(
        [
            graph.num_inputs,
            *graph.results,
            *(v for node in graph.nodes for v in (*node.inputs, *node.made)),
        ]
    )
    targets = range(first, first + loss.num_targets)
    places = [TensorPlace(len(graph.results) + i) for i in range(loss.num_targets)]
    node = GraphNode(
        kind="function",
        target=loss.function,
        tree=((graph.result_tree, unflatten(loss.target, places)), {}),  # type: ignore[arg-type]
        inputs=(*graph.results, *targets),
        result_tree=None,
        outputs=(targets.stop,),
        where="the loss",
    )
    return dataclasses.replace(graph, nodes=(*graph.nodes, node)), targets.stop, targets


def node_values(graph: CapturedGraph) -> list[NodeValues]:
    """Return the values that each node reads, makes and overwrites.

    Nodes that change buffers or other tensors of the model also run if no returned value depends
    on them, as in a call of the model.
    """
    tensors = set(graph.tensors)
    values = []
    for node in graph.nodes:
        has_buffers = node.kind == "module" and any(
            True for _ in graph.modules[str(node.target)].buffers()
        )
        overwritten = tuple(old for old, _ in node.writes)
        is_kept = has_buffers or bool(tensors.intersection(overwritten))
        values.append(NodeValues(node.inputs, node.made, overwritten, is_kept))
        if tensors.intersection(overwritten):
            tensors.update(new for _, new in node.writes)
    return values
