"""Detection of optimizer steps that use accumulated gradients of one rank alone.

Problem: with an average in every k-th backward only, a step after another backward, as at the end
of an epoch whose length is no multiple of k, makes ranks different for ever, and nobody notices.

Idea: behind a backward that leaves its gradients local, remember the smallest parameter that has
one. If it has changed when the next forward begins, somebody has stepped. Its version is compared
first, its values only if that has moved: weights that are swapped and come back are no step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from braid.parallel.gradients.table import ParamRecord
from braid.runtime.torch_internals import version_of

__all__ = ["LocalSteps"]


class _Copy(NamedTuple):
    record: ParamRecord
    version: int
    values: torch.Tensor


class LocalSteps:
    """Warns of steps between backwards that accumulate."""

    def __init__(self) -> None:
        self._copy: _Copy | None = None
        self._warned = False

    def remember(self, records: Iterable[ParamRecord]) -> None:
        """Copy a parameter: a backward has left its gradients local."""
        own = [r for r in records if r.param.grad is not None and r.param.numel()]
        if own:
            record = min(own, key=lambda r: r.param.numel())
            values = record.param.detach().clone()
            # torch has no public name for it
            self._copy = _Copy(record, version_of(record.param), values)

    def forget(self) -> None:
        """Drop the copy: gradients have been averaged, or shall stay local."""
        self._copy = None

    def check(self, num_accumulated: int, num_steps: int) -> None:
        """Warn, once, if the copied parameter has changed; called before the next forward.

        Args:
            num_accumulated: Number of backwards since the last average.
            num_steps: Number of backwards from average to average.
        """
        if self._copy is None:
            return
        record, version, values = self._copy
        param = record.param
        if version_of(param) == version or torch.equal(param.detach(), values):
            return
        self._copy = None
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"parameter {record.name!r} changed after backward {num_accumulated} of "
            f"gradient_accumulation_steps={num_steps}, whose gradients are those of this rank "
            "alone. If that was an optimizer's step, ranks differ from now on: step only after the "
            "backward that averages, or call average_next() before one that shall average "
            "earlier, such as the last of an epoch. Said once; no_sync() says that it is meant",
            UserWarning,
            stacklevel=2,
        )
