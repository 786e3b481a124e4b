"""A peer's tensor, as the algorithms read it: in shared memory in place, in private memory by a copy of the kernel.

A step's line holds one word that says where the owner's data lies: a place in its arena, or, with
the highest bit set, an address in its private memory (`transport.pull`). Algorithms that only read
do not care which; those that store into peers' tensors need the arena.
"""

from __future__ import annotations

from typing import Protocol

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.staging import PRIVATE
from braid.errors import StaleError
from braid.transport import MemoryTransport

__all__ = [
    "PrivateRemote",
    "Remote",
    "SharedRemote",
    "all_registered",
    "offers",
    "remote_at",
    "remote_of",
]


def offers(ch: Channel) -> list[int]:
    """Places that the members published in the present step; 0 where there is none."""
    return [ch.entry(member, ch.value).block for member in range(ch.size)]


def all_registered(ch: Channel) -> bool:
    """Whether all members offered tensors in shared memory in the present step."""
    return all(word and not word & PRIVATE for word in offers(ch))


def remote_of(ch: Channel, peer: int, numel: int, dtype: torch.dtype) -> Remote:
    """What `peer` offered in the present step, a flat tensor of `numel` elements."""
    entry = ch.entry(peer, ch.value)
    if not entry.value:
        msg = f"step {ch.value} of rank {peer} was read before it was published"
        raise StaleError(msg)
    return remote_at(ch, peer, entry.block, numel, dtype)


def remote_at(ch: Channel, peer: int, word: int, numel: int, dtype: torch.dtype) -> Remote:
    """A flat tensor of `peer` at a place that it has named."""
    if word & PRIVATE:
        return PrivateRemote(ch.transport, ch.ranks[peer], word ^ PRIVATE, dtype)
    return SharedRemote(ch.view(peer, word, numel, dtype))


class Remote(Protocol):
    """A flat tensor of a peer."""

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill flat, contiguous `out` from element `start` on."""
        ...

    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:
        """Elements `start` to `end`, in place if possible, else copied to the beginning of `scratch`."""
        ...


class SharedRemote:
    """A tensor in shared memory.

    Args:
        view: All of it.
    """

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill flat, contiguous `out` from element `start` on."""
        out.copy_(self._view[start : start + out.numel()])

    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - see Remote
        """Elements `start` to `end`."""
        return self._view[start:end]


class PrivateRemote:
    """A tensor in memory that only its owner has mapped.

    Args:
        transport: Reads it.
        rank: Global rank of the owner.
        address: First byte there.
        dtype: Of its elements.
    """

    def __init__(
        self, transport: MemoryTransport, rank: int, address: int, dtype: torch.dtype
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._address = address
        self._itemsize = dtype.itemsize

    def read(self, start: int, out: torch.Tensor) -> None:
        """Fill flat, contiguous `out` from element `start` on."""
        self._transport.pull(self._rank, self._address + start * self._itemsize, out)

    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:
        """Elements `start` to `end`, copied to the beginning of `scratch`."""
        out = scratch[: end - start]
        self.read(start, out)
        return out
