"""The edges of distributed autograd, as functions of torch's graph.

A message that carries tensors with gradients is a send at one end and a receive at the other. The
receive is a function of torch's graph, so arriving tensors are not leaves and can be changed in
place. Its backward keeps the gradients until they are shipped.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from braid.runtime.torch_internals import backward_class

__all__ = ["Reached", "Receive", "RecvRpc", "SendFunction", "add_grads", "reached_from"]


_TORCH = "torch::distributed::autograd::"  # programs that read graphs compare names of functions


class Receive:
    """Tensors that arrived in a message, and their accumulated gradients.

    Attributes:
        edge: Number of the edge, which is the message.
        anchor: Leaf that represents the tensors, so that autograd can compute their gradients.
        grads: Gradient of each tensor; None before the first one.
    """

    def __init__(self, edge: int, count: int) -> None:
        self.edge = edge
        self.anchor = torch.zeros((), requires_grad=True)
        self.grads: list[torch.Tensor | None] = [None] * count
        self._lock = threading.Lock()  # local backwards of several sends may run at the same time

    def attach(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the tensors as results of `RecvRpc`; its backward adds their gradients here."""
        return RecvRpc.apply(self.anchor, self, list(tensors))  # type: ignore[no-any-return,no-untyped-call]

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients that one local backward has computed for the tensors."""
        with self._lock:
            self.grads = [add_grads(a, b) for a, b in zip(self.grads, grads, strict=True)]

    def take(self) -> list[torch.Tensor | None]:
        """Return the accumulated gradients, and reset them to None."""
        grads, self.grads = self.grads, [None] * len(self.grads)
        return grads


class RecvRpc(torch.autograd.Function):
    """The receiving end of an edge (a message with tensors), as a function in torch's graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, receive: Receive, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors; they are not inputs, so they can be changed in place."""
        del anchor
        ctx.receive = receive
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        """Add the gradients to the `Receive`, where they stay until they are sent."""
        ctx.receive.add(grads)
        return None, None, None


backward_class(RecvRpc).__name__ = f"{_TORCH}RecvRpcBackward"


class SendFunction(NamedTuple):
    """The sending end of an edge (a message with tensors), for programs that inspect the graph."""

    tensors: list[torch.Tensor]

    def name(self) -> str:
        """Return the name of the function."""
        return f"{_TORCH}SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """Functions that computed the tensors, in the form of `Node.next_functions` of torch."""
        return tuple(
            (tensor.grad_fn, tensor.output_nr)
            if tensor.grad_fn is not None
            else (tensor * 1).grad_fn.next_functions[0]  # type: ignore[union-attr]
            for tensor in self.tensors
        )


class Reached(NamedTuple):
    """Leaves and received messages on which tensors depend inside of a process.

    Attributes:
        leaves: Parameters.
        receives: Messages with tensors that the process has received.
    """

    leaves: list[torch.Tensor]
    receives: list[Receive]


def reached_from(tensors: Sequence[torch.Tensor]) -> Reached:
    """Return the leaves and received messages on which tensors depend, without duplicates."""
    leaves = {
        id(tensor): tensor for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad
    }
    receives: dict[int, Receive] = {}
    stack: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        function = stack.pop()
        receive = getattr(function, "receive", None)
        if isinstance(receive, Receive):
            receives[id(receive)] = receive  # another context may have an equal edge
            continue
        variable = getattr(function, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return Reached(list(leaves.values()), list(receives.values()))


def add_grads(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients; either may be missing or sparse."""
    if a is None or b is None:
        return b if a is None else a
    return b + a if a.is_sparse else a + b  # torch needs the dense summand first
