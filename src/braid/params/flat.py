"""Many tensors as one: a flat buffer and views into it.

Reducing a bucket of gradients is one operation on one contiguous tensor. When the buffer lies in shared memory and the
gradients are views of it, nothing is copied on the way to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from braid.comm import Group

__all__ = ["FlatBuffer", "allocator", "alone", "shaped"]


class FlatBuffer:
    """A flat tensor with one view per shape, one after the other, and some extra elements at the end.

    Attributes:
        tensor: All of it.
        views: By shape.
        starts: Where each view starts.
        extra: What is behind them.

    Args:
        shapes: Shapes of the views.
        dtype: Of all of them.
        allocate: (shape, dtype) -> tensor, such as `Group.empty`.
        num_extra: Elements behind the last view.
        like: Tensors of these shapes whose strides the views take, where they fill their memory; all row by row when None.
        align: Each view starts at a multiple of so many elements, and there is room up to one behind the last.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor],
        *,
        num_extra: int = 0,
        like: Sequence[torch.Tensor] | None = None,
        align: int = 1,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        widths = [-(-numel // align) * align for numel in numels]
        total = sum(widths)
        self.tensor = allocate((total + num_extra,), dtype)
        self.extra = self.tensor[total:]
        self.views: list[torch.Tensor] = []
        self.starts = list(accumulate(widths, initial=0))[:-1]
        for number, (start, numel) in enumerate(zip(self.starts, numels, strict=True)):
            part = self.tensor[start : start + numel]
            view = part.view(shapes[number]) if like is None else shaped(part, like[number])
            self.views.append(view)

    def firsts(self) -> torch.Tensor:
        """Index of the first element of each view; of an empty one that of any element."""
        most = max(0, self.tensor.numel() - 1)
        return torch.tensor([min(start, most) for start in self.starts], device=self.tensor.device)

    def __repr__(self) -> str:
        nbytes = self.tensor.numel() * self.tensor.element_size()
        return f"FlatBuffer({len(self.views)} views, {nbytes} bytes, {self.tensor.dtype})"


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of `flat` in the shape of `like`, and with its strides where it fills its memory, as in channels_last.

    Optimizers that walk through parameter and gradient side by side expect that.
    """
    if like.is_contiguous() or not _is_dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride(), flat.storage_offset())


def alone(view: torch.Tensor) -> torch.Tensor:
    """The same memory with a storage of its own: what is saved of it is these numbers, not the buffer that it is a view of."""
    if not view.numel():
        return torch.empty_like(view)
    return torch.utils.dlpack.from_dlpack(view)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether its elements fill its memory without gaps, each once."""
    expected = 1
    for stride, extent in sorted(zip(x.stride(), x.size(), strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def allocator(group: Group, device: str) -> Callable[[Sequence[int], torch.dtype], torch.Tensor]:
    """What makes tensors on a device; on the CPU those that all members can read."""
    if device == "cpu":
        return group.empty
    return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device)
