"""Gradients of models with sharded experts: averages, and their norm.

Parameters of experts differ between ranks, all others are equal. After backward

                  `.grad` is the gradient of   converted to the gradient of the mean loss by
    experts       the sum of all losses        dividing by the number of ranks
    others        this rank's loss             an all_reduce
"""

from __future__ import annotations

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.gradients import fill_missing_gradients
from braid.parallel.gradients.exact_norm import clip_counted_

__all__ = ["average_gradients", "clip_grad_norm_", "is_of_experts"]


def is_of_experts(param: torch.Tensor) -> bool:
    """Return whether a parameter holds different experts on different ranks."""
    return len(param.__dict__.get("braid_experts", ())) > 1


@torch.no_grad()
def average_gradients(model: nn.Module, group: Group, replicas: Group | None = None) -> None:
    """Convert gradients to gradients of the mean of all ranks' losses, in place.

    If any rank has a gradient of a parameter, ranks without one add zeros; a parameter that no rank
    has used keeps the gradient None.

    Args:
        model: Model with sharded experts.
        group: Ranks that share the experts.
        replicas: Ranks that have the same experts, if there are several groups of experts.

    Cost: one all_reduce of a byte per parameter, and one of the gradients of all parameters except
        experts; with `replicas` one more of each over them.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    grads = fill_missing_gradients(params, [group] if replicas is None else [group, replicas])
    with group.coalesce() as block:
        for param, grad in grads:
            if not is_of_experts(param):
                block.all_reduce(grad, op="avg")
    block.work.wait()
    for param, grad in grads:
        if is_of_experts(param):
            grad.div_(group.size)
    if replicas is not None and replicas.size > 1:
        with replicas.coalesce() as block:
            for _, grad in grads:
                block.all_reduce(grad, op="avg")
        block.work.wait()


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, group: Group) -> torch.Tensor:
    """Scale gradients so that their 2-norm over all ranks is at most `max_norm`.

    Experts count on all ranks, other parameters once. Call it after `average_gradients`.

    Args:
        model: Model with sharded experts.
        max_norm: Largest norm.
        group: Ranks that share the experts.

    Returns:
        The norm before scaling, on all ranks.

    Cost: an all_reduce of 8 bytes.
    """
    grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    counted = ((grad, is_of_experts(param) or not group.rank) for param, grad in grads)
    return clip_counted_(counted, max_norm, [group])
