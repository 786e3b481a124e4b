"""Flat buffers: many tensors as views of one.

Reducing a bucket of gradients is one operation on one contiguous tensor. If the buffer is in shared
memory and the gradients are views of it, sending them to other ranks needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from braid.comm import Group

__all__ = ["FlatBuffer", "allocator", "alone", "shaped"]

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class FlatBuffer:
    """Flat tensor with consecutive views, one per shape.

    Args:
        shapes: Shapes of the views.
        dtype: Dtype of all views.
        allocate: (shape, dtype) -> tensor, such as `Group.empty`.
        like: Tensors of these shapes; a view gets its tensor's strides if that has no gaps in
            memory. None for row-major views.
        align: Number of elements; each view starts at a multiple of it.

    Attributes:
        tensor: The whole buffer.
        views: Views of the buffer, one for each shape.
        starts: Index of the first element of each view.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        allocate: Allocate,
        *,
        like: Sequence[torch.Tensor] | None = None,
        align: int = 1,
    ) -> None:
        numels = [shape.numel() for shape in shapes]
        widths = [-(-numel // align) * align for numel in numels]
        self.tensor = allocate((sum(widths),), dtype)
        self.starts = list(accumulate(widths, initial=0))[:-1]
        parts = [
            self.tensor[start : start + numel]
            for start, numel in zip(self.starts, numels, strict=True)
        ]
        if like is None:
            self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        else:
            self.views = list(map(shaped, parts, like))

    @classmethod
    def for_params(
        cls, params: Sequence[torch.Tensor], group: Group, dtype: torch.dtype, *, align: int = 1
    ) -> FlatBuffer:
        """Allocate memory that all members of `group` can read, with a view like each parameter.

        Args:
            params: Parameters of one device.
            group: Ranks that read the memory, if it is on the CPU.
            dtype: Dtype of the buffer.
            align: See the class.
        """
        device = params[0].device
        where = "cpu" if device.type == "cpu" else str(device)
        shapes = [param.shape for param in params]
        return cls(shapes, dtype, allocator(group, where), like=params, align=align)

    def firsts(self) -> torch.Tensor:
        """Return the index of each view's first element; some valid index for an empty view."""
        most = max(0, self.tensor.numel() - 1)
        return torch.tensor([min(start, most) for start in self.starts], device=self.tensor.device)

    def __repr__(self) -> str:
        return (
            f"FlatBuffer({len(self.views)} views, {self.tensor.nbytes} bytes, {self.tensor.dtype})"
        )


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat` in the shape of `like`, with the same strides if `like` is dense.

    Optimizers that process parameter and gradient together expect equal strides, for example with
    channels_last parameters.
    """
    if like.is_contiguous() or not _is_dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.size(), like.stride(), flat.storage_offset())


def alone(view: torch.Tensor) -> torch.Tensor:
    """Return a view as a tensor with a separate storage, so that saving it omits the buffer."""
    if not view.numel():
        return torch.empty_like(view)
    return torch.utils.dlpack.from_dlpack(view)


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether the elements of `x` fill its memory without gaps or overlaps."""
    expected = 1
    for stride, extent in sorted(zip(x.stride(), x.size(), strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def allocator(group: Group, device: str) -> Allocate:
    """Return a function that makes tensors on `device`; CPU tensors are readable by all members."""
    if device == "cpu":
        return group.empty
    return lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=device)
