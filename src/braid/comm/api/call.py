"""What the collectives have in common before anything moves: an `Order`, and who carries it out.

`Reducing`, `Moving` and `Messaging` turn what the user says into orders. A `Group` is all three and carries orders out;
a `Batch` is all three and collects them first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from braid.comm.api.describe import Key
from braid.comm.tensors.arguments import Parts, as_tensor, check_parts
from braid.comm.tensors.copies import Copies
from braid.errors import ConfigError

__all__ = ["Calls", "Order"]


class Order(NamedTuple):
    """One collective, checked and flattened.

    Attributes:
        key: Its description.
        returned: What the caller gets when it is done.
        ins: Flat tensors that are read.
        outs: Flat tensors that are written.
        copies: Between what the user passed and the flat tensors.
        nbytes: Size of the largest full buffer.
        widths: Elements of each part of `ins[0]`, None where they are equal.
        tag: Of a message.
        exclusive: Of a scan.
        source: Where a message from any member puts the sender's group rank.
        timeout_s: Deadline, None for the group's.
        async_op: Whether the caller goes on at once.
        reads: The user's tensors, of an all-reduce: what it reads, copies aside.
        writes: Likewise, what it writes.
    """

    key: Key
    returned: Any = None
    ins: tuple[torch.Tensor, ...] = ()
    outs: tuple[torch.Tensor, ...] = ()
    copies: Copies | None = None
    nbytes: int = 0
    widths: tuple[int, ...] | None = None
    tag: int = 0
    exclusive: bool = False
    source: list[int] | None = None
    timeout_s: float | None = None
    async_op: bool = False
    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()


class Calls(ABC):
    """Members that can be asked for collectives.

    Attributes:
        rank: This rank's index among them.
        size: Their number.
    """

    rank: int
    size: int

    @abstractmethod
    def _submit(self, order: Order) -> Any:
        """Carry it out, or keep it for later; returns what the caller gets."""

    @abstractmethod
    def _device_types(self, x: torch.Tensor) -> frozenset[str]:
        """Devices of the engine that takes tensors like `x`."""

    def _copies(self, x: torch.Tensor) -> Copies:
        """The copies of an operation on tensors like `x`."""
        return Copies(self._device_types(x))

    def _read_parts(
        self, copies: Copies, x: Sequence[torch.Tensor], role: str
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """All parts in one flat tensor, and the elements of each."""
        parts = [as_tensor(part) for part in x]
        check_parts(parts, self.size, parts[0] if parts else torch.empty(0), role)
        flats = [copies.read(part) for part in parts]
        return copies.joined(flats), tuple(part.numel() for part in flats)

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
        ConfigError: It is neither that nor one tensor.
    """
    if isinstance(x, list | tuple):
        wrong = [type(part).__name__ for part in x if not isinstance(part, torch.Tensor)]
        if wrong:
            msg = f"expected a tensor, or a sequence of tensors with one per rank, found a list of {wrong[0]}"
            raise ConfigError(msg)
        return True
    return False


def nbytes_of(x: torch.Tensor) -> int:
    """Size of a tensor."""
    return x.numel() * x.element_size()
