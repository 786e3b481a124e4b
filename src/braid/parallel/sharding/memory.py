"""Measured bytes of a sharded training on this rank, counted from its tensors.

Tests compare the formulas of `layouts.Bytes` with these measured bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from braid.parallel.sharding.engine import Sharding

__all__ = ["LiveBytes", "live_bytes", "memory_of"]


class LiveBytes(NamedTuple):
    """Bytes of a sharded training on one rank.

    Attributes:
        parameters: Bytes of parameters between uses, including the optimizer's copies if these have
            another dtype.
        gradients: Bytes of gradients after backward.
        states: Bytes of the optimizer's states.
        slots: Bytes of temporary memory for gathered units and their gradients.
    """

    parameters: int
    gradients: int
    states: int
    slots: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self)


def live_bytes(sharding: Sharding, optimizer: torch.optim.Optimizer) -> LiveBytes:
    """Return the bytes of a model and its optimizer that are allocated on this rank."""
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
    """Return memory in three lists: of parameters, of gradients, and for gathered units."""
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    slots: list[torch.Tensor] = []
    for flat in sharding.flats:
        parameters += flat.kept_memory()
        slots += [] if flat.slot is None else [flat.slot.tensor]
    for flat_gradients in sharding.gradients:
        gradients += flat_gradients.kept_memory() + flat_gradients.local_gradients()
        slots += flat_gradients.shared_memory()
    return parameters, gradients, slots


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; each memory counts once."""
    return sum({x.data_ptr(): x.numel() * x.element_size() for x in tensors}.values())
