"""Refuses steps of an optimizer that the loop takes by itself, outside of an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from braid.errors import ConfigError

__all__ = ["UpdateGuard"]


class UpdateGuard:
    """Guard of one optimizer at a time."""

    def __init__(self) -> None:
        self._is_updating = False
        self._handle: RemovableHandle | None = None

    def watch(self, optimizer: Optimizer) -> None:
        """Guard this optimizer, and no other one."""
        self.close()
        self._handle = optimizer.register_step_pre_hook(self._refuse)

    def close(self) -> None:
        """Guard none."""
        if self._handle is not None:
            self._handle.remove()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Allow steps of the optimizer inside."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def _refuse(self, *_: object) -> None:
        if not self._is_updating:
            msg = (
                "optimizer.step() was called by the loop: training.step() calls it after the last "
                "micro-batch of a step; what else belongs to an update goes into update="
            )
            raise ConfigError(msg)
