"""Comparison of an optimizer's settings over ranks, by a reduction beside its gradients.

A program that calls `scheduler.step(loss)` with the loss of its rank gets another learning rate on
each rank, and the weights drift apart. So every `EVERY` steps, ranks add up n = 1, x and x * x of a
digest x: all digests are equal if n times the sum of x * x is the square of the sum of x. Ranks
that have called `hvd.join` add zeros, which changes nothing.

Cost: in every `EVERY`-th step, a reduction of 24 bytes.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from contextlib import suppress

import torch

from braid.compat.horovod.common.exceptions import HorovodInternalError
from braid.compat.horovod.common.process_sets import ProcessSet
from braid.compat.horovod.session import session
from braid.compat.horovod.torch.handles import Pending, poll, synchronize
from braid.compat.horovod.torch.operations import allreduce_async
from braid.compat.horovod.torch.reductions import Sum
from braid.parallel.gradients.step_settings import ADVICE, EVERY, settings_of

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
        self._num_steps = self._num_joins = 0  # steps since ranks have begun or joined together
        self._pending: Pending | None = None

    def start(self) -> None:
        """Start a comparison of the settings at this moment if it is due; a collective."""
        optimizer, num_joins = self._optimizer(), session().num_joins
        assert optimizer is not None  # it waits for its gradients
        if num_joins != self._num_joins:
            self.forget()
            self._num_joins = num_joins
        self._num_steps += 1
        if self._num_steps % EVERY or self._pending is not None:
            return
        digest = float(zlib.crc32(repr(settings_of(optimizer)).encode()) % NUM_DIGESTS)
        terms = torch.tensor([1.0, digest, digest * digest], dtype=torch.float64)
        name, ranks = self._name, self._process_set
        with suppress(HorovodInternalError):  # a rank has shut down after its last step
            self._pending = allreduce_async(terms, name=name, op=Sum, process_set=ranks)

    def finish(self) -> None:
        """Read the result of a comparison if there is one; it may come during the next step.

        Ranks may wait for each other between the gradients of a step and the step.

        Warns once, on all ranks, if settings differ.
        """
        optimizer, pending = self._optimizer(), self._pending
        if pending is None or optimizer is None or not poll(pending):
            return
        self._pending = None
        try:
            num_ranks, total, squares = synchronize(pending).tolist()
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
        """Begin again, as all ranks do when their engine has ended or all ranks have joined."""
        self._pending = None
        self._num_steps = 0
