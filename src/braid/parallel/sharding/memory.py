"""Bytes that a sharded training holds on this rank, counted from its tensors.

Formulas of `layouts.Bytes` are compared with these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from braid.parallel.sharding.engine import Sharding

__all__ = ["LiveBytes", "live_bytes", "memory_of"]


class LiveBytes(NamedTuple):
    """Bytes on one rank.

    Attributes:
        parameters: Bytes of parameters, as they are kept between uses, with the optimizer's own
            ones if these have another dtype.
        gradients: Bytes of gradients, as backward leaves them.
        states: Bytes of the optimizer's states.
        slots: Bytes of memory in which units are whole for a time, with their gradients.
    """

    parameters: int
    gradients: int
    states: int
    slots: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return sum(self)


def live_bytes(sharding: Sharding, optimizer: torch.optim.Optimizer) -> LiveBytes:
    """Count the bytes that this rank holds for a model and its optimizer."""
    parameters, gradients, slots = memory_of(sharding)
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return LiveBytes(
        parameters=_nbytes(parameters),
        gradients=_nbytes(gradients),
        states=_nbytes(states),
        slots=_nbytes(slots),
    )


def memory_of(
    sharding: Sharding,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return the memory of parameters, of gradients, and in which units are whole for a time."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    for flat in sharding.flats:
        parameters += flat.kept_memory()
        slots += [] if flat.slot is None else [flat.slot.tensor]
    for own in sharding.gradients:
        gradients += own.kept_memory() + own.local_gradients()
        slots += own.shared_memory()
    return parameters, gradients, slots


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors, each memory once."""
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors}.values())
