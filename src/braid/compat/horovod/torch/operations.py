"""Horovod's collectives by name, synchronous and asynchronous.

Each has an asynchronous form, which returns a handle for `synchronize`. Synchronous forms can be
differentiated: they are in `differentiable`. Forms that end in `_` leave the result in the tensor
that they are given.

Names: ranks find each other's operations by `name`. Without one, operations are numbered, so that
ranks must start them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.compat.horovod.failure import translated
from braid.compat.horovod.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.session import Member
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.reductions import ReduceOp, chosen_op, engine_op
from braid.errors import ConfigError
from braid.fusion import Handle, Request, Result

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "join",
    "reducescatter_async",
    "sparse_allreduce_async",
]

Tensors = Sequence[torch.Tensor]
Wanted = tuple[Request, torch.Tensor | None, torch.Tensor | None]


def request(name: str, kind: str, tensor: torch.Tensor, **fields: Any) -> Request:
    """Return the request for a tensor.

    Raises:
        ConfigError: The tensor does not lie in memory as ordinary tensors do.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else str(tensor.layout)
        msg = (
            f"tensor {name!r} is a {what} one, which cannot be sent: use "
            "sparse_allreduce_async, or convert it (to_dense, dequantize)"
        )
        raise ConfigError(msg)
    return Request(
        name,
        kind,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.element_size(),
        device=str(tensor.device),
        **fields,
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce a tensor over the ranks; the result is a new one.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        average: Older form of `op`.
        name: Name of the operation; see the module.
        op: Reduction; Average when None. Averages of integers are cut off, and the sums behind them
            wrap around in their dtype.
        prescale_factor: Factor before the reduction: integers in 64-bit floats and cut off, 16-bit
            floats in 32 bits.
        postscale_factor: Factor after it, likewise.
        process_set: Ranks that take part.

    Raises:
        ConfigError: `op` and `average` are both passed; the name is in flight; or this rank is not
            in the set.
        HorovodInternalError: From `synchronize`: ranks pass different shapes, dtypes, reductions or
            factors.
    """
    return _reduce(
        [tensor],
        [torch.empty_like(tensor, requires_grad=False)],
        name,
        chosen_op(op, average),
        (prescale_factor, postscale_factor),
        process_set,
        grouped=False,
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce in the place of `tensor`, like `allreduce_async`."""
    return _reduce(
        [tensor],
        [tensor],
        name,
        chosen_op(op, average),
        (prescale_factor, postscale_factor),
        process_set,
        grouped=False,
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce several tensors together, like `allreduce_async`."""
    return _reduce(
        tensors,
        [torch.empty_like(tensor, requires_grad=False) for tensor in tensors],
        name,
        chosen_op(op, average),
        (prescale_factor, postscale_factor),
        process_set,
        grouped=True,
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce several tensors in their places, like `grouped_allreduce_async`."""
    return _reduce(
        tensors,
        tensors,
        name,
        chosen_op(op, average),
        (prescale_factor, postscale_factor),
        process_set,
        grouped=True,
    )


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Gather the rows of all ranks behind each other.

    Args:
        tensor: Tensor; each rank may have another number of rows (dim 0), the other dims are alike.
        name: Name of the operation; see the module.
        process_set: Ranks that take part.
    """
    return _each([tensor], "all_gather", name, process_set, grouped=False)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Gather several tensors, like `allgather_async`, when all ranks have submitted all of them."""
    return _each(tensors, "all_gather", name, process_set, grouped=True)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Reduce over the ranks and scatter the rows; the first ranks get one more if needed."""
    return _each(
        [tensor],
        "reduce_scatter",
        name,
        process_set,
        grouped=False,
        op=_reducing(op, tensor),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Reduce and scatter several tensors when all ranks have submitted all of them."""
    return _each(
        tensors,
        "reduce_scatter",
        name,
        process_set,
        grouped=True,
        op=_reducing(op, tensors[0]),
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Return a handle of the root's tensor, as a new one.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        root_rank: Global rank of the root.
        name: Name of the operation; see the module.
        process_set: Ranks that take part; the root is one of them.
    """
    return _broadcast(
        tensor, torch.empty_like(tensor, requires_grad=False), root_rank, name, process_set
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Broadcast in the place of `tensor`, like `broadcast_async`."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Send rows to each rank, and receive rows from each rank.

    Args:
        tensor: Rows for rank 0, then for rank 1, and so on.
        splits: Number of rows for each rank; equal when None, and then the result is the tensor
            alone.
        name: Name of the operation; see the module.
        process_set: Ranks that take part.

    Returns:
        A handle of (received rows, number of rows from each rank), or of received rows without
        `splits`.
    """
    member = process_set.member
    size = len(member.ranks)
    if splits is None:
        rows = tensor.shape[0] if tensor.dim() else -1
        if rows < 0 or rows % size:
            given_rows = "a scalar" if rows < 0 else f"{rows} rows"
            msg = f"{size} ranks cannot share {given_rows} equally: pass splits"
            raise ConfigError(msg)
        shares: tuple[int, ...] = (rows // size,) * size
    else:
        given = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
        shares = tuple(int(share) for share in given)
    wanted = request(member.name("alltoall", name), "all_to_all", tensor, splits=shares)
    (handle,) = _submit(member, [(wanted, tensor.detach(), None)])

    def finish(results: list[Result]) -> Any:
        (received,) = results
        assert isinstance(received, tuple)
        return received[0] if splits is None else received

    return Pending([handle], finish, tensor)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Sum or average a sparse tensor by gathering indices and values of all ranks."""
    wanted = chosen_op(op)
    if wanted not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        msg = f"op of a sparse tensor must be Average or Sum, got {wanted.name}"
        raise ConfigError(msg)
    whole = tensor.coalesce()
    size = len(process_set.member.ranks)
    indices = allgather_async(whole.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(whole.values(), f"{name}.values", process_set)

    def finish(_: list[Result]) -> torch.Tensor:
        where, what = synchronize(indices).t(), synchronize(values)
        what = what / size if wanted is ReduceOp.AVERAGE else what
        return torch.sparse_coo_tensor(where, what, tensor.shape).coalesce()

    return Pending([*indices.parts, *values.parts], finish, tensor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks have called this."""
    member = process_set.member
    name = member.name("barrier", None)
    (handle,) = _submit(member, [(Request(name, "barrier"), None, None)])
    Pending([handle], lambda _: None).wait()


def join(device: int = -1) -> int:
    """Stand in for reductions of other ranks until all have called this; return the last rank.

    A stand-in changes nothing: zeros in sums and averages, which are over all ranks; in others the
    number that is neutral to them.

    Args:
        device: Number of the GPU for stand-ins, where the others' tensors are on GPUs; the current
            one when negative.

    Raises:
        ConfigError: This rank has joined, and waits for others in another thread.
        HorovodInternalError: Another rank has failed or shut down.
    """
    engine = global_process_set.member.engine
    with translated():
        handle = engine.join(device if device >= 0 else None)
    received: int = Pending([handle], lambda results: results[0]).wait()
    return engine.group.ranks.index(received)


def _reducing(op: ReduceOp | None, tensor: torch.Tensor) -> str:
    wanted = chosen_op(op)
    if wanted is ReduceOp.ADASUM:
        msg = "reducescatter does not know Adasum: use another reduction"
        raise ConfigError(msg)
    return engine_op(wanted, tensor)


def _reduce(
    tensors: Tensors,
    outs: Tensors,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool,
) -> Pending:
    member = process_set.member
    base = member.name("allreduce", name)
    group = _group(base, tensors, grouped=grouped)
    wanted = []
    for number, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
        asked = request(
            f"{base}.{number}" if grouped else base,
            "all_reduce",
            tensor,
            op=engine_op(op, tensor),
            prescale=float(factors[0]),
            postscale=float(factors[1]),
            **group,
        )
        wanted.append((asked, *_places(tensor, out)))
    handles = _submit(member, wanted)
    results = list(outs)
    return Pending(handles, lambda _: results if grouped else results[0], (tensors, outs))


def _each(
    tensors: Tensors,
    kind: str,
    name: str | None,
    process_set: ProcessSet,
    *,
    grouped: bool,
    **fields: Any,
) -> Pending:
    """Submit operations whose results have other shapes."""
    member = process_set.member
    base = member.name(kind.replace("_", ""), name)
    fields |= _group(base, tensors, grouped=grouped)
    wanted = [
        (
            request(f"{base}.{number}" if grouped else base, kind, tensor, **fields),
            tensor.detach(),
            None,
        )
        for number, tensor in enumerate(tensors)
    ]
    handles = _submit(member, wanted)
    return Pending(handles, lambda received: received if grouped else received[0], tensors)


def _broadcast(
    tensor: torch.Tensor,
    out: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Pending:
    member = process_set.member
    if root_rank not in member.ranks:
        msg = f"root_rank must be one of the ranks {list(member.ranks)}, got {root_rank}"
        raise ConfigError(msg)
    root = member.ranks.index(root_rank)
    wanted = request(member.name("broadcast", name), "broadcast", tensor, root=root)
    (handle,) = _submit(member, [(wanted, *_places(tensor, out))])
    return Pending([handle], lambda _: out, (tensor, out))


def _submit(member: Member, wanted: Sequence[Wanted]) -> list[Handle]:
    with translated():
        return member.engine.submit_all(wanted)


def _places(tensor: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the place of the result; one object if they are one, to save a copy.

    Raises:
        ConfigError: Elements of the result would share memory.
    """
    given = tensor.detach()
    if out is not tensor:
        return given, out.detach()
    shared = not out.is_contiguous() and any(
        stride == 0 and n > 1 for stride, n in zip(out.stride(), out.shape, strict=True)
    )
    if shared:
        msg = (
            f"elements of an expanded tensor of shape {list(out.shape)} with strides "
            f"{out.stride()} "
            "share their memory, so an operation in place cannot use it: pass x.clone()"
        )
        raise ConfigError(msg)
    return given, given


def _group(base: str, tensors: Tensors, *, grouped: bool) -> dict[str, Any]:
    if grouped and not tensors:
        msg = "group of tensors is empty: pass at least one"
        raise ConfigError(msg)
    return {"group": base, "group_size": len(tensors)} if grouped else {}
