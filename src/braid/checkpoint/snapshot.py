"""Snapshots: the boxes of tensors that a rank passes to `save`.

This package does not depend on an engine. An engine describes its shards as boxes of global
tensors; together the ranks' boxes tile each tensor exactly once. `ReplicatedSnapshot` is for data
parallelism, where every rank has all tensors: each of n ranks writes 1 / n of the bytes.

    bytes of all tensors   |--- a ---|------------- b -------------|-- c --|
    ranks                  |      0      |      1      |      2      |
                           boundaries are rounded to whole rows (dim 0)

Per-rank tensors differ between ranks, such as the moments of an optimizer with local steps, and
cannot be divided in this way. Each rank writes all of its per-rank tensors. Their names begin with
`own/`: `own/model/w` on rank 1 is `own/00001/model/w` in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

__all__ = [
    "OWN",
    "FailedSnapshot",
    "JoinedSnapshot",
    "ReplicatedSnapshot",
    "Slice",
    "Snapshot",
    "own_name",
    "owner_of",
    "param_of",
]

OWN = "own/"


OWN_NAME = re.compile(r"own/(\d{5,})/(.+)", re.DOTALL)


def own_name(rank: int, name: str) -> str:
    """Return the name in a checkpoint of a rank's per-rank tensor."""
    return f"{OWN}{rank:05d}/{name}"


def owner_of(name: str) -> tuple[int | None, str]:
    """Split the name of a tensor in a checkpoint into rank and name.

    The rank is None if the tensor is not a per-rank tensor.

    >>> owner_of("own/00001/model/w"), owner_of("model/w")
    ((1, 'model/w'), (None, 'model/w'))
    """
    match = OWN_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def param_of(name: str) -> str:
    """Return NAME, the parameter's name in `model/NAME` or `optimizer/NAME/STATE`.

    >>> param_of("model/head.weight"), param_of("optimizer/head.weight/exp_avg")
    ('head.weight', 'head.weight')
    """
    root, _, rest = name.partition("/")
    return rest if root == "model" else rest.rpartition("/")[0]


class Slice(NamedTuple):
    """A rank's box (range of indices in each dim) of a global tensor.

    Attributes:
        name: Name of the global tensor.
        global_shape: Shape of the global tensor.
        offset: First index of the box, per dim.
        tensor: Values; their shape is the extent of the box.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


class Snapshot(Protocol):
    """Tensors of a rank that a checkpoint stores."""

    def pieces(self) -> Iterable[Slice]:
        """Return this rank's slices; the slices of all ranks contain every element once."""


class FailedSnapshot:
    """Snapshot of a rank that failed to collect its tensors.

    `save` gets the error from `pieces` and reports it to all ranks, so that all of them raise.

    Args:
        error: Exception that was raised when the tensors were collected.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def pieces(self) -> Iterable[Slice]:
        """Raise the error."""
        raise self._error


class JoinedSnapshot:
    """Union of several snapshots of a rank, with different tensors.

    Args:
        snapshots: The snapshots.
    """

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def pieces(self) -> Iterable[Slice]:
        """Yield the slices of all snapshots."""
        for snapshot in self._snapshots:
            yield from snapshot.pieces()


class ReplicatedSnapshot:
    """Tensors that every rank has; each rank writes an equal share of the bytes.

    Args:
        tensors: Tensors by name; the same names, shapes and dtypes on every rank. Values must be
            equal too, except for names that begin with `own/`.
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
        """Yield this rank's rows of shared tensors, and its per-rank tensors."""
        for name in sorted(name for name in self._tensors if name.startswith(OWN)):
            tensor = self._tensors[name].detach()
            full = own_name(self._rank, name.removeprefix(OWN))
            yield Slice(full, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
        shared = sorted(name for name in self._tensors if not name.startswith(OWN))
        total = max(1, sum(self._tensors[name].nbytes for name in shared))
        start = 0
        for name in shared:
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
            if rows == 1:  # zero-dim and empty tensors are not split either
                yield Slice(name, shape, (0,) * len(shape), tensor)
            else:
                yield Slice(name, shape, (low, *(0,) * (len(shape) - 1)), tensor[low:high])

    def _first_row(self, rank: int, start: int, row_bytes: int, rows: int, total: int) -> int:
        """Return the first row that begins at or after the first byte of `rank`."""
        if rank == self._size:
            return rows  # empty tensors at the end also need an owner
        boundary = -(-total * rank // self._size)
        if not row_bytes:
            return 0 if start >= boundary else rows
        return min(rows, max(0, -(-(boundary - start) // row_bytes)))
