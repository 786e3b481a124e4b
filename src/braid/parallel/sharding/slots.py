"""Memory slots that flat vectors use in turn.

A unit's parameters are gathered for a short time only. Allocating memory each time costs more than
gathering: the kernel zeroes new pages one by one. Idea: two slots for all units of a depth. While
one unit computes in the first slot, the next unit is gathered into the second.

    units     0 1 2 3 4 5
    slots     a b a b a b        forward: gather 1 into b while 0 computes in a
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch

__all__ = ["Slot", "plan_slots"]

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
Holder = TypeVar("Holder")


class Slot(Generic[Holder]):
    """Temporary memory that several flat vectors use in turn, one holder at a time.

    Args:
        tensor: The memory.

    Attributes:
        tensor: Argument.
        holder: Vector that uses the memory now; None if it is free.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.holder: Holder | None = None


def plan_slots(
    keys: Sequence[Hashable],
    lengths: Sequence[int],
    dtypes: Sequence[torch.dtype],
    allocate: Sequence[Allocate],
) -> list[Slot[Holder]]:
    """Allocate one slot (temporary memory) per key, as long as the longest vector that uses it.

    Args:
        keys: Key of each vector; vectors with the same key use the slot in turn.
        lengths: Number of elements of each vector.
        dtypes: Dtype of each vector.
        allocate: Allocator for each vector: (shape, dtype) -> tensor.

    Returns:
        The slot of each vector.
    """
    longest: dict[Hashable, int] = {}
    for key, dtype, length in zip(keys, dtypes, lengths, strict=True):
        longest[key, dtype] = max(longest.get((key, dtype), 0), length)
    slots: dict[Hashable, Slot[Holder]] = {}
    for key, dtype, make in zip(keys, dtypes, allocate, strict=True):
        if (key, dtype) not in slots:
            slots[key, dtype] = Slot(make((longest[key, dtype],), dtype).zero_())
    return [slots[key, dtype] for key, dtype in zip(keys, dtypes, strict=True)]
