"""Comparison of an optimizer's settings over ranks, by one reduction beside its gradients.

A program that calls `scheduler.step(loss)` with the loss of its rank gets another learning rate on
each rank, and the weights drift apart. Ranks that have called `hvd.join` add zeros to a reduction,
and other ranks may count their steps from another start. So each step adds up n, x and x * x of a
digest x: all digests are equal if the sum of n * x * x is the square of the sum of x.
"""

from __future__ import annotations

import warnings
import weakref
import zlib

import torch

from braid.compat.horovod.common.process_sets import ProcessSet
from braid.compat.horovod.torch.handles import Pending, synchronize
from braid.compat.horovod.torch.operations import allreduce_async
from braid.compat.horovod.torch.reductions import Sum
from braid.parallel.gradients.step_settings import ADVICE, settings_of

__all__ = ["SameSettings"]

NUM_DIGESTS = 1 << 16  # float64 adds the squares of 1,400 ranks exactly


class SameSettings:
    """Compares the settings of an optimizer.

    Args:
        optimizer: The optimizer, to which this object refers weakly.
        name: Name of the reduction.
        process_set: Ranks that take part.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, name: str, process_set: ProcessSet
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._name = name
        self._process_set = process_set
        self._has_warned = False
        self._pending: Pending | None = None

    def compare(self) -> None:
        """Start a comparison, a collective, and wait for the one of the step before.

        Ranks may wait for each other between the gradients of a step and the step, so a comparison
        is complete for certain only when the gradients of the next step are.

        Warns once, on all ranks, if settings differ.
        """
        optimizer, before = self._optimizer(), self._pending
        assert optimizer is not None  # it waits for its gradients
        self.forget()
        sums = [] if before is None else synchronize(before).tolist()
        settings = settings_of(optimizer)
        digest = float(zlib.crc32(repr(settings).encode()) % NUM_DIGESTS)
        terms = torch.tensor([1.0, digest, digest * digest], dtype=torch.float64)
        name, ranks = self._name, self._process_set
        self._pending = allreduce_async(terms, name=name, op=Sum, process_set=ranks)
        if not sums or self._has_warned or sums[0] * sums[2] == sums[1] * sums[1]:
            return
        self._has_warned = True
        here = "; ".join(str(dict(group)) for group in settings)
        text = (
            f"the optimizer steps with other settings on other ranks; rank {ranks.rank()} of the "
            f"process set has {here}\n{ADVICE}. Shown once"
        )
        warnings.warn(text, UserWarning, stacklevel=3)

    def forget(self) -> None:
        """Forget a comparison that the engine has not completed."""
        self._pending = None
