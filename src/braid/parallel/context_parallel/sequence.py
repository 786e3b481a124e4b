"""Sharding of sequences: the positions of each rank, and splitting and joining of sequences.

With causal attention position i attends to i + 1 positions. With n contiguous pieces, the last rank
would do most of the work. So a sequence is split into 2n chunks, an early and a late one for each
rank, and all ranks do the same work:

    n = 3      chunk    0  1  2  3  4  5
               rank     0  1  2  2  1  0        balanced: rank r has chunks r and 2n-1-r
               rank     0  0  1  1  2  2        not balanced: contiguous pieces

All ranks have the same number of positions: other lengths raise an error, or are padded.

Source: W. Brandon et al., Striped attention, 2023, for the imbalance; two chunks per rank as in
Megatron-LM's and torch's context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from braid.comm import Group
from braid.comm.autograd import all_gather
from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.errors import ConfigError
from braid.parallel.gradients.same_batches import SameBatches

__all__ = [
    "BatchSplitter",
    "chunks_of",
    "gather_sequence",
    "join_sequence",
    "pad_sequence",
    "padded_length",
    "position_ids",
    "split_sequence",
]


def chunks_of(size: int, rank: int, *, balanced: bool = True) -> tuple[int, ...]:
    """Return the indices of a rank's chunks, if a sequence is cut into chunks of equal length.

    Args:
        size: Number of ranks.
        rank: Index of the rank.
        balanced: Whether there are two chunks per rank, and a rank has an early and a late one;
            else there is one per rank.
    """
    return (rank, 2 * size - 1 - rank) if balanced and size > 1 else (rank,)


def split_sequence(
    size: int, rank: int, x: torch.Tensor, dim: int = 1, *, balanced: bool = True
) -> torch.Tensor:
    """Return a rank's positions of a whole sequence.

    Args:
        size: Number of ranks.
        rank: Index of the rank.
        x: Whole sequence.
        dim: Dim of positions.
        balanced: Whether a rank has an early and a late chunk, for causal attention.

    Raises:
        ConfigError: The length cannot be divided; the message has the next valid length.

    Cost: no messages.
    """
    length = _length(x, dim)
    chunks = chunks_of(size, rank, balanced=balanced)
    _check_length(size, length, balanced=balanced)
    width = length // (len(chunks) * size)
    return torch.cat([x.narrow(dim, chunk * width, width) for chunk in chunks], dim)


def join_sequence(
    parts: Sequence[torch.Tensor], dim: int = 1, *, balanced: bool = True
) -> torch.Tensor:
    """Return the whole sequence of all ranks' positions; inverse of `split_sequence`.

    Args:
        parts: Positions of each rank, in the order of ranks.
        dim: Dim of positions.
        balanced: See `split_sequence`.

    Raises:
        ConfigError: Numbers of positions differ between ranks, or are odd.
    """
    lengths = [_length(part, dim) for part in parts]
    num_chunks = len(chunks_of(len(parts), 0, balanced=balanced))
    if len(set(lengths)) > 1 or lengths[0] % num_chunks:
        msg = (
            f"parts of {lengths} positions are not a sequence split over {len(parts)} ranks: all "
            f"ranks must have the same number of positions, a multiple of {num_chunks}"
        )
        raise ConfigError(msg)
    by_chunk = {
        chunk: piece
        for rank, part in enumerate(parts)
        for chunk, piece in zip(
            chunks_of(len(parts), rank, balanced=balanced), part.chunk(num_chunks, dim), strict=True
        )
    }
    return torch.cat([by_chunk[chunk] for chunk in range(len(by_chunk))], dim)


def gather_sequence(
    group: Group, x: torch.Tensor, dim: int = 1, *, balanced: bool = True
) -> torch.Tensor:
    """Return the whole sequence of all ranks' positions, on every rank.

    Args:
        group: Ranks that share the sequence.
        x: This rank's positions, of the same shape on all ranks.
        dim: Dim of positions.
        balanced: See `split_sequence`.

    Backward: each rank's positions receive the sum of all ranks' gradients.

    Cost: (n-1)/n l bytes forward and backward, with l the bytes of the whole sequence.
    """
    _length(x, dim)
    whole = all_gather(group, x.unsqueeze(0))
    return join_sequence(list(whole.unbind(0)), dim, balanced=balanced)


def position_ids(
    size: int, rank: int, length: int, *, balanced: bool = True, device: torch.device | None = None
) -> torch.Tensor:
    """Return the indices, in the whole sequence, of the positions that a rank has.

    Args:
        size: Number of ranks.
        rank: Index of the rank.
        length: Length of the whole sequence.
        balanced: See `split_sequence`.
        device: Device of the result.

    Shape:
        Result: (length / size,).
    """
    return split_sequence(size, rank, torch.arange(length, device=device), 0, balanced=balanced)


class BatchSplitter:
    """Splits batches along their sequences; the ranks must get the same batches.

    Args:
        group: Ranks that share each sequence.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._comparison = SameBatches()

    def split(self, batch: Any, target: Any) -> tuple[Any, Any]:
        """Return this rank's positions of inputs, with their position ids, and of targets.

        A group of one rank gets inputs and targets as they are, without position ids.

        Args:
            batch: Any containers of tensors of shape (rows, length, ...).
            target: Targets, of the same form.

        Raises:
            MismatchError: Ranks got different batches; they are compared in some calls.
        """
        group = self._group
        if group.size == 1:
            return batch, target
        if self._comparison.is_due():
            self._comparison.require(group, "batches", (batch, target))
        first = next(iter(tensors_in(batch)))
        rows, length = first.shape[:2]
        positions = position_ids(group.size, group.rank, length, device=first.device)
        inputs, targets = (
            map_tensors(value, lambda x: split_sequence(group.size, group.rank, x, 1))
            for value in (batch, target)
        )
        return (inputs, positions.expand(rows, -1)), targets


def padded_length(size: int, length: int, *, balanced: bool = True) -> int:
    """Return the smallest length of at least `length` that can be divided over `size` ranks.

    For `balanced` see `split_sequence`.
    """
    unit = size * len(chunks_of(size, 0, balanced=balanced))
    return -(-length // unit) * unit


def pad_sequence(
    size: int, x: torch.Tensor, value: float, dim: int = 1, *, balanced: bool = True
) -> torch.Tensor:
    """Return a sequence padded at its end, so that it can be divided over `size` ranks.

    With causal attention no earlier position attends to the padding; ignore it in the loss.

    Args:
        size: Number of ranks.
        x: Whole sequence.
        value: Value of the new positions, such as a label that the loss ignores.
        dim: Dim of positions.
        balanced: See `split_sequence`.
    """
    length = _length(x, dim)
    missing = padded_length(size, length, balanced=balanced) - length
    behind = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]
    return functional.pad(x, behind, value=value)


def _length(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        msg = f"a sequence of shape {list(x.shape)} has no dim {dim}: pass its dim of positions"
        raise ConfigError(msg)
    return x.shape[dim]


def _check_length(size: int, length: int, *, balanced: bool) -> None:
    fitting = padded_length(size, length, balanced=balanced)
    if fitting == length:
        return
    chunks = size * len(chunks_of(size, 0, balanced=balanced))
    msg = (
        f"a sequence of {length} positions cannot be divided over {size} ranks in {chunks} equal "
        f"chunks: shorten it, or pad it to {fitting} positions with pad_sequence"
    )
    raise ConfigError(msg)
