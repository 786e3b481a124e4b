"""Hooks that gather parameters again when backward needs tensors that autograd has saved.

Problem: a matrix product saves its weight, a view of memory that is soon used for other weights.

Idea: while a unit computes, hooks on saved tensors replace each view of such memory by its position
in the flat vector, and create a new view when backward unpacks it. Other tensors are passed to the
hooks that were active before, such as a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from braid.parallel.sharding.flat_shard import FlatShard
from braid.runtime.torch_internals import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks,
)

__all__ = ["SavedParams"]

Find = Callable[[int], "FlatShard | None"]
Restore = Callable[[FlatShard], torch.Tensor]


class _SavedPlace(NamedTuple):
    """Position of a saved tensor in a flat vector."""

    flat: FlatShard
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class SavedParams:
    """Autograd hooks that save the position of a gathered parameter instead of its values.

    Args:
        find: Function that returns the flat vector at a memory address, or None.
        restore: Function that returns the whole vector in backward, gathered if necessary.
    """

    def __init__(self, find: Find, restore: Restore) -> None:
        self._find = find
        self._restore = restore

    def push(self) -> None:
        """Activate the hooks in this thread."""
        outer: tuple[Callable[..., Any], Callable[..., Any]] | None = saved_tensors_hooks(True)
        if outer is not None and getattr(outer[0], "sharding", None) is self:
            push_saved_tensors_hooks(*outer)
            return
        outer_pack, outer_unpack = outer or (_detached, lambda x: x)
        find, restore = self._find, self._restore

        def pack(x: torch.Tensor) -> Any:
            flat = find(x.data_ptr())
            if flat is None:
                return outer_pack(x)
            offset = flat.offset_of(x.data_ptr())
            if x.dtype != flat.dtypes.compute:  # a view of the bits with another dtype
                return outer_pack(x.clone())
            return _SavedPlace(flat, offset, x.size(), x.stride())

        def unpack(saved: Any) -> torch.Tensor:
            if type(saved) is not _SavedPlace:
                unpacked: torch.Tensor = outer_unpack(saved)
                return unpacked
            full = restore(saved.flat)
            offset = full.storage_offset() + saved.offset
            return full.as_strided(saved.size, saved.stride, offset)

        pack.sharding = self  # type: ignore[attr-defined]  # to recognize the hook
        push_saved_tensors_hooks(pack, unpack)

    def pop(self) -> None:
        """Deactivate the hooks that the last `push` activated."""
        pop_saved_tensors_hooks()


def _detached(x: torch.Tensor) -> torch.Tensor:
    """Pack a tensor detached; autograd restores its graph when it unpacks the tensor.

    A graph that held its own output would never be freed.
    """
    return x.detach()
