"""Parts of a training on ranks, and their boxes of whole tensors.

A *part* is trained by one rank. It knows the boxes of whole tensors that its tensors are, as plain
numbers, so any rank can keep a copy of any part, and parts of one division of the model can become
parts of another division (`redistribution`).

    part "pp=0"    model/first.weight       box (0, 0) of (8, 4)
                   optimizer/first.weight/exp_avg, the same box
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import Slice, to_plain
from braid.errors import ConfigError
from braid.parallel.gradients import FlatBuffer

__all__ = [
    "ModelPart",
    "PartTensor",
    "TensorBox",
    "boxes_of",
    "packed",
]

ALIGNMENT = 64  # bytes


class TensorBox(NamedTuple):
    """Box of a whole tensor: a range in each dim, and where its elements are in a rank's tensor.

    Attributes:
        whole: Shape of the whole tensor.
        offset: First index of the box in the whole tensor, per dim.
        extent: Shape of the box.
        strides: Strides of the box in the rank's tensor.
        start: Index of the box's first element in the rank's tensor.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def parse(cls, fields: Sequence[Any]) -> TensorBox:
        """Return the box with these fields, which were received as plain data."""
        whole, offset, extent, strides, start = fields
        return cls(tuple(whole), tuple(offset), tuple(extent), tuple(strides), start)

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> TensorBox:
        """Return the box that covers a whole tensor."""
        shape = tuple(tensor.shape)
        strides = torch.empty(shape, device="meta").stride()
        return cls(shape, (0,) * len(shape), shape, strides, 0)

    @classmethod
    def of(cls, piece: Slice, tensor: torch.Tensor) -> TensorBox:
        """Return the box of a checkpoint's piece, where the piece is a view of a rank's tensor."""
        if tuple(piece.tensor.shape) == tuple(tensor.shape):
            return cls.all_of(tensor)._replace(whole=piece.global_shape, offset=piece.offset)
        assert tensor.is_contiguous(), f"a part of {piece.name} has gaps"
        start = int(piece.tensor.storage_offset() - tensor.storage_offset())
        extent = tuple(piece.tensor.shape)
        return cls(piece.global_shape, piece.offset, extent, piece.tensor.stride(), start)

    def common(self, other: TensorBox) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the offset and shape of two boxes' overlap in the whole tensor; None if empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        ]
        extent = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
        return None if min(extent, default=1) <= 0 else (offset, extent)

    def view(
        self, tensor: torch.Tensor, offset: Sequence[int], extent: Sequence[int]
    ) -> torch.Tensor:
        """Return a view of a rank's tensor: its elements at these indices of the whole tensor."""
        skipped = [o - first for o, first in zip(offset, self.offset, strict=True)]
        if tuple(tensor.shape) == self.extent:  # in any memory format
            return tensor[tuple(slice(o, o + n) for o, n in zip(skipped, extent, strict=True))]
        start = self.start + sum(n * s for n, s in zip(skipped, self.strides, strict=True))
        return tensor.as_strided(extent, self.strides, tensor.storage_offset() + start)


class PartTensor(NamedTuple):
    """A tensor of a rank's part of the training state.

    Attributes:
        name: Name of the whole tensor, as in a checkpoint.
        boxes: Boxes of the whole tensor that this tensor consists of.
        tensor: Values of the tensor.
        is_alike: Whether this is an optimizer state with the shape of its parameter.
        is_placed: Whether the tensor is on the device of its parameter.
    """

    name: str
    boxes: Sequence[TensorBox]
    tensor: torch.Tensor
    is_alike: bool = False
    is_placed: bool = True


class ModelPart(NamedTuple):
    """Part of a training on one rank: parameters, their optimizer states, and buffers.

    Attributes:
        name: Position on the mesh, such as `pp=1,tp=0`.
        params: This rank's tensors of the trained parameters, by name of the whole parameter.
        boxes: Boxes of the whole parameters that these tensors consist of, by name.
        optimizer: Optimizer of the parameters, which may also have other parameters.
        buffers: Returns the buffers of this rank's layers by name; a forward may replace them.
    """

    name: str
    params: Mapping[str, nn.Parameter]
    boxes: Mapping[str, Sequence[TensorBox]]
    optimizer: Optimizer
    buffers: Callable[[], Mapping[str, torch.Tensor]]

    def entries(self) -> Iterator[PartTensor]:
        """Yield the tensors of the part."""
        for name, boxes in self.boxes.items():
            param = self.params[name]
            yield PartTensor(f"model/{name}", boxes, param.detach())
            for key, value in self.optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    is_alike = bool(value.dim()) and value.shape == param.shape
                    places = boxes if is_alike else [TensorBox.all_of(value)]
                    is_placed = value.device == param.device
                    state = f"optimizer/{name}/{key}"
                    yield PartTensor(state, places, value.detach(), is_alike, is_placed)
        for name, buffer in self.buffers().items():
            yield PartTensor(f"buffer/{name}", [TensorBox.all_of(buffer)], buffer.detach())

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return optimizer states other than tensors, such as step counts, by parameter.

        Raises:
            ConfigError: A state has tensors in lists or dicts, or a tensor with another shape than
                its divided parameter, so that its boxes are not known.
        """
        for name, boxes in self.boxes.items():
            if any(box.extent != box.whole for box in boxes):
                self._require_alike(name)
        tensors: dict[str, torch.Tensor] = {}
        numbers = {
            name: {
                key: to_plain(value, f"{name}/{key}", tensors)
                for key, value in self.optimizer.state.get(self.params[name], {}).items()
                if not isinstance(value, torch.Tensor)
            }
            for name in self.boxes
            if self.params[name] in self.optimizer.state
        }
        if tensors:
            msg = (
                f"{type(self.optimizer).__name__} keeps tensors in lists or dicts, such as "
                f"{next(iter(tensors))}, which cannot be moved to another mesh: use braid.elastic, "
                "or an optimizer like AdamW"
            )
            raise ConfigError(msg)
        return numbers

    def _require_alike(self, name: str) -> None:
        """Refuse states of a part of a parameter that have another shape, such as sums of rows."""
        param = self.params[name]
        for key, value in self.optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                msg = (
                    f"{type(self.optimizer).__name__} keeps {name}/{key} of shape "
                    f"{tuple(value.shape)} for a part of {name} of shape {tuple(param.shape)}, "
                    "which cannot be moved to another mesh: use a mesh without tp, or an optimizer "
                    "like AdamW"
                )
                raise ConfigError(msg)


def boxes_of(
    pieces: Iterable[Slice], params: Mapping[str, torch.Tensor]
) -> dict[str, list[TensorBox]]:
    """Return the boxes of each parameter on this rank, by name, from its pieces of a checkpoint."""
    boxes: dict[str, list[TensorBox]] = {}
    for piece in pieces:
        root, _, name = piece.name.partition("/")
        if root == "model" and name in params:
            boxes.setdefault(name, []).append(TensorBox.of(piece, params[name].detach()))
    return boxes


def packed(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one block of bytes for all tensors, and views of it with their shapes and dtypes."""
    sizes = [torch.Size((tensor.nbytes,)) for tensor in tensors]
    flat = FlatBuffer(
        sizes,
        torch.uint8,
        lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype),
        align=ALIGNMENT,
    )
    pairs = zip(flat.views, tensors, strict=True)
    return flat.tensor, [view.view(tensor.dtype).view(tensor.shape) for view, tensor in pairs]
