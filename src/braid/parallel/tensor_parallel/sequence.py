"""Sequence parallelism: between sharded layers each rank has some positions of a sequence.

Norms and dropouts between sharded layers otherwise repeat the same work on whole tensors on each
rank. They can be sharded along the sequence: the all_reduces f and g become an all_gather and a
reduce_scatter, which cost the same bytes, and activations between layers take 1/n of the memory.

    norm ─ gather ─▶ A (column) ─▶ gelu ─▶ B (row) ─ reduce_scatter ─▶ dropout ─▶ norm
    s/n              s                              s/n

                              forward             backward
    scatter_sequence          own positions       all_gather
    gather_sequence           all_gather          reduce_scatter, or own positions
    reduce_scatter_sequence   reduce_scatter      all_gather

Parameters between the layers, such as a norm's, are replicated on each rank but process only some
positions: the sum of their gradients over ranks is the gradient.

Source: V. A. Korthikanti et al., Reducing activation recomputation in large transformer models,
2022, section 4.2.2.
"""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.autograd import (
    all_gather,
    all_gather_forward_split_backward,
    reduce_scatter,
    split_forward_all_gather_backward,
)
from braid.errors import ConfigError

__all__ = ["gather_sequence", "reduce_scatter_sequence", "scatter_sequence"]


def scatter_sequence(group: Group, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Return this rank's positions of a sequence that is the same on all ranks.

    Args:
        group: Ranks that share the sequence.
        x: Tensor that is the same on all ranks.
        dim: Dim of positions; its length is a multiple of the number of ranks.

    Backward: all_gather.

    Cost: no messages forward, (n-1)/n l bytes backward.

    Raises:
        ConfigError: The sequence cannot be divided.
    """
    _check(group, x, dim)
    return split_forward_all_gather_backward(group, x, dim=dim % x.dim())


def gather_sequence(
    group: Group, x: torch.Tensor, dim: int = 1, *, partial_grad: bool = True
) -> torch.Tensor:
    """Return the whole sequence of all ranks' positions.

    Args:
        group: Ranks that share the sequence.
        x: This rank's positions, of the same shape on all ranks.
        dim: Dim of positions.
        partial_grad: Whether ranks use the whole sequence for different work, such as
            column-parallel layers, so that gradients are partial sums. If False, all ranks do the
            same work and have the same gradient.

    Backward: reduce_scatter with `partial_grad`, otherwise this rank's positions.

    Cost: (n-1)/n l bytes forward, and backward with `partial_grad`.
    """
    gather = all_gather if partial_grad else all_gather_forward_split_backward
    return gather(group, x, dim=dim % max(x.dim(), 1))


def reduce_scatter_sequence(group: Group, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Return this rank's positions of the sum of all ranks' sequences.

    Args:
        group: Ranks that share the sequence.
        x: This rank's partial sum, as of a row-parallel layer, of the same shape on all ranks.
        dim: Dim of positions; its length is a multiple of the number of ranks.

    Backward: all_gather.

    Cost: (n-1)/n l bytes forward and backward.

    Raises:
        ConfigError: The sequence cannot be divided.
    """
    _check(group, x, dim)
    return reduce_scatter(group, x, dim=dim % x.dim())


def _check(group: Group, x: torch.Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        msg = f"a sequence of shape {list(x.shape)} has no dim {dim}: pass its dim of positions"
        raise ConfigError(msg)
    if x.shape[dim] % group.size:
        msg = (
            f"a sequence of {x.shape[dim]} positions (dim {dim} of shape {list(x.shape)}) cannot "
            f"be divided over {group.size} ranks: pad it to "
            f"{-(-x.shape[dim] // group.size) * group.size}"
        )
        raise ConfigError(msg)
