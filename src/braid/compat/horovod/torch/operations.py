"""Horovod's collectives by name, synchronous and asynchronous.

Each has an asynchronous form, which returns a handle for `synchronize`. Synchronous forms are
differentiable, and are in `differentiable`. Forms that end in `_` work in place.

Names: operations of different ranks match by `name`. Operations without a name are numbered, so
that all ranks must start them in the same order.

All functions have the arguments of `allreduce_async`: `prescale_factor` and `postscale_factor`
multiply tensors before and after the reduction; `average` is the deprecated form of `op`.
`root_rank` is the global rank with the values to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.compat.horovod.common.exceptions import UnsupportedArgumentError, translated
from braid.compat.horovod.common.process_sets import ProcessSet, global_process_set
from braid.compat.horovod.fusion import FusionHandle, Request, Result
from braid.compat.horovod.session import session
from braid.compat.horovod.torch.arguments import (
    CallArguments,
    check_tensor,
    check_tensors,
    factor,
    refused_on_all,
    root_of,
    splits_of,
)
from braid.compat.horovod.torch.handles import Pending, PendingSparse, synchronize
from braid.compat.horovod.torch.reductions import ReduceOp, chosen_op, engine_op
from braid.errors import ConfigError
from braid.types import dtype_name

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


def request(name: str, kind: str, tensor: torch.Tensor, **fields: Any) -> Request:
    """Return the request of the operation `name` for a checked tensor, with further `fields`."""
    return Request(
        name,
        kind,
        dtype_name(tensor.dtype),
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
    """Reduce a tensor over the ranks into a new tensor.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        average: Deprecated form of `op`: True for Average, False for Sum.
        name: Name of the operation; see the module.
        op: Reduction; Average when None. Averages of integers are truncated, and their sums wrap
            around in the dtype.
        prescale_factor: Factor before the reduction. Integers are scaled in float64 and truncated,
            16-bit floats in float32.
        postscale_factor: Factor after the reduction, computed in the same way.
        process_set: Ranks that take part.

    Raises:
        ConfigError: `op` and `average` are both passed, the name is in flight, or this rank is not
            in the set.
        HorovodInternalError: From `synchronize`: shapes, dtypes, reductions or factors differ
            between ranks.
    """
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, False, op, average, factors)
    return start_allreduce([tensor], call)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce `tensor` in place, like `allreduce_async`."""
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, False, op, average, factors)
    return start_allreduce([tensor], call, in_place=True)


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
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, True, op, average, factors)
    return start_allreduce(tensors, call)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Reduce several tensors together in place, like `grouped_allreduce_async`."""
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, True, op, average, factors)
    return start_allreduce(tensors, call, in_place=True)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Concatenate the rows of all ranks.

    Args:
        tensor: Tensor; ranks may have different numbers of rows (dim 0), the other dims are equal.
        name: Name of the operation; see the module.
        process_set: Ranks that take part.
    """
    return start_by_rows("all_gather", [tensor], CallArguments(name, process_set))


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """Gather several tensors together, like `allgather_async`."""
    return start_by_rows("all_gather", tensors, CallArguments(name, process_set, grouped=True))


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Reduce over the ranks and scatter the rows; the first ranks may get one row more."""
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, False, op, factors=factors)
    return start_reducescatter([tensor], call)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """Reduce and scatter several tensors together, like `reducescatter_async`."""
    factors = prescale_factor, postscale_factor
    call = CallArguments(name, process_set, True, op, factors=factors)
    return start_reducescatter(tensors, call)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Broadcast the root's tensor into a new tensor.

    Args:
        tensor: Tensor of the same shape and dtype on all ranks.
        root_rank: Global rank of the root.
        name: Name of the operation; see the module.
        process_set: Ranks that take part; the root is one of them.
    """
    return _broadcast(tensor, root_rank, CallArguments(name, process_set))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Broadcast into `tensor` in place, like `broadcast_async`."""
    return _broadcast(tensor, root_rank, CallArguments(name, process_set), in_place=True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """Send rows to each rank, and receive rows from each rank.

    Args:
        tensor: Rows for rank 0, then for rank 1, and so on.
        splits: Number of rows for each rank; equal when None, and then the result is only the
            received rows.
        name: Name of the operation; see the module.
        process_set: Ranks that take part.

    Returns:
        A handle of (received rows, number of rows from each rank), or of received rows without
        `splits`.

    Raises:
        ConfigError: `splits` are not integers, not one for each rank, or do not add up to the rows
            of `tensor`.
    """
    return exchange_rows(tensor, splits, name, process_set, with_received=splits is not None)


def exchange_rows(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    with_received: bool,
) -> Pending:
    """Start an alltoall; `with_received` adds the number of rows from each rank to the result."""
    call = CallArguments(name, process_set)
    with refused_on_all("alltoall", call):
        check_tensor(tensor)
        shares = splits_of(tensor, splits, len(process_set.member.ranks))
        plain = _plain(tensor)
    handles = _submit("all_to_all", [(plain, None)], call, splits=shares)

    def finish(results: list[Result]) -> Any:
        (received,) = results
        assert isinstance(received, tuple)
        return received if with_received else received[0]

    return Pending(handles, finish, tensor)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> PendingSparse:
    """Sum or average a sparse tensor by gathering indices and values of all ranks.

    Returns:
        A handle for `synchronize` that can also be called: both return the sparse tensor.

    Raises:
        ConfigError: The tensor is not sparse, or `op` is not Average or Sum.
    """
    calls = [CallArguments(f"{name}.{part}", process_set) for part in ("indices", "values")]
    with refused_on_all("allgather", calls[0]), refused_on_all("allgather", calls[1]):
        wanted = chosen_op(op)
        if wanted not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
            msg = f"op of a sparse tensor must be Average or Sum, got {wanted.name}"
            raise UnsupportedArgumentError(msg)
        what = getattr(tensor, "layout", type(tensor).__name__)
        if what is not torch.sparse_coo:
            msg = f"sparse_allreduce_async works on sparse COO tensors, got {what}: use allreduce"
            raise ConfigError(msg)
        whole = tensor.coalesce()
    size = len(process_set.member.ranks)
    rows = whole.indices().t().contiguous()
    shape = f"shape {list(tensor.shape)}"  # ranks compare it: indices must be valid on all ranks
    indices = start_by_rows("all_gather", [rows], calls[0], text=shape)
    values = start_by_rows("all_gather", [whole.values()], calls[1])

    def finish(_: list[Result]) -> torch.Tensor:
        where, rows = synchronize(indices).t(), synchronize(values)
        rows = rows / size if wanted is ReduceOp.AVERAGE else rows
        return torch.sparse_coo_tensor(where, rows, tensor.shape, check_invariants=False).coalesce()

    return PendingSparse([*indices.parts, *values.parts], finish, tensor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks have called this."""
    member = process_set.member
    name = member.name("barrier", None)
    with translated():
        handle = member.engine.submit(Request(name, "barrier"), None)
    Pending([handle], lambda _: None).wait()


