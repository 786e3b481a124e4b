"""Whether an optimizer has stepped on gradients of one rank alone, while they accumulate.

Problem: with an average in every k-th backward only, a step that comes after another one, as at the end of an epoch that is no multiple of k, makes
ranks different for ever, and nobody notices.

Idea: behind a backward that leaves its gradients local keep the smallest parameter that has one. If it has changed when the next forward begins,
somebody has stepped. Its version is looked at first, its numbers only if that has moved: weights that are exchanged for others and come back are
no step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from braid.params.table import ParamRecord

__all__ = ["LocalSteps"]


class _Kept(NamedTuple):
    record: ParamRecord
    version: int
    numbers: torch.Tensor


class LocalSteps:
    """Looks for steps between backwards that accumulate."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._was_said = False

    def note(self, records: Iterable[ParamRecord]) -> None:
        """A backward has left its gradients local."""
        own = [r for r in records if r.param.grad is not None and r.param.numel()]
        if own:
            record = min(own, key=lambda r: r.param.numel())
            numbers = record.param.detach().clone()
            self._kept = _Kept(record, record.param._version, numbers)  # noqa: SLF001 - torch documents no other name

    def forget(self) -> None:
        """They have been averaged, or shall stay local."""
        self._kept = None

    def check(self, passed: int, every: int) -> None:
        """Before the next forward: warn, once, if the parameter has changed.

        Args:
            passed: Backwards since the last average.
            every: At which of them averages come.
        """
        if self._kept is None:
            return
        record, version, numbers = self._kept
        param = record.param
        if param._version == version or torch.equal(param.detach(), numbers):  # noqa: SLF001 - as above
            return
        self._kept = None
        if self._was_said:
            return
        self._was_said = True
        warnings.warn(
            f"expected parameters to change after the backward that averages, the last of every={every}, found that {record.name!r} has changed after "
            f"number {passed}, whose gradients are this rank's alone: if that was an optimizer's step, ranks differ from now on. Step only after that "
            "backward, or call average_next() before one that shall average earlier, such as the last of an epoch. Said once; no_sync() says that "
            "it is meant",
            UserWarning,
            stacklevel=2,
        )
