"""Local backwards that call hooks on gradients of parameters, such as those of data parallelism.

Problem: gradients belong to a context, not to `.grad`, so `torch.autograd.grad` computes them. It
calls no hook that runs after a gradient has been accumulated, and data parallelism averages there.

Idea: where a parameter has such a hook, a local backward accumulates into `.grad` as usual, which
is the context's for that time: it begins with what the context has, and is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch

from braid.rpc.param_locks import PARAM_LOCKS
from braid.torch_internals import accumulate_hooks, has_internal_overlap, storage_id

__all__ = ["accumulated", "has_hooks", "in_own_memory", "run_hooks"]


def run_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Let local backwards of contexts call the hooks that run after an accumulation.

    Hooks of `register_post_accumulate_grad_hook`, so those of braid's DistributedDataParallel, are
    called without this. It is needed where hooks cannot be seen from Python:

        dist_autograd.run_hooks(ddp.parameters())       torch's DistributedDataParallel

    Args:
        parameters: Parameters of this node.

    Cost: local backwards that reach one of them copy its gradients once more, and come one after
    the other.
    """
    for each in parameters:
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(_nothing)  # type: ignore[no-untyped-call]


def _nothing(_param: torch.Tensor) -> None:
    """Mark a parameter: local backwards accumulate into it because it has a hook."""


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether a hook is to run after a gradient of a leaf has been accumulated."""
    return bool(accumulate_hooks(leaf))


def accumulated(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    anchors: Sequence[torch.Tensor],
    known: Mapping[torch.Tensor, torch.Tensor],
    *,
    keeps: bool,
) -> dict[torch.Tensor, torch.Tensor | None]:
    """Run a local backward that calls hooks, and return the gradients of all leaves afterwards.

    Args:
        pairs: Tensors, and the gradients from which the backward begins.
        leaves: Leaves on which the tensors depend.
        anchors: Leaves of receives, likewise.
        known: Gradients that the context has.
        keeps: Whether the graph is kept.
    """
    with PARAM_LOCKS.held(leaves):
        before = [(leaf, leaf.grad, _copied(leaf.grad)) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = _copied(known.get(leaf))
        try:
            torch.autograd.backward(
                [tensor for tensor, _ in pairs],
                [grad for _, grad in pairs],
                retain_graph=keeps,
                inputs=[*leaves, *anchors],
            )
            return {leaf: _copied(leaf.grad) for leaf in leaves}
        finally:
            for leaf, grad, values in before:
                leaf.grad = grad
                if grad is not None and values is not None:  # hooks may have used its memory
                    grad.detach().copy_(values)


def in_own_memory(
    grads: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return gradients that programs may change in place, such as by clipping.

    Autograd returns one tensor for several leaves, and expanded ones. A gradient that shares
    memory, also with `others`, or elements of its memory, is copied.
    """
    taken = {storage_id(x.untyped_storage()) for x in others if _has_storage(x)}
    result: list[torch.Tensor | None] = []
    for grad in grads:
        if not _has_storage(grad):
            result.append(grad)
            continue
        memory = storage_id(grad.untyped_storage())
        is_shared = memory in taken or has_internal_overlap(grad) != 0
        result.append(grad.clone(memory_format=torch.contiguous_format) if is_shared else grad)
        taken.add(memory)
    return result


def _has_storage(x: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return x is not None and x.layout == torch.strided


def _copied(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.detach().clone()