def join(device: int = -1) -> int:
    """Take part in other ranks' reductions with neutral values until all ranks have joined.

    The values are zeros for sums and averages, which are over all ranks, and the neutral element
    for other reductions.

    Args:
        device: Number of the GPU for the neutral tensors if tensors are on GPUs; the current GPU
            when negative.

    Returns:
        The rank that joined last.

    Raises:
        ConfigError: Another thread of this rank has called `join`, and waits.
        HorovodInternalError: Another rank has failed or shut down.
    """
    engine = global_process_set.member.engine
    _check_device(device)
    with translated():
        handle = engine.join(device if device >= 0 else None)
    received: int = Pending([handle], lambda results: results[0]).wait()
    session().num_joins += 1
    return engine.group.ranks.index(received)


def _check_device(device: Any) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1 << 15
    if not isinstance(device, int) or device >= num_gpus:
        msg = f"device must be the number of a GPU or -1, got {device!r}"
        raise ConfigError(msg)


def start_allreduce(tensors: Tensors, call: CallArguments, *, in_place: bool = False) -> Pending:
    """Start an allreduce of one tensor, or of a group."""
    with refused_on_all("allreduce", call):
        check_tensors(tensors)
        fields = _reducing(chosen_op(call.op, call.average), tensors, call.factors)
        outs = tensors if in_place else [_empty_like(tensor) for tensor in tensors]
        places = [_places(*pair) for pair in zip(tensors, outs, strict=True)]
    handles = _submit("all_reduce", places, call, **fields)
    results = list(outs)
    return Pending(handles, lambda _: results if call.grouped else results[0], (tensors, outs))


