"""Distributed autograd, under torch's names: gradients through tensors that remote calls carry.

    with dist_autograd.context() as context_id:
        loss = model(x).sum()                       calls of other nodes inside
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)                  or get_gradients(context_id)

Gradients belong to the context; `.grad` of parameters does not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from braid.rpc.autograd.accumulation import run_hooks
from braid.rpc.current import current_agent

__all__ = ["backward", "context", "get_gradients", "run_hooks"]


@contextlib.contextmanager
def context() -> Iterator[int]:
    """Record the tensors that remote calls carry; yield the number of the context.

    When the context ends, its state on all nodes is released.

    Raises:
        StaleError: This process is not a node.
        ConfigError: A context is open in this thread already: contexts do not nest.
    """
    contexts = current_agent().contexts
    number = contexts.open()
    try:
        yield number
    finally:
        contexts.close(number)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    timeout_s: float | None = None,
) -> None:
    """Compute the gradients of all parameters on which the roots depend, on all nodes.

    Args:
        context_id: Context in which the roots were computed.
        roots: Tensors of one element.
        retain_graph: Whether another backward of the same context may follow.
        timeout_s: Deadline in seconds; `RpcOptions(rpc_timeout=)` when None.

    Cost: one message with gradients for each message that the roots depend on. Its answer is a
    number in later gradients to the same node, or one more message.

    Raises:
        ConfigError: The context is over, or a root has no graph or more than one element.
        CommError: A local backward raised, or a node is lost; raised on all nodes, with its name.
        CommTimeout: The backward did not end in time; the message lists what it waits for.
    """
    current_agent().contexts.backward(context_id, roots, retain_graph, timeout_s=timeout_s)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that a context has on this node, by parameter.

    Raises:
        ConfigError: The context is over, or has never been on this node.
    """
    return current_agent().contexts.get(context_id).gradients
