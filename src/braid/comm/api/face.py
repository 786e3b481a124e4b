"""Base of the classes that turn the arguments of public calls into a `Collective`.

`Reductions`, `Movements` and `PointToPoint` check arguments and make records. A `Group` is all
three and carries the records out, a `Batch` collects them, and a `Starter` starts them without
waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from braid.comm.engines.collective import Collective
from braid.comm.tensors.arguments import Parts, as_tensor, check_parts
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError

__all__ = ["Face"]


class Face(ABC):
    """Members of a group that can be asked for collectives.

    Attributes:
        rank: Index of this rank among the members.
        size: Number of members.
        devices: Types of the devices whose tensors need no copy to another device.
    """

    rank: int
    size: int
    devices: frozenset[str]

    @abstractmethod
    def _submit(self, collective: Collective) -> Any:
        """Carry the collective out, start it or keep it for later; returns what the caller gets."""

    @abstractmethod
    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        """Device types of the engine that takes tensors like `x`."""

    def _copies(self, x: torch.Tensor) -> Copies:
        """The copies of an operation on tensors like `x`."""
        return Copies(self._device_types(x))

    def _read_parts(
        self, copies: Copies, x: Sequence[torch.Tensor], role: str
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """All parts in one flat tensor, and the number of elements of each."""
        parts = [as_tensor(part) for part in x]
        check_parts(parts, self.size, parts[0] if parts else torch.empty(0), role)
        return copies.joined(parts), tuple(part.numel() for part in parts)

    def _written_parts(
        self, copies: Copies, out: Sequence[torch.Tensor], x: torch.Tensor, role: str
    ) -> tuple[torch.Tensor, ...]:
        """One flat tensor per member."""
        parts = [as_tensor(part, written=True) for part in out]
        check_parts(parts, self.size, x, role)
        return tuple(copies.written(part) for part in parts)

    def _rows(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A flat tensor cut into equal parts."""
        width = flat.numel() // self.size
        return tuple(flat[r * width : (r + 1) * width] for r in range(self.size))


def is_sequence(x: Parts | None) -> bool:
    """Whether `x` gives one tensor per member.

    Raises:
        ConfigError: `x` is a sequence with something else than tensors in it.
    """
    if isinstance(x, list | tuple):
        wrong = [type(part).__name__ for part in x if not isinstance(part, torch.Tensor)]
        if wrong:
            msg = (
                f"the list of tensors, one per rank, holds a {wrong[0]}: "
                "pass tensors only, or one tensor"
            )
            raise ConfigError(msg)
        return True
    return False


def nbytes_of(x: torch.Tensor) -> int:
    """Size of a tensor in bytes."""
    return x.numel() * x.element_size()
