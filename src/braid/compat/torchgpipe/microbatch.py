"""`torchgpipe.microbatch`: a tensor or a tuple of tensors as parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["Batch", "check", "gather", "scatter"]

Tensors = tuple[torch.Tensor, ...]
TensorOrTensors = torch.Tensor | Tensors


class Batch:
    """Part of a batch: one tensor (`atomic`), or a tuple of tensors.

    Args:
        value: The tensor or the tuple.

    Attributes:
        value: The tensor or the tuple.
        atomic: Whether the value is one tensor.
    """

    def __init__(self, value: TensorOrTensors) -> None:
        self.value = value
        self.atomic = isinstance(value, torch.Tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor; raises AttributeError for a tuple."""
        if not isinstance(self.value, torch.Tensor):
            msg = "not atomic batch: this batch has a tuple of tensors, so use `tensors` instead"
            raise AttributeError(msg)
        return self.value

    @property
    def tensors(self) -> Tensors:
        """The tuple; raises AttributeError for one tensor."""
        if isinstance(self.value, torch.Tensor):
            msg = "batch is atomic: this batch has one tensor"
            raise AttributeError(msg)
        return self.value

    def call(self, function: Callable[[TensorOrTensors], TensorOrTensors]) -> Batch:
        """Return a batch with the result of `function` on the value."""
        return Batch(function(self.value))

    def __len__(self) -> int:
        return 1 if self.atomic else len(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.tensor,) if self.atomic else self.tensors

    def __getitem__(self, index: int) -> torch.Tensor:
        return tuple(self)[index]

    def __setitem__(self, index: int | slice, value: TensorOrTensors) -> None:
        if not isinstance(index, slice):
            parts: list[Any] = list(self)
            parts[index] = value
            self.value = parts[0] if self.atomic else tuple(parts)
        elif (index.start, index.stop, index.step) != (None, None, None):
            msg = "only batch[i] and batch[:] can be assigned to"
            raise NotImplementedError(msg)
        else:
            if self.atomic and isinstance(value, tuple) and len(value) == 1:
                value = value[0]
            kind = torch.Tensor if self.atomic else tuple
            if not isinstance(value, kind):
                msg = (
                    f"batch[:] must be assigned a {kind.__name__}, as the batch has, got "
                    f"{type(value).__name__}"
                )
                raise TypeError(msg)
            self.value = value

    def __repr__(self) -> str:
        return f"Batch({self.value!r})"


def check(input: Any) -> None:  # noqa: A002 - the original's name
    """Raise TypeError unless `input` is a tensor or a tuple of tensors."""
    parts = input if isinstance(input, tuple) else (input,)
    for part in parts:
        if not isinstance(part, torch.Tensor):
            msg = f"expected a tensor or a tuple of tensors, got {type(part).__name__}"
            raise TypeError(msg)


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:  # noqa: A002
    """Split a tensor, or each tensor of a tuple, into at most `chunks` parts along dim 0."""
    if isinstance(input, torch.Tensor):
        return [Batch(part) for part in input.chunk(chunks)]
    return [Batch(parts) for parts in zip(*(x.chunk(chunks) for x in input), strict=True)]


def gather(outputs: Iterable[Batch]) -> TensorOrTensors:
    """Concatenate parts along dim 0."""
    batches = list(outputs)
    if batches[0].atomic:
        return torch.cat([batch.tensor for batch in batches])
    return tuple(
        torch.cat(parts) for parts in zip(*(batch.tensors for batch in batches), strict=True)
    )
