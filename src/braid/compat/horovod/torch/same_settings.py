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
from contextlib import suppress

import torch

from braid.compat.horovod.common.exceptions import HorovodInternalError
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
        self._number = 0
        self._pending: list[Pending] = []  # of this step, and of the one before

    def start(self) -> None:
        """Start a comparison of the settings at this moment; a collective."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it waits for its gradients
        digest = float(zlib.crc32(repr(settings_of(optimizer)).encode()) % NUM_DIGESTS)
        terms = torch.tensor([1.0, digest, digest * digest], dtype=torch.float64)
        self._number = 1 - self._number  # the last comparison may be in flight
        name, ranks = f"{self._name}.{self._number}", self._process_set
        with suppress(HorovodInternalError):  # a rank has shut down after its last step
            self._pending.append(allreduce_async(terms, name=name, op=Sum, process_set=ranks))

    def finish(self) -> None:
        """Wait for the comparison of the step before; called when gradients have been reduced.

        Ranks may wait for each other between the gradients of a step and the step, so a comparison
        is complete for certain only when the gradients of the next step are.

        Warns once, on all ranks, if settings differ.
        """
        optimizer = self._optimizer()
        if len(self._pending) < 2 or optimizer is None:
            return
        try:
            num_ranks, total, squares = synchronize(self._pending.pop(0)).tolist()
        except HorovodInternalError:
            return  # as above
        if self._has_warned or num_ranks * squares == total * total:
            return
        self._has_warned = True
        here = "; ".join(str(dict(group)) for group in settings_of(optimizer))
        text = (
            f"the optimizer steps with other settings on other ranks; rank "
            f"{self._process_set.rank()} of the process set has {here}\n{ADVICE}. Shown once"
        )
        warnings.warn(text, UserWarning, stacklevel=3)

    def forget(self) -> None:
        """Forget comparisons of an engine that has ended."""
        self._pending.clear()
        self._number = 0
