"""Detection of optimizer steps that use accumulated gradients of one rank alone.

Problem: if only every k-th backward averages, a step after another backward makes ranks differ
permanently, without an error; for example at the end of an epoch with a length that is not a
multiple of k.

Idea: after a backward with local gradients, copy the smallest parameter that has a gradient. If it
has changed when the next forward begins, an optimizer has stepped. Its version is compared first,
and its values only if the version has changed: weights that are swapped and restored are not a
step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from braid.parallel.gradients.table import ParamRecord
from braid.runtime.torch_internals import version_of

__all__ = ["LocalSteps"]


class LocalSteps:
    """Check that warns if the optimizer steps while gradients are still local to the rank."""

    def __init__(self) -> None:
        self._copy: tuple[ParamRecord, int, torch.Tensor] | None = None  # with its version
        self._warned = False

    def remember(self, records: Iterable[ParamRecord]) -> None:
        """Copy a parameter, to detect a step; called after a backward that left gradients local."""
        candidates = [r for r in records if r.param.grad is not None and r.param.numel()]
        if candidates:
            record = min(candidates, key=lambda r: r.param.numel())
            values = record.param.detach().clone()
            self._copy = record, version_of(record.param), values

    def forget(self) -> None:
        """Drop the copy; called after an averaging, and if gradients stay local on purpose."""
        self._copy = None

    def check(self, num_accumulated: int, num_steps: int) -> None:
        """Warn, once, if the optimizer has stepped between two averages: a parameter has changed.

        Args:
            num_accumulated: Number of backwards since the last average.
            num_steps: Number of backwards per average.
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
            f"gradient_accumulation_steps={num_steps}, with gradients of this rank alone. Ranks "
            "differ if an optimizer changed it: step only after the last backward, or call "
            "average_next() before an earlier one, such as the last of an epoch. Shown once; "
            "no_sync() turns this warning off",
            UserWarning,
            stacklevel=2,
        )
