"""Each collective in terms of the operations of a c10d backend, as generators of torch's works.

Backends have no avg (Gloo), no scan, no parts of different sizes, and few dtypes. These are
composed from other operations: data is moved as bytes, an average is a sum and a division, ragged
parts are messages between ranks, a scan is a gather and a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import distributed_c10d

from braid.comm.algorithms.sizes import offsets_of
from braid.comm.engines.collective import Collective
from braid.comm.tensors.reduction import combine, finish, identity
from braid.runtime.torch_internals import source_rank

__all__ = ["TorchSteps", "steps_of"]

c10d: Any = distributed_c10d  # torch's stubs are incomplete

TorchSteps = Generator[Any, None, None]
RAGGED_TAG = 1 << 20  # tag of messages with ragged parts


def steps_of(group: Any, c: Collective) -> TorchSteps:
    """Return a generator of the works by which torch's backend `group` runs `c`, in order."""
    return _STEPS[c.kind](group, c)


def _barrier(group: Any, _c: Collective) -> TorchSteps:
    yield group.barrier()


def _all_reduce(group: Any, c: Collective) -> TorchSteps:
    if c.outs[0].is_complex() and c.op == "product":  # not a product of pairs
        rows = [torch.empty_like(c.outs[0]) for _ in range(group.size())]
        yield from _all_gather(group, replace(c, outs=tuple(rows)))
        combine(rows, c.outs[0], c.op, None)
        return
    x = _numbers(c.outs[0])
    options = c10d.AllreduceOptions()
    options.reduceOp = _OPS[c.op]
    yield group.allreduce([x], options)
    _back(x, c.outs[0])
    finish(c.outs[0], c.op, group.size(), None)


def _reduce(group: Any, c: Collective) -> TorchSteps:
    x = c.ins[0].clone()  # backends overwrite it
    yield from _reduce_to(group, x, c.op, c.peer)
    if group.rank() == c.peer:
        c.outs[0].copy_(x)
        finish(c.outs[0], c.op, group.size(), None)


def _reduce_to(group: Any, x: torch.Tensor, op: str, root: int) -> TorchSteps:
    numbers = _numbers(x)
    options = c10d.ReduceOptions()
    options.reduceOp = _OPS[op]
    options.rootRank = root
    yield group.reduce([numbers], options)
    _back(numbers, x)


def _reduce_scatter(group: Any, c: Collective) -> TorchSteps:
    out, x = c.outs[0], c.ins[0]
    widths = c.part_widths or (out.numel(),) * group.size()
    for root, (low, high) in enumerate(_bounds(widths)):
        part = x[low:high].clone()
        yield from _reduce_to(group, part, c.op, root)
        if root == group.rank():
            out.copy_(part)
    finish(out, c.op, group.size(), None)


def _scan(group: Any, c: Collective) -> TorchSteps:
    x, rank = c.ins[0], group.rank()
    rows = [torch.empty_like(x) for _ in range(group.size())]
    yield group.allgather([[_bytes(row) for row in rows]], [_bytes(x)])
    before = rows[: rank if c.exclusive else rank + 1]
    if before:
        combine(before, c.outs[0], c.op, None)
    else:
        c.outs[0].copy_(identity(c.op, x))


def _broadcast(group: Any, c: Collective) -> TorchSteps:
    yield from _broadcast_from(group, c.outs[0], c.peer)


def _broadcast_from(group: Any, x: torch.Tensor, root: int) -> TorchSteps:
    options = c10d.BroadcastOptions()
    options.rootRank = root
    yield group.broadcast([_bytes(x)], options)


def _all_gather(group: Any, c: Collective) -> TorchSteps:
    x, outs = c.ins[0], c.outs
    if c.part_widths is None:
        yield group.allgather([[_bytes(out) for out in outs]], [_bytes(x)])
        return
    outs[group.rank()].copy_(x)
    for root, out in enumerate(outs):
        if out.numel():
            yield from _broadcast_from(group, out, root)


