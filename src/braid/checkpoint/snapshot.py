"""Snapshots: the boxes of tensors that a rank owns and hands to `save`.

The checkpoint knows no engine. The owner of parameters, sharded in any way, says which pieces of
which global tensors are here; together the ranks' pieces tile each tensor exactly once.
`ReplicatedSnapshot` is for data parallelism, where every rank has everything: each writes an n-th
of the bytes.

    bytes of all tensors   |--- a ---|------------- b -------------|-- c --|
    ranks                  |      0      |      1      |      2      |
                           boundaries are moved to whole rows (dim 0)

Tensors that differ from rank to rank, such as the moments of an optimizer that takes steps alone,
cannot be divided like that. Each rank writes all of its own, and says so by a name: `own/model/w`
here is `own/00001/model/w` of rank 1 in the checkpoint.
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
    """Return the name of a rank's own tensor in a checkpoint."""
    return f"{OWN}{rank:05d}/{name}"


def owner_of(name: str) -> tuple[int | None, str]:
    """Return the rank, and the name without it, of a tensor in a checkpoint.

    The rank is None if the tensor is no rank's own.

    >>> owner_of("own/00001/model/w"), owner_of("model/w")
    ((1, 'model/w'), (None, 'model/w'))
    """
    match = OWN_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def param_of(name: str) -> str:
    """Return the parameter's name of a tensor `model/NAME` or `optimizer/NAME/STATE`.

    >>> param_of("model/head.weight"), param_of("optimizer/head.weight/exp_avg")
    ('head.weight', 'head.weight')
    """
    root, _, rest = name.partition("/")
    return rest if root == "model" else rest.rpartition("/")[0]


class Slice(NamedTuple):
    """A box of a global tensor.

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
    """State of a rank that a checkpoint keeps."""

    def pieces(self) -> Iterable[Slice]:
        """Return the slices that this rank owns; all ranks together own every element once."""
        ...


class FailedSnapshot:
    """State that this rank could not collect, which a save reports to all ranks.

    Args:
        error: Exception that ended the attempt.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def pieces(self) -> Iterable[Slice]:
        """Raise the error."""
        raise self._error


class JoinedSnapshot:
    """Several snapshots of a rank, of which each has other tensors.

    Args:
        snapshots: The snapshots.
    """

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._snapshots = snapshots

    def pieces(self) -> Iterable[Slice]:
        """Yield the slices of one after the other."""
        for snapshot in self._snapshots:
            yield from snapshot.pieces()


class ReplicatedSnapshot:
    """Tensors that every rank has; ownership is divided by bytes.

    Args:
        tensors: Tensors by name; the same names, shapes and dtypes on every rank, and the same
            values, except for names that begin with `own/`.
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
        """Yield this rank's rows, and its own tensors."""
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
            if rows == 1:  # also zero-dim tensors and empty ones: all or nothing
                yield Slice(name, shape, (0,) * len(shape), tensor)
            else:
                yield Slice(name, shape, (low, *(0,) * (len(shape) - 1)), tensor[low:high])

    def _first_row(self, rank: int, start: int, row_bytes: int, rows: int, total: int) -> int:
        """Return the first row that begins at or behind the first byte of `rank`."""
        if rank == self._size:
            return rows  # empty tensors at the very end have an owner, too
        boundary = -(-total * rank // self._size)
        if not row_bytes:
            return 0 if start >= boundary else rows
        return min(rows, max(0, -(-(boundary - start) // row_bytes)))
