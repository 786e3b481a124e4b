"""A checkpoint as a rank sees it that has parts of tensors: each is cut when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from braid.checkpoint.loading import Checkpoint
from braid.types import TensorSpec

__all__ = ["PartedCheckpoint", "Parts"]


class Parts(Protocol):
    """Knows which part of a tensor a rank has; engines implement this."""

    def whole_shape(self, name: str, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a whole tensor, by its name in the checkpoint, of that of a part."""
        ...

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        ...


class PartedCheckpoint(Checkpoint):
    """A checkpoint whose tensors are this rank's parts.

    Args:
        checkpoint: The checkpoint, of whole tensors.
        parts: Parts of this rank.
    """

    def __init__(self, checkpoint: Checkpoint, parts: Parts) -> None:
        super().__init__(
            checkpoint.path, checkpoint.manifest, checkpoint.skipped, own_of=checkpoint.own_of
        )
        self._parts = parts

    def read(self, name: str, box: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return this rank's part of a tensor; a box is one of the whole tensor."""
        tensor = super().read(name, box)
        return tensor if box is not None else self._parts.part_of(name, tensor)

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Check that the checkpoint holds the whole tensors of these parts; see `Checkpoint`."""
        super().require(
            {
                name: spec._replace(shape=self._parts.whole_shape(name, spec.shape))
                for name, spec in expected.items()
            }
        )