def _gather(group: Any, c: Collective) -> TorchSteps:
    x, root, rank = c.ins[0], c.peer, group.rank()
    sizes = yield from _sizes(group, x.numel() if rank != root else 0, x.device)
    if rank != root:
        if x.numel():
            yield group.send([_bytes(x)], root, RAGGED_TAG)
        return
    c.outs[root].copy_(x)
    for peer, numel in enumerate(sizes):
        if peer != root and numel:
            yield group.recv([_bytes(_fitting(c.outs[peer], numel, peer))], peer, RAGGED_TAG)


def _scatter(group: Any, c: Collective) -> TorchSteps:
    out, root = c.outs[0], c.peer
    sizes = yield from _sizes(group, out.numel(), out.device)
    if group.rank() != root:
        if out.numel():
            yield group.recv([_bytes(out)], root, RAGGED_TAG)
        return
    for peer, (low, high) in enumerate(_bounds(c.part_widths or ())):
        part = _fitting(c.ins[0][low:high], sizes[peer], peer)
        if peer == root:
            out.copy_(part)
        elif part.numel():
            yield group.send([_bytes(part)], peer, RAGGED_TAG)


def _all_to_all(group: Any, c: Collective) -> TorchSteps:
    x, outs = c.ins[0], c.outs
    received = [out.numel() * out.element_size() for out in outs]
    widths = c.part_widths or (x.numel() // group.size(),) * group.size()
    sent = [width * x.element_size() for width in widths]
    flat = torch.empty(sum(received), dtype=torch.uint8, device=x.device)
    yield group.alltoall_base(flat, _bytes(x), received, sent)
    for (low, high), out in zip(_bounds(received), outs, strict=True):
        _bytes(out).copy_(flat[low:high])


def _send(group: Any, c: Collective) -> TorchSteps:
    yield group.send([_bytes(c.ins[0])], c.peer, c.tag)


def _recv(group: Any, c: Collective) -> TorchSteps:
    x = _bytes(c.outs[0])
    if c.peer >= 0:
        yield group.recv([x], c.peer, c.tag)
        return
    work = group.recv_anysource([x], c.tag)
    yield work
    if c.source is not None:
        c.source.append(source_rank(work))


_STEPS: dict[str, Callable[[Any, Collective], TorchSteps]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _recv,
}
_OPS = {
    "sum": c10d.ReduceOp.SUM,
    "avg": c10d.ReduceOp.SUM,
    "product": c10d.ReduceOp.PRODUCT,
    "min": c10d.ReduceOp.MIN,
    "max": c10d.ReduceOp.MAX,
    "band": c10d.ReduceOp.BAND,
    "bor": c10d.ReduceOp.BOR,
    "bxor": c10d.ReduceOp.BXOR,
}


def _sizes(group: Any, mine: int, device: torch.device) -> Generator[Any, None, list[int]]:
    """Gather the sizes of all members."""
    size_here = torch.tensor([mine], device=device)
    rows = [torch.empty_like(size_here) for _ in range(group.size())]
    yield group.allgather([rows], [size_here])
    return [int(row) for row in rows]


def _fitting(x: torch.Tensor, numel: int, peer: int) -> torch.Tensor:
    if x.numel() != numel:
        msg = (
            f"group rank {peer} passed a tensor of {numel} elements, but this rank passed "
            f"{x.numel()}: pass tensors of one size on all ranks"
        )
        raise ValueError(msg)
    return x


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in a dtype that backends can add.

    16-bit integers and bool are widened; complex numbers become pairs of real numbers.
    """
    if x.is_complex():
        return torch.view_as_real(x)
    if x.dtype in {torch.int16, torch.bool}:
        return x.to(torch.int32)
    return x


def _back(numbers: torch.Tensor, x: torch.Tensor) -> None:
    if not x.is_complex() and numbers.data_ptr() != x.data_ptr():
        x.copy_(numbers)


def _bounds(widths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(offsets_of(widths)))
