"""Synchronous operations. Operations that return new tensors are differentiable.

Gradients are as in Horovod: the gradient of a reduction is reduced in the same way; gradients of
allgather and broadcast are averaged, as if the loss were the mean of all ranks' losses.

    y = allreduce(x, op, pre, post)   dx = allreduce(dy, op, pre, post)      Sum, Average, Adasum
    y = allgather(x)                  dx = rows of x in the average of dy
    y = broadcast(x, root)            dx = average of dy on the root, zeros elsewhere
    y = alltoall(x, splits)           dx = alltoall(dy, rows received)
    y = reducescatter(x, op)          dx = allgather(dy), times the number of ranks for Sum

All functions have the arguments of `allreduce`: `prescale_factor` and `postscale_factor` multiply
tensors before and after the reduction. `root_rank` is the global rank with the values to send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from braid.compat.horovod.common.exceptions import UnsupportedArgumentError
from braid.compat.horovod.common.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.torch import operations as under_way
from braid.compat.horovod.torch.arguments import CallArguments, refused_on_all
from braid.compat.horovod.torch.compression import Compression, Compressor
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.reductions import Adasum, Average, ReduceOp, Sum, chosen_op

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]

Tensors = Sequence[torch.Tensor]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks; see `allreduce_async`.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        average: Deprecated form of `op`: True for Average, False for Sum.
        name: Name that matches the operations of all ranks.
        compression: Format in which the tensor is sent.
        op: Reduction; Average when None.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after the reduction.
        process_set: Ranks that take part.
    """
    factors = (prescale_factor, postscale_factor)
    call = CallArguments(name, process_set, False, op, average, factors)
    (y,) = _reduced(_AllReduce, [tensor], compression, call)
    return y


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce `tensor` in place, like `allreduce`; not differentiable."""
    handle = under_way.allreduce_async_(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    )
    y: torch.Tensor = synchronize(handle)
    return y


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors together, like `allreduce`."""
    factors = (prescale_factor, postscale_factor)
    call = CallArguments(name, process_set, True, op, average, factors)
    return _reduced(_AllReduce, tensors, compression, call)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors together in place; not differentiable."""
    handle = under_way.grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    y: list[torch.Tensor] = synchronize(handle)
    return y


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the concatenated rows of all ranks; see `allgather_async`."""
    y: tuple[torch.Tensor]
    y = _AllGather.apply(CallArguments(name, process_set), tensor)  # type: ignore[no-untyped-call]
    return y[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather several tensors together, like `allgather`."""
    call = CallArguments(name, process_set, grouped=True)
    with refused_on_all("allgather", call):
        tensors = list(tensors)
    return list(_AllGather.apply(call, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor with the root's values; see `broadcast_async`."""
    y: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return y


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Broadcast into `tensor` in place; not differentiable."""
    y: torch.Tensor = synchronize(under_way.broadcast_async_(tensor, root_rank, name, process_set))
    return y


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to each rank, and return the rows from each rank; see `alltoall_async`.

    Returns:
        Received rows; with `splits` also the number of rows from each rank.
    """
    y, received = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return y if splits is None else (y, received)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce over the ranks and scatter the rows; see `reducescatter_async`."""
    factors = (prescale_factor, postscale_factor)
    call = CallArguments(name, process_set, False, op, factors=factors)
    (y,) = _reduced(_ReduceScatter, [tensor], compression, call)
    return y


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors together, like `reducescatter`."""
    factors = (prescale_factor, postscale_factor)
    call = CallArguments(name, process_set, True, op, factors=factors)
    return _reduced(_ReduceScatter, tensors, compression, call)


# Forward and backward.


def _reduced(
    reduction: type[_AllReduce | _ReduceScatter],
    tensors: Tensors,
    compression: type[Compressor],
    call: CallArguments,
) -> list[torch.Tensor]:
    """Return reduced tensors; they are sent in compressed form."""
    with refused_on_all(reduction.kind, call):
        chosen = call._replace(op=chosen_op(call.op, call.average), average=None)
        pairs = [compression.compress(tensor) for tensor in tensors]
    y = reduction.apply(chosen, *(x for x, _ in pairs))  # type: ignore[no-untyped-call]
    return [compression.decompress(x, ctx) for x, (_, ctx) in zip(y, pairs, strict=True)]


def _check_linear(op: ReduceOp) -> None:
    if op not in {Average, Sum, Adasum}:
        msg = f"{op.name} is not differentiable: use Average, Sum or Adasum, or detach the tensor"
        raise UnsupportedArgumentError(msg)


def _results(handle: Pending, call: CallArguments) -> tuple[torch.Tensor, ...]:
    results = synchronize(handle)
    return tuple(results) if call.grouped else (results,)


class _AllReduce(torch.autograd.Function):
    kind = "allreduce"

    @staticmethod
    def forward(ctx: Any, call: CallArguments, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return _results(under_way.start_allreduce(tensors, call), call)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _check_linear(ctx.call.op)
        contiguous = [grad.contiguous() for grad in grads]
        y = _AllReduce.apply(ctx.call._replace(name=None), *contiguous)  # type: ignore[no-untyped-call]
        return None, *y


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CallArguments, *tensors: torch.Tensor) -> Any:
        y = _results(under_way.start_by_rows("all_gather", tensors, call), call)
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], call.process_set
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return this rank's rows of the averaged gradients of the gathered tensors."""
        process_set = ctx.process_set
        contiguous = [grad.contiguous() for grad in grads]
        average = grouped_allreduce(contiguous, op=Average, process_set=process_set)
        table = allgather(torch.tensor([ctx.rows]), process_set=process_set)
        before = table[: process_set.rank()].sum(0).tolist()
        places = zip(average, before, ctx.rows, strict=True)
        return None, *(x.narrow(0, start, n) for x, start, n in places)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        ctx.how = root_rank, process_set
        return synchronize(under_way.broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        root_rank, process_set = ctx.how
        y = allreduce(grads[0].contiguous(), op=Average, process_set=process_set)
        is_root = process_set.rank() == process_set.ranks.index(root_rank)
        return (y if is_root else torch.zeros_like(y)), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: torch.Tensor | Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        y = synchronize(
            under_way.exchange_rows(tensor, splits, name, process_set, with_received=True)
        )
        ctx.received, ctx.process_set = y[1], process_set
        ctx.mark_non_differentiable(y[1])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, _ = alltoall(grads[0].contiguous(), splits=ctx.received, process_set=ctx.process_set)
        return y, None, None, None


class _ReduceScatter(torch.autograd.Function):
    kind = "reducescatter"

    @staticmethod
    def forward(ctx: Any, call: CallArguments, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        return _results(under_way.start_reducescatter(tensors, call), call)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, process_set = ctx.call.op, ctx.call.process_set
        _check_linear(op)
        factor = math.prod(ctx.call.factors) * (process_set.size() if op is Sum else 1)
        scaled = [grad.contiguous() * factor for grad in grads]
        return None, *grouped_allgather(scaled, process_set=process_set)
