"""All collectives of a group of one rank: the result is a copy of the input, on its device.

Nothing is copied through shared memory: CUDA tensors stay on their GPU, no thread waits for it, and
a CUDA graph can capture the operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm.channel.channel import Channel
from braid.comm.tensors.reduction import combine, identity
from braid.runtime.transport import Steps

__all__ = ["alone"]


def alone(
    ch: Channel,
    kind: str,
    outs: Sequence[torch.Tensor],
    ins: Sequence[torch.Tensor],
    op: str,
    scale: float | None,
    *,
    exclusive: bool = False,
) -> Steps:
    """Return the steps of a collective of one rank.

    Args:
        ch: Channel of the group.
        kind: Name of the collective.
        outs: One flat tensor for the result; none for a barrier.
        ins: The flat tensor that is read, if it is not the result itself; else empty.
        op: Reduction.
        scale: Factor for the result of a reduction.
        exclusive: Whether a scan leaves out the rank's own tensor.
    """
    yield from ch.publish_and_wait()
    if not outs or kind == "broadcast":
        return
    (out,) = outs
    source = ins[0] if ins else out
    if kind == "scan" and exclusive:
        out.copy_(identity(op, source))
    elif kind in {"all_reduce", "reduce_scatter"}:
        combine([source], out, op, scale)
    elif out.data_ptr() != source.data_ptr():
        out.copy_(source)
