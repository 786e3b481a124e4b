"""`megatron.core.tensor_parallel.mappings`: collectives with gradients between regions.

region             forward          backward          last dim, or sequence (dim 0)
copy_to            nothing          all_reduce
reduce_from        all_reduce       nothing
scatter_to         local part       all_gather        both
gather_from        all_gather       local part        both; of a sequence also reduce_scatter
reduce_scatter_to  reduce_scatter   all_gather        both

As in Megatron, results are contiguous, and in a group of one rank they are the input itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from braid.comm import Group, autograd
from braid.comm.autograd import (
    all_gather_forward_split_backward,
    all_reduce_forward_identity_backward,
    identity_forward_all_reduce_backward,
    split_forward_all_gather_backward,
)
from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.groups import braid_group
from braid.compat.megatron.utils import divide, tensor_group
from braid.parallel.tensor_parallel import (
    gather_sequence,
    reduce_scatter_sequence,
    scatter_sequence,
)

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def _moved(
    move: Callable[[Group, torch.Tensor], torch.Tensor], group: Any, input_: torch.Tensor
) -> torch.Tensor:
    peer_group = tensor_group(group)
    return input_ if peer_group.size == 1 else move(peer_group, input_).contiguous()


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the input; backward sums gradients over ranks."""
    return identity_forward_all_reduce_backward(tensor_group(group), input_)


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Return the sum over ranks; backward returns the gradient unchanged."""
    return _moved(all_reduce_forward_identity_backward, group, input_)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Return this rank's part of the last dim; backward gathers the gradients of all parts."""
    divide(input_.shape[-1], tensor_group(group).size)
    return _moved(partial(split_forward_all_gather_backward, dim=input_.dim() - 1), group, input_)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """All-gather shards of the last dim; backward keeps the gradient of this rank's shard."""
    return _moved(partial(all_gather_forward_split_backward, dim=input_.dim() - 1), group, input_)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return this rank's positions (dim 0) of the input; backward gathers all gradients."""
    divide(input_.shape[0], tensor_group(group).size)
    return _moved(partial(scatter_sequence, dim=0), group, input_)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - the original's; results are new tensors
) -> torch.Tensor:
    """Gather the positions of all ranks; backward reduce-scatters, or keeps this rank's part.

    Args:
        input_: This rank's positions, which are dim 0.
        tensor_parallel_output_grad: Whether ranks compute different things with the result, so that
            backward must reduce gradients.
        group: Group of ranks; the tensor parallel group when None.
        output_split_sizes: Number of each rank's positions; equal when None.
        use_global_buffer: No effect.
    """
    if output_split_sizes is None:
        gather = partial(gather_sequence, dim=0, partial_grad=tensor_parallel_output_grad)
        return _moved(gather, group, input_)
    if not tensor_parallel_output_grad:
        msg = "output_split_sizes needs tensor_parallel_output_grad=True: pass both, or neither"
        raise UsageError(msg)
    return _moved(partial(autograd.all_gather, sizes=list(output_split_sizes)), group, input_)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    group: Any = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,  # noqa: ARG001 - as above
) -> torch.Tensor:
    """Return this rank's positions (dim 0) of the sum over ranks; backward gathers gradients.

    Args:
        input_: This rank's term of the sum.
        group: Group of ranks; the tensor parallel group when None.
        input_split_sizes: Number of each rank's positions; equal when None.
        use_global_buffer: No effect.
    """
    if input_split_sizes is None:
        divide(input_.shape[0], tensor_group(group).size)
        return _moved(partial(reduce_scatter_sequence, dim=0), group, input_)
    return _moved(partial(autograd.reduce_scatter, sizes=list(input_split_sizes)), group, input_)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Gather the last dim from all ranks; backward reduce-scatters the gradient."""
    return _moved(partial(gather_sequence, dim=-1), group, input_)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Return this rank's part (last dim) of the sum over ranks; backward gathers gradients."""
    divide(input_.shape[-1], tensor_group(group).size)
    return _moved(partial(reduce_scatter_sequence, dim=-1), group, input_)


def all_to_all(
    group: Any,
    input_: torch.Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange parts of dim 0 among all ranks; backward exchanges the gradients.

    Args:
        group: Group of ranks.
        input_: Concatenated parts for all ranks.
        output_split_sizes_: Length of the part from each rank; equal when None.
        input_split_sizes: Length of the part for each rank; equal when None.
    """
    peer_group = braid_group(group)
    send, receive = input_split_sizes, output_split_sizes_
    if send is None and receive is None:
        return autograd.all_to_all(peer_group, input_)
    equal = [divide(input_.shape[0], peer_group.size)] * peer_group.size
    return autograd.all_to_all(
        peer_group,
        input_,
        send_sizes=equal if send is None else list(send),
        receive_sizes=equal if receive is None else list(receive),
    )


def all_to_all_sp2hp(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Exchange this rank's tokens for its part of the hidden dim of all tokens.

    Shape:
        input_: [tokens / n, hidden], or with tokens as several dims -> [tokens, hidden / n].
    """
    peer_group = tensor_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    divide(rows.shape[-1], peer_group.size)
    parts = rows.chunk(peer_group.size, dim=1)
    return autograd.all_to_all(peer_group, torch.cat(parts))


def all_to_all_hp2sp(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Exchange a part of the hidden dim for whole tokens; the inverse of `all_to_all_sp2hp`.

    Shape:
        input_: [tokens, hidden / n], or with tokens as several dims -> [tokens / n, hidden].
    """
    peer_group = tensor_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    divide(rows.shape[0], peer_group.size)
    return torch.cat(autograd.all_to_all(peer_group, rows).chunk(peer_group.size), dim=-1)
