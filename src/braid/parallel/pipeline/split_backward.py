"""Backward in two parts: first to the inputs of a stage, later to its weights.

The previous stage waits for the gradients of the inputs only. Autograd computes only requested
gradients. So the first part requests the gradients of the inputs, and of the points at which
weights join the path between inputs and outputs. The second part continues from these points.

    x ──▶ matmul ──▶ gelu ──▶ matmul ──▶ y        I: from y along this path, keeping the gradient at
            ▲                   ▲                    both matmuls
            w1                  w2                W: from each matmul to its weight

A weight that joins the path at several points would be reached from one point through another. Its
gradient is computed from the outputs instead, in a second pass: correct, but not cheaper.

Source: P. Qi et al., Zero bubble pipeline parallelism, ICLR 2024; nodes of the graph as in
torch.autograd.graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from braid.parallel.pipeline.memory_order import in_order_of
from braid.runtime.torch_internals import accumulate_hooks, num_results

__all__ = ["SplitBackward"]


class SplitBackward:
    """Backward of a pipeline stage in two parts: gradients of inputs first, of weights later.

    Args:
        outputs: Outputs of the stage that require a gradient.
        inputs: Inputs of the stage that require a gradient.
        params: Parameters of the stage that require a gradient.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
    ) -> None:
        self._outputs = list(outputs)
        self._inputs = list(inputs)
        self._params = list(params)
        self._grads: list[torch.Tensor] = []
        # nodes at which weights join the path, with the weights
        self._joins: list[tuple[Node, list[torch.Tensor]]] = []
        self._join_grads: list[tuple[torch.Tensor | None, ...]] = []
        self._repeated: list[torch.Tensor] = []

    def to_inputs(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the inputs; zeros for unused inputs.

        Args:
            grads: Gradients of the outputs.
        """
        self._grads = list(grads)
        if not self._inputs or not self._outputs:
            return [torch.zeros_like(x) for x in self._inputs]
        self._find_joins()
        edges = [
            [GradientEdge(node, k) for k in range(num_results(node))] for node, _ in self._joins
        ]
        wanted: list[Any] = [*self._inputs, *(edge for group in edges for edge in group)]
        grads_of_wanted: list[torch.Tensor | None] = list(
            torch.autograd.grad(
                self._outputs, wanted, self._grads, retain_graph=True, allow_unused=True
            )
        )
        rest = iter(grads_of_wanted[len(self._inputs) :])
        self._join_grads = [tuple(next(rest) for _ in group) for group in edges]
        return [
            torch.zeros_like(x) if grad is None else in_order_of(x, grad)
            for x, grad in zip(self._inputs, grads_of_wanted, strict=False)
        ]

    def to_weights(self) -> None:
        """Add the gradients of the parameters to `.grad`; call it once, after `to_inputs`."""
        if not self._outputs or not self._params:
            return
        if not self._inputs:
            torch.autograd.backward(self._outputs, self._grads, inputs=self._params)
            return
        for (node, params), grads in zip(self._joins, self._join_grads, strict=True):
            pairs = [(GradientEdge(node, k), g) for k, g in enumerate(grads) if g is not None]
            if pairs:
                roots, root_grads = [edge for edge, _ in pairs], [g for _, g in pairs]
                _add(
                    params,
                    torch.autograd.grad(
                        roots, params, root_grads, retain_graph=True, allow_unused=True
                    ),
                )
        if self._repeated:
            _add(
                self._repeated,
                torch.autograd.grad(self._outputs, self._repeated, self._grads, allow_unused=True),
            )

    def _find_joins(self) -> None:
        """Find the first nodes after each parameter that are on the path from the inputs."""
        roots = [_node_of(x) for x in self._outputs]
        above = _nodes_above(roots)
        path = _reachable([_node_of(x) for x in self._inputs], above)
        joins: dict[Node, list[torch.Tensor]] = defaultdict(list)
        for param in self._params:
            nodes = _first_on_path(_node_of(param), above, path | set(roots))
            if len(nodes) == 1:
                joins[nodes.pop()].append(param)
            elif nodes:
                self._repeated.append(param)
        self._joins = list(joins.items())


def _node_of(x: torch.Tensor) -> Node:
    """Return the node that computes a tensor, or accumulates the gradient of a leaf."""
    if x.grad_fn is not None:
        return x.grad_fn
    with torch.enable_grad():
        view = x.view_as(x).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    return node


def _nodes_above(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return, for each node, the nodes whose operations use its results."""
    above: dict[Node, list[Node]] = defaultdict(list)
    seen, todo = set(roots), list(roots)
    while todo:
        node = todo.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            above[below].append(node)
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return above


def _reachable(begin: Iterable[Node], above: dict[Node, list[Node]]) -> set[Node]:
    seen, todo = set(begin), list(begin)
    while todo:
        for node in above.get(todo.pop(), []):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


def _first_on_path(begin: Node, above: dict[Node, list[Node]], path: set[Node]) -> set[Node]:
    """Return the nodes of the path that are reached from a parameter through no other such node."""
    first: set[Node] = set()
    seen, todo = {begin}, [begin]
    while todo:
        for node in above.get(todo.pop(), []):
            if node in path:
                first.add(node)
            elif node not in seen:
                seen.add(node)
                todo.append(node)
    return first


def _add(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)
            for hook in list((accumulate_hooks(param) or {}).values()):
                hook(param)  # as torch's own backward does
