"""Adasum of parameter changes: each rank takes a local step, and the changes are combined.

Optimizers with momentum or normalization change parameters by another amount than the gradient; so
Adasum must combine these changes instead of gradients.

    before = p;  step();  change = p - before;  p = before + Adasum(changes of all ranks)

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from braid.compat.horovod.common.process_sets import ProcessSet
from braid.compat.horovod.torch.compression import Compressor
from braid.compat.horovod.torch.handles import synchronize
from braid.compat.horovod.torch.operations import allreduce_async_
from braid.compat.horovod.torch.reductions import Adasum
from braid.errors import below, raise_all

__all__ = ["AdasumSteps"]


class AdasumSteps:
    """Takes local steps of one optimizer, and combines their changes over the ranks.

    Args:
        names: Names of the optimizer's parameters.
        compression: Format in which changes are sent.
        passes: Number of backwards before each step; without effect, since gradients stay local.
        process_set: Ranks that take part.

    Attributes:
        names: Names of the optimizer's parameters.
        process_set: Ranks that take part.
        op: Adasum.
    """

    op = Adasum

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        compression: type[Compressor],
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        raise_all(below(1, backward_passes_per_step=passes))
        self.names = names
        self._compression = compression
        self.process_set = process_set

    def run(self, step: Callable[[], Any]) -> None:
        """Take a step, and add the Adasum of all ranks' changes to the old parameters."""
        if not self.process_set.included():
            step()
            return
        required = [param for param in self.names if param.requires_grad]
        with torch.no_grad():
            before = [param.detach().clone() for param in required]
        step()
        with torch.no_grad():
            pending = []
            for param, old in zip(required, before, strict=True):
                small, ctx = self._compression.compress(param.detach() - old)
                name = f"change.{self.names[param]}"
                handle = allreduce_async_(small, None, name, Adasum, process_set=self.process_set)
                pending.append((handle, ctx))
            for param, old, (handle, ctx) in zip(required, before, pending, strict=True):
                change = self._compression.decompress(synchronize(handle), ctx)
                param.copy_(old.add_(change))
