"""Base of the classes that turn the arguments of public calls into a `Collective`.

`Reductions`, `Movements` and `PointToPoint` check arguments and make records. A `Group` inherits
from all three and executes the records, a `Batch` collects them, and a `Starter` starts them
without waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from braid.comm.engines.collective import Collective
from braid.comm.tensors.arguments import Parts, as_tensor, check_parts
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError

__all__ = ["Face"]


class Face(ABC):
    """Base of classes that offer collectives of a group.

    Attributes:
        rank: Index of this rank among the members.
        size: Number of members.
        devices: Device types whose tensors the engines take without a copy to another device.
    """

    rank: int
    size: int
    devices: frozenset[str]
    # `EagerMessages.repeat` of the engine: sends or receives a message like an earlier one
    _repeat: Callable[..., Any] | None = None

    @abstractmethod
    def _submit(self, collective: Collective) -> Any:
        """Run, start or record a collective; return the result of the public call."""

    @abstractmethod
    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        """Return the device types of the engine that takes tensors like `x`."""

    def _copies(self, x: torch.Tensor) -> Copies:
        """Return an empty list of copies for an operation on tensors like `x`."""
        return Copies(self._device_types(x))

    def _read_parts(
        self, copies: Copies, x: Sequence[torch.Tensor], role: str
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return all parts in one flat tensor, and the number of elements of each."""
        parts = [as_tensor(part) for part in x]
        check_parts(parts, self.size, parts[0] if parts else torch.empty(0), role)
        return copies.joined(parts), tuple(part.numel() for part in parts)

    def _written_parts(
        self, copies: Copies, out: Sequence[torch.Tensor], x: torch.Tensor, role: str
    ) -> tuple[torch.Tensor, ...]:
        """Return one flat output tensor per member."""
        parts = [as_tensor(part, written=True) for part in out]
        check_parts(parts, self.size, x, role)
        return tuple(copies.written(part) for part in parts)

    def _rows(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a flat tensor cut into equal parts."""
        width = flat.numel() // self.size
        return tuple(flat[r * width : (r + 1) * width] for r in range(self.size))


def is_sequence(x: Parts | None) -> bool:
    """Return whether `x` is a sequence of tensors, one per member.

    Raises:
        ConfigError: `x` is a sequence that contains another type.
    """
    if isinstance(x, list | tuple):
        wrong = [type(part).__name__ for part in x if not isinstance(part, torch.Tensor)]
        if wrong:
            msg = (
                f"the list of tensors, one per rank, contains a {wrong[0]}: "
                "pass tensors only, or one tensor"
            )
            raise ConfigError(msg)
        return True
    return False


def nbytes_of(x: torch.Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return x.numel() * x.element_size()
