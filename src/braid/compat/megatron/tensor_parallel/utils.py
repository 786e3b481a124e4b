"""`megatron.core.tensor_parallel.utils`: parts of tensors and vocabularies."""

from __future__ import annotations

from typing import Any

import torch

from braid.compat.megatron.utils import divide, tensor_group

__all__ = [
    "VocabUtility",
    "gather_split_1d_tensor",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
]


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return equal parts of the last dim.

    Args:
        tensor: Tensor.
        num_partitions: Number of parts.
        contiguous_split_chunks: Whether parts are contiguous copies instead of views.
    """
    divide(tensor.shape[-1], num_partitions)
    parts = tensor.chunk(num_partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def split_tensor_into_1d_equal_chunks(
    tensor: torch.Tensor, new_buffer: bool = False, tp_group: Any = None
) -> torch.Tensor:
    """Return this rank's equal part of a tensor's elements, in one dim.

    Args:
        tensor: Tensor, equal on all ranks.
        new_buffer: Whether the part is a copy instead of a view.
        tp_group: Process group of the ranks; the tensor parallel group when None.
    """
    group = tensor_group(tp_group)
    count = divide(tensor.numel(), group.size)
    part = tensor.reshape(-1)[count * group.rank : count * (group.rank + 1)]
    return part.detach().clone() if new_buffer else part


def gather_split_1d_tensor(tensor: torch.Tensor, tp_group: Any = None) -> torch.Tensor:
    """Return the elements of all ranks; the inverse of `split_tensor_into_1d_equal_chunks`."""
    return tensor_group(tp_group).all_gather(tensor.detach().reshape(-1).contiguous())


class VocabUtility:
    """Computes the range [first, last) of a rank's part of the vocabulary."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int,
        rank: int,
        world_size: int,  # noqa: ARG004 - the original's signature
    ) -> tuple[int, int]:
        """Return a rank's range of vocabulary indices from the number of indices per rank."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return a rank's range of vocabulary indices from the size of the vocabulary."""
        count = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(count, rank, world_size)
