"""Runs a collective with a program of `schedule.collective` that the caller names.

The engine's built-in algorithms work on the caller's tensors; a program works on one flat buffer
with the parts of all members. This module makes that buffer, runs the program and copies the
results out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm.algorithms.programs import Programs, program_steps
from braid.comm.channel.channel import Channel
from braid.comm.engines.collective import Collective
from braid.comm.tensors.reduction import early_factor
from braid.runtime.transport import Steps

__all__ = ["by_program"]


def by_program(ch: Channel, programs: Programs, c: Collective, scale: float | None) -> Steps:
    """Run the algorithm `c.algorithm` on a buffer with the parts of all members.

    Sums are in the program's order; parts must be equal.
    """
    kind, me, x, outs = c.kind, ch.rank, c.ins[0], c.outs
    parts: Sequence[torch.Tensor] = ()
    if kind in {"all_reduce", "broadcast"}:
        buffer = outs[0]
    elif kind in {"all_gather", "gather"}:
        buffer = x.new_empty(ch.size * x.numel())
        parts = torch.split(buffer, [x.numel()] * ch.size)
        parts[me].copy_(x)
    elif kind == "scatter":
        width = outs[0].numel()
        buffer = x if me == c.peer else outs[0].new_empty(ch.size * width)
    elif kind == "all_to_all":
        buffer = torch.cat([x, x])
        parts = torch.split(buffer[x.numel() :], [out.numel() for out in outs])
    else:  # the input must not change
        buffer = x.clone()
    op, factor = c.op, early_factor(buffer.dtype, c.op, scale, ch.size)
    if factor is not None:
        buffer.mul_(factor)
        op, scale = "sum", None
    root, name = max(0, c.peer), c.algorithm or ""
    yield from program_steps(ch, programs, name, kind, buffer, op=op, scale=scale, root=root)
    if kind == "reduce" and me == c.peer:
        outs[0].copy_(buffer)
    elif kind in {"reduce_scatter", "scatter"}:
        width = outs[0].numel()
        outs[0].copy_(buffer[me * width : (me + 1) * width])
    for out, part in zip(outs, parts, strict=False):
        out.copy_(part)
