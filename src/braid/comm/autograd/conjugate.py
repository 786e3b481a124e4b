"""Conjugate pairs for replicated tensors: one function's forward is the other's backward.

Tensor parallel layers hold some tensors replicated, some sharded and some as partial sums. A
replicated tensor has the same value on every rank and, if every rank computes the same loss, the
same gradient. Unlike in the rest of this package, this gradient is not summed over ranks: all ranks
compute one loss, not n. Choose the function by the use of the tensor:

    identity_forward_all_reduce_backward     replicated -> input of different work on each rank,
                                             Megatron's f
    all_reduce_forward_identity_backward     partial sums -> replicated, Megatron's g
    split_forward_all_gather_backward        replicated -> parts
    all_gather_forward_split_backward        parts -> replicated

A layer made of such pairs and local work gives every rank the gradients of the single-process
layer, without scaling.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019), section 3, figure 3.
"""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.autograd.arguments import check_call
from braid.comm.autograd.linear_map import collective
from braid.errors import ConfigError

__all__ = [
    "all_gather_forward_split_backward",
    "all_reduce_forward_identity_backward",
    "identity_forward_all_reduce_backward",
    "split_forward_all_gather_backward",
]


def identity_forward_all_reduce_backward(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Pass a replicated `x` to work that differs between ranks (Megatron's f).

    Backward: all_reduce(sum). Each rank has the gradient of its use of `x`; `x` gets their sum.

    Cost: nothing forward, 2 (n-1)/n l bytes backward.
    """
    check_call("identity_forward_all_reduce_backward", group, x)
    return collective(
        lambda t: t.detach(), lambda g: all_reduce_forward_identity_backward(group, g), x
    )


def all_reduce_forward_identity_backward(group: Group, x: torch.Tensor) -> torch.Tensor:
    """Sum the ranks' terms to a replicated tensor (Megatron's g).

    Backward: identity. Every rank already has the gradient of the sum, which equals the gradient of
    each term.

    Cost: 2 (n-1)/n l bytes forward, nothing backward.
    """
    check_call("all_reduce_forward_identity_backward", group, x)
    return collective(
        lambda t: group.all_reduce(t, out=torch.empty_like(t)),
        lambda g: identity_forward_all_reduce_backward(group, g),
        x,
    )


def split_forward_all_gather_backward(
    group: Group, x: torch.Tensor, *, dim: int = 0
) -> torch.Tensor:
    """Return this rank's part of a replicated `x`, as a copy: `x` itself may be freed.

    Args:
        group: Ranks that take part.
        x: Tensor that is the same on all ranks.
        dim: Dim to divide; its length is a multiple of n.

    Backward: all_gather. The gradient of `x` is the concatenation of the gradients of the parts.

    Cost: nothing forward, (n-1)/n l bytes backward.

    Raises:
        ConfigError: `dim` cannot be divided.
    """
    check_call("split_forward_all_gather_backward", group, x, dim)
    if dim:
        return split_forward_all_gather_backward(group, x.movedim(dim, 0)).movedim(0, dim)
    if x.dim() == 0 or x.shape[0] % group.size:
        length = str(x.shape[0]) if x.dim() else "no dim"
        msg = (
            f"dim to split is {length} long (shape {list(x.shape)}), which is not a multiple of "
            f"the group's size {group.size}: pad it"
        )
        raise ConfigError(msg)
    return collective(
        lambda t: t.tensor_split(group.size)[group.rank].clone(),
        lambda g: all_gather_forward_split_backward(group, g),
        x,
    )


def all_gather_forward_split_backward(
    group: Group, x: torch.Tensor, *, dim: int = 0
) -> torch.Tensor:
    """Return all ranks' parts as a replicated tensor.

    Args:
        group: Ranks that take part.
        x: This rank's part, with the same shape on all ranks; at least one dim.
        dim: Dim along which to concatenate.

    Backward: this rank's part of the gradient, which is the same on all ranks.

    Cost: (n-1)/n l bytes forward, nothing backward.
    """
    check_call("all_gather_forward_split_backward", group, x, dim)
    if dim:
        return all_gather_forward_split_backward(group, x.movedim(dim, 0)).movedim(0, dim)
    return collective(
        group.all_gather,
        lambda g: split_forward_all_gather_backward(group, g),
        x,
    )
