"""Many tensors as one: a flat buffer and views into it.

Reducing a bucket of gradients is one operation on one contiguous tensor. When the buffer lies in shared memory and the
gradients are views of it, nothing is copied on the way to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from braid.comm import Group

__all__ = ["FlatBuffer", "allocator"]


class FlatBuffer:
    """A flat tensor with one view per shape, one after the other, and some extra elements at the end.

    Args:
        shapes: Shapes of the views.
        dtype: Of all of them.
        allocate: (shape, dtype) -> tensor, such as `Group.empty`.
        num_extra: Elements behind the last view.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        *,
        num_extra: int = 0,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        total = sum(numels)
        self.tensor = allocate((total + num_extra,), dtype)
        self.extra = self.tensor[total:]
        self.views: list[torch.Tensor] = []
        self._starts: list[int] = []
        start = 0
        for shape, numel in zip(shapes, numels, strict=True):
            self.views.append(self.tensor[start : start + numel].view(shape))
            self._starts.append(start)
            start += numel

    def firsts(self) -> torch.Tensor:
        """Index of the first element of each view; of an empty one that of any element."""
        most = max(0, self.tensor.numel() - 1)
        return torch.tensor([min(start, most) for start in self._starts], device=self.tensor.device)

    def __repr__(self) -> str:
        nbytes = self.tensor.numel() * self.tensor.element_size()
        return f"FlatBuffer({len(self.views)} views, {nbytes} bytes, {self.tensor.dtype})"


def allocator(group: Group, device: str) -> Callable[[Sequence[int], torch.dtype], torch.Tensor]:
    """What makes tensors on a device; on the CPU those that all members can read."""
    if device == "cpu":
        return group.empty
    return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device)
