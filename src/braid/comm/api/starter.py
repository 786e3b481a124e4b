"""Operations that are started without a thread and waited for later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from braid.comm.api.face import Face
from braid.comm.api.movements import Movements
from braid.comm.api.point_to_point import PointToPoint
from braid.comm.api.reductions import Reductions
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import Work

__all__ = ["Starter"]


class Starter(Reductions, Movements, PointToPoint):
    """The operations of a group, each of which returns a Work at once; made by `Group.starting`.

    Args:
        group: The group.
        start: Starts a collective.
    """

    def __init__(self, group: Face, start: Callable[[Collective], Work]) -> None:
        self.rank = group.rank
        self.size = group.size
        self.devices = group.devices
        self._group = group
        self._start = start

    def _submit(self, collective: Collective) -> Any:
        collective.async_op = True
        return self._start(collective)

    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        return self._group._device_types(x)  # noqa: SLF001 - another face of the same group
