"""Keys and values on their way round a ring of ranks: rank r sends to r+1 and receives from r-1.

A message is under way while the block before it is computed, so a rank has two of them at a time.
The progress thread takes the steps of large ones: the thread that computes is busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from braid.comm import Group, StepsBy
from braid.comm.engines.work import Works
from braid.errors import MismatchError
from braid.parallel.context_parallel.arguments import shapes_differ

__all__ = ["GRADIENTS", "KEYS", "Arriving", "Pair", "pass_on", "travelling"]

SMALL_BYTES = 256 << 10  # a message up to here is handed over when it is sent: no step is left
KEYS, GRADIENTS = 1, 2  # tags: messages of one kind may overtake those of the other


class Pair(NamedTuple):
    """Keys and values, or their gradients, in one stretch of memory: one message.

    Attributes:
        flat: Elements of both.
        keys: View of the keys.
        values: View of the values.
    """

    flat: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def message(self) -> torch.Tensor:
        """Elements of both, in a shape that says in errors what they are."""
        alike = self.keys.shape == self.values.shape
        return self.flat.view(2, *self.keys.shape) if alike else self.flat

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Return copies of keys and values."""
        flat = torch.cat([keys.reshape(-1), values.reshape(-1)])
        return _views(flat, keys.shape, values.shape)

    def like(self, flat: torch.Tensor) -> Pair:
        """Return a pair of the same shapes in other memory."""
        return _views(flat, self.keys.shape, self.values.shape)

    def rows(self, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of some positions."""
        return self.keys[:, :, positions], self.values[:, :, positions]


class Arriving(NamedTuple):
    """A pair that is received while another one is sent."""

    work: Works
    pair: Pair

    def wait(self) -> Pair:
        """Return the pair when it has come, and the other one has been sent.

        Raises:
            MismatchError: The rank before has other shapes.
        """
        try:
            self.work.wait()
        except MismatchError as exc:
            raise shapes_differ(self.pair.keys, self.pair.values, exc) from exc
        return self.pair

    def wait_and_add_to(self, pair: Pair) -> None:
        """Add the pair that comes to another one."""
        pair.flat.add_(self.wait().flat)


def pass_on(group: Group, pair: Pair, tag: int) -> Arriving:
    """Start to send a pair to the next rank, and to receive that of the rank before."""
    other = pair.like(torch.empty_like(pair.flat))
    is_small = pair.flat.nbytes <= SMALL_BYTES
    with group.coalesce(steps_by=StepsBy.CALLER if is_small else StepsBy.THREAD) as block:
        block.send(pair.message, (group.rank + 1) % group.size, tag=tag)
        block.recv(other.message, (group.rank - 1) % group.size, tag=tag)
    return Arriving(block.work, other)


def travelling(group: Group, pair: Pair) -> Iterator[Pair]:
    """Yield the pairs of all ranks, from this rank's backwards; the next one is under way."""
    for step in range(group.size):
        arriving = pass_on(group, pair, KEYS) if step < group.size - 1 else None
        yield pair
        if arriving is not None:
            pair = arriving.wait()


def _views(flat: torch.Tensor, keys: torch.Size, values: torch.Size) -> Pair:
    head, tail = flat.split_with_sizes([keys.numel(), values.numel()])
    return Pair(flat, head.view(keys), tail.view(values))
