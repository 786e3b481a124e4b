"""The same operations with every library on the same buffers, for `braid bench comm`.

gloo         torch.distributed over Gloo                 the choice of torch users on CPUs today
braid        Group called directly, ordinary tensors     raw
registered   Group called directly, tensors of `empty`   raw
torch        torch.distributed over braid                the same program as gloo's, other backend
mpi          mpi4py over the MPI that is installed       raw, buffers of numpy; only under mpiexec
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from braid.comm import Group

__all__ = ["LIBRARIES", "Buffers", "runs_of"]

Run = Callable[[], object]
LIBRARIES = ("gloo", "braid", "registered", "torch", "mpi")


class Buffers(NamedTuple):
    """Tensors of one measurement.

    Attributes:
        x: Input, as long as the largest full buffer.
        out: Output, as long as the largest full buffer.
        part: The first 1/n of `x`, for n ranks.
        small: The first 1/n of `out`.
    """

    x: torch.Tensor
    out: torch.Tensor
    part: torch.Tensor
    small: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, out: torch.Tensor, size: int) -> Buffers:
        """Make the buffers of one of `size` ranks from the full input `x` and output `out`."""
        width = x.numel() // size
        return cls(x, out, x[:width], out[:width])


def runs_of(
    libraries: tuple[str, ...],
    operation: str,
    dtype: torch.dtype,
    nbytes: int,
    group: Group,
    over_braid: Any,
) -> dict[str, Run]:
    """Return, for each library that has `operation`, a function that runs it once.

    Args:
        libraries: Names in `LIBRARIES`.
        operation: Name of the operation.
        dtype: Dtype of the elements.
        nbytes: Bytes of the largest full buffer of a rank.
        group: Group of all ranks.
        over_braid: The same ranks as a group of torch.distributed over braid; Gloo's is the default
            group.
    """
    n = group.size
    numel = max(n, nbytes // dtype.itemsize // n * n)
    ordinary = Buffers.of(torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), n)
    runs: dict[str, Run] = {}
    for library in libraries:
        if library in {"gloo", "torch"}:
            table = _torch_runs(over_braid if library == "torch" else None, ordinary, group)
        elif library == "mpi":
            table = _mpi_runs(ordinary, group) if dtype in _MPI_DTYPES else {}
        elif library == "braid":
            table = _braid_runs(group, ordinary)
        else:
            shared = group.empty((numel,), dtype).zero_()
            table = _braid_runs(group, Buffers.of(shared, ordinary.out, n))
            del table["send_recv"], table["barrier"]  # no different for registered tensors
        if operation in table:
            runs[library] = table[operation]
    return runs


def _braid_runs(group: Group, b: Buffers) -> dict[str, Run]:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return {
        "all_reduce": lambda: group.all_reduce(b.x),
        "broadcast": lambda: group.broadcast(b.x, 0),
        "all_gather": lambda: group.all_gather(b.part, out=b.out),
        "reduce_scatter": lambda: group.reduce_scatter(b.x, out=b.small),
        "all_to_all": lambda: group.all_to_all(b.x, out=b.out),
        "send_recv": lambda: _once_around(
            group.rank, lambda: group.send(b.x, after), lambda: group.recv(b.out, before)
        ),
        "barrier": group.barrier,
    }


def _torch_runs(over: Any, b: Buffers, group: Group) -> dict[str, Run]:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return {
        "all_reduce": lambda: dist.all_reduce(b.x, group=over),
        "broadcast": lambda: dist.broadcast(b.x, 0, group=over),
        "all_gather": lambda: dist.all_gather_into_tensor(b.out, b.part, group=over),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(b.small, b.x, group=over),
        "all_to_all": lambda: dist.all_to_all_single(b.out, b.x, group=over),
        "send_recv": lambda: _once_around(
            group.rank,
            lambda: dist.send(b.x, after, group=over),
            lambda: dist.recv(b.out, before, group=over),
        ),
        "barrier": lambda: dist.barrier(group=over),
    }


def _mpi_runs(b: Buffers, group: Group) -> dict[str, Run]:
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    x, out, part, small = (tensor.numpy() for tensor in b)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return {
        "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, x),
        "broadcast": lambda: world.Bcast(x, 0),
        "all_gather": lambda: world.Allgather(part, out),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, small),
        "all_to_all": lambda: world.Alltoall(x, out),
        "send_recv": lambda: _once_around(
            group.rank, lambda: world.Send(x, after), lambda: world.Recv(out, before)
        ),
        "barrier": world.Barrier,
    }


def _once_around(rank: int, send: Run, recv: Run) -> None:
    """Send a message from rank 0 once around the ring."""
    for act in (send, recv) if rank == 0 else (recv, send):
        act()


_MPI_DTYPES = (
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
)
