"""What a rank hands to `save`: the boxes of tensors that it owns.

The checkpoint knows no engine. Whoever holds parameters, sharded in any way, says which pieces of which global tensors are
here; together the ranks' pieces tile each tensor exactly once. `ReplicatedSnapshot` is that for data parallelism, where
every rank has everything: each writes an n-th of the bytes.

    bytes of all tensors   |--- a ---|------------- b -------------|-- c --|
    ranks                  |      0      |      1      |      2      |         boundaries moved to whole rows (dim 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch

__all__ = ["ReplicatedSnapshot", "Slice", "Snapshot"]


class Slice(NamedTuple):
    """A box of a global tensor.

    Attributes:
        name: Name of the global tensor.
        global_shape: Its shape.
        offset: Where the box begins, per dim.
        tensor: The values; its shape is the extent of the box.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


class Snapshot(Protocol):
    """The state of a rank that a checkpoint keeps."""

    def pieces(self) -> Iterable[Slice]:
        """The slices that this rank owns; all ranks together own every element once."""
        ...


class ReplicatedSnapshot:
    """Tensors that every rank has; ownership is divided by bytes.

    Args:
        tensors: By name; the same names, shapes and dtypes on every rank.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, rank: int = 0, size: int = 1
    ) -> None:
        self._tensors = tensors
        self._rank = rank
        self._size = size

    def pieces(self) -> Iterable[Slice]:
        """This rank's rows."""
        total = max(1, sum(t.numel() * t.element_size() for t in self._tensors.values()))
        start = 0
        for name in sorted(self._tensors):
            tensor = self._tensors[name].detach()
            nbytes = tensor.numel() * tensor.element_size()
            rows = tensor.shape[0] if tensor.dim() and nbytes else 1
            low, high = (
                self._first_row(rank, start, nbytes // rows, rows, total)
                for rank in (self._rank, self._rank + 1)
            )
            start += nbytes
            if low == high:
                continue
            shape = tuple(tensor.shape)
            if rows == 1:  # also zero-dim tensors and empty ones: all or nothing
                yield Slice(name, shape, (0,) * len(shape), tensor)
            else:
                yield Slice(name, shape, (low, *(0,) * (len(shape) - 1)), tensor[low:high])

    def _first_row(self, rank: int, start: int, row_bytes: int, rows: int, total: int) -> int:
        """The first row that begins at or behind the first byte of `rank`."""
        if rank == self._size:
            return rows  # empty tensors at the very end have an owner, too
        boundary = -(-total * rank // self._size)
        if not row_bytes:
            return 0 if start >= boundary else rows
        return min(rows, max(0, -(-(boundary - start) // row_bytes)))
