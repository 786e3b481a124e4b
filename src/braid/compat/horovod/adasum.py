"""Adasum as an operation of the negotiated engine.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021; see
`braid.parallel.data_parallel.hooks.adasum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Group
from braid.compat.horovod.fusion.activities import Activities
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.compat.horovod.fusion.entry import Result, TensorTableEntry
from braid.compat.horovod.fusion.operations import scale
from braid.errors import ConfigError
from braid.parallel.data_parallel import adasum

__all__ = ["AdasumReduce"]


class AdasumReduce:
    """Adasum of a batch, tensor by tensor, since each has a direction of its own."""

    name = "adasum"
    kind = "all_reduce"

    def __init__(self, group: Group, activities: Activities) -> None:
        self._group = group
        self._activities = activities

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the request asks for Adasum."""
        return batch.request.op == "adasum"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:
        """Reduce all tensors of the batch in the same messages."""
        outs = []
        for entry in entries:
            if entry.tensor is None:
                msg = f"Adasum of {entry.request.name!r} has no tensor"
                raise ConfigError(msg)
            out = torch.empty_like(entry.tensor) if entry.out is None else entry.out
            if out is not entry.tensor:
                out.copy_(entry.tensor)
            scale(out, batch.request.prescale)
            outs.append(out)
        with self._activities.span("transfer", batch.nbytes):
            adasum(outs, self._group)
        for out in outs:
            scale(out, batch.request.postscale)
        return list(outs)