def start_reducescatter(tensors: Tensors, call: CallArguments) -> Pending:
    """Start a reducescatter of one tensor, or of a group."""
    with refused_on_all("reducescatter", call):
        check_tensors(tensors)
        wanted = chosen_op(call.op)
        if wanted is ReduceOp.ADASUM:
            msg = "reducescatter does not support Adasum: use op=hvd.Average or op=hvd.Sum"
            raise UnsupportedArgumentError(msg)
        fields = _reducing(wanted, tensors, call.factors)
    return start_by_rows("reduce_scatter", tensors, call, **fields)


def start_by_rows(kind: str, tensors: Tensors, call: CallArguments, **fields: Any) -> Pending:
    """Start an operation that changes the number of rows, for one tensor or a group."""
    with refused_on_all(kind.replace("_", ""), call):
        check_tensors(tensors)
        places = [(_plain(tensor), None) for tensor in tensors]
    handles = _submit(kind, places, call, **fields)
    return Pending(handles, lambda received: received if call.grouped else received[0], tensors)


def _broadcast(
    tensor: torch.Tensor, root_rank: int, call: CallArguments, *, in_place: bool = False
) -> Pending:
    with refused_on_all("broadcast", call):
        check_tensor(tensor)
        root = root_of(root_rank, call.process_set)
        out = tensor if in_place else _empty_like(tensor)
        places = _places(tensor, out)
    handles = _submit("broadcast", [places], call, root=root)
    return Pending(handles, lambda _: out, (tensor, out))


def _submit(
    kind: str,
    places: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    call: CallArguments,
    **fields: Any,
) -> list[FusionHandle]:
    """Submit operations of one kind, each with its tensor and the memory for its result."""
    member = call.process_set.member
    base = member.name(kind.replace("_", ""), call.name)
    names = [base]
    if call.grouped:
        names = [f"{base}.{number}" for number in range(len(places))]
        fields |= {"group": base, "group_size": len(places)}
    wanted = [
        (request(name, kind, tensor, **fields), tensor, out)
        for name, (tensor, out) in zip(names, places, strict=True)
    ]
    with translated():
        return member.engine.submit_all(wanted)


def _reducing(op: ReduceOp, tensors: Tensors, factors: tuple[Any, Any]) -> dict[str, Any]:
    """Return the fields of requests for a reduction."""
    names = [engine_op(op, tensor) for tensor in tensors]
    return {
        "op": names[0],
        "prescale": factor(factors[0], "prescale_factor"),
        "postscale": factor(factors[1], "postscale_factor"),
    }


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, requires_grad=False)


def _places(tensor: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the memory of the result; the same object for an operation in place.

    Raises:
        ConfigError: The result is an expanded tensor or a conjugated view.
    """
    plain = tensor.detach()
    if out is not tensor:
        return plain, out.detach()
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
    if out.is_conj() or out.is_neg():
        msg = (
            f"tensor of shape {list(out.shape)} is a conjugated view, so an operation in place "
            "cannot use it: pass x.resolve_conj().resolve_neg()"
        )
        raise ConfigError(msg)
    return plain, plain


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with conjugation and negation applied to its memory."""
    return tensor.detach().resolve_conj().resolve_neg()
