"""Messages of keys and values around a ring of ranks: rank r sends to r+1 and receives from r-1.

A message is sent while the previous block is computed, so a rank holds two pairs at a time. The
progress thread takes the steps of large messages, because the computing thread is busy.
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

SMALL_BYTES = 256 << 10  # up to this size, sending completes without further steps
KEYS, GRADIENTS = 1, 2  # tags, so that messages of one kind may overtake the other kind


class Pair(NamedTuple):
    """Keys and values, or their gradients, in contiguous memory, sent as one message.

    Attributes:
        flat: Memory with the elements of keys and values.
        keys: View of the keys.
        values: View of the values.
    """

    flat: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def message(self) -> torch.Tensor:
        """The elements as a tensor to send; its shape appears in errors."""
        alike = self.keys.shape == self.values.shape
        return self.flat.view(2, *self.keys.shape) if alike else self.flat

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Return a pair with copies of keys and values."""
        flat = torch.cat([keys.reshape(-1), values.reshape(-1)])
        return _views(flat, keys.shape, values.shape)

    def like(self, flat: torch.Tensor) -> Pair:
        """Return a pair with the same shapes in the memory `flat`."""
        return _views(flat, self.keys.shape, self.values.shape)

    def rows(self, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values at some positions."""
        return self.keys[:, :, positions], self.values[:, :, positions]


class Arriving(NamedTuple):
    """Pair of keys and values on its way from the previous rank; another goes to the next rank."""

    work: Works
    pair: Pair

    def wait(self) -> Pair:
        """Wait until a pair is received and this rank's pair is sent; return the received pair.

        Raises:
            MismatchError: The previous rank has other shapes.
        """
        try:
            self.work.wait()
        except MismatchError as exc:
            raise shapes_differ(self.pair.keys, self.pair.values, exc) from exc
        return self.pair

    def wait_and_add_to(self, pair: Pair) -> None:
        """Wait for the received pair, and add it to `pair`."""
        pair.flat.add_(self.wait().flat)


def pass_on(group: Group, pair: Pair, tag: int) -> Arriving:
    """Start to send a pair to the next rank of the ring, and to receive the previous rank's.

    All ranks use the same number `tag` for these messages.
    """
    other = pair.like(torch.empty_like(pair.flat))
    is_small = pair.flat.nbytes <= SMALL_BYTES
    with group.coalesce(steps_by=StepsBy.CALLER if is_small else StepsBy.THREAD) as block:
        block.send(pair.message, (group.rank + 1) % group.size, tag=tag)
        block.recv(other.message, (group.rank - 1) % group.size, tag=tag)
    return Arriving(block.work, other)


def travelling(group: Group, pair: Pair) -> Iterator[Pair]:
    """Yield the keys and values of all ranks, given this rank's.

    The first pair is this rank's, the second is the previous rank's, and so on.
    """
    for step in range(group.size):
        arriving = pass_on(group, pair, KEYS) if step < group.size - 1 else None
        yield pair
        if arriving is not None:
            pair = arriving.wait()


def _views(flat: torch.Tensor, keys: torch.Size, values: torch.Size) -> Pair:
    head, tail = flat.split_with_sizes([keys.numel(), values.numel()])
    return Pair(flat, head.view(keys), tail.view(values))
