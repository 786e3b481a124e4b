"""Views of a peer's tensor: in place in shared memory, or by copies from private memory.

The line of a step holds one word with the position of the owner's data: an address in its arena,
or, with the highest bit set, an address in its private memory, from which the kernel copies
(`transport.pull`). Algorithms that only read work with both; algorithms that store into peers'
tensors need the arena.
"""

from __future__ import annotations

from typing import Protocol

import torch

from braid.comm.channel.channel import Channel
from braid.comm.channel.staging import PRIVATE
from braid.errors import StaleError
from braid.runtime.transport import MemoryTransport

__all__ = ["Remote", "all_registered", "offers", "remote_at", "remote_of"]


def offers(ch: Channel) -> list[int]:
    """Return the address that each member published in the current step; 0 for no address."""
    return [ch.entry(member, ch.value).block for member in range(ch.size)]


def all_registered(ch: Channel) -> bool:
    """Return whether all members exposed tensors in shared memory in the current step."""
    return all(address and not address & PRIVATE for address in offers(ch))


def remote_of(ch: Channel, peer: int, numel: int, dtype: torch.dtype) -> Remote:
    """Return the tensor that `peer` exposed in the current step, with `numel` elements."""
    entry = ch.entry(peer, ch.value)
    if not entry.value:
        msg = (
            f"values of step {ch.value} were read before rank {peer} published them: wait for "
            "the step first"
        )
        raise StaleError(msg)
    return remote_at(ch, peer, entry.block, numel, dtype)


def remote_at(ch: Channel, peer: int, address: int, numel: int, dtype: torch.dtype) -> Remote:
    """Return a flat tensor of `peer` at an address that it has published."""
    if address & PRIVATE:
        return PrivateRemote(ch.transport, ch.ranks[peer], address ^ PRIVATE, dtype)
    return SharedRemote(ch.view(peer, address, numel, dtype))


class Remote(Protocol):
    """A flat tensor of a peer."""

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy elements from `start` on into flat, contiguous `out`."""
        ...

    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:
        """Return elements `start` to `end`, in place if possible, else copied into `scratch`."""
        ...


class SharedRemote:
    """A peer's tensor in shared memory.

    Args:
        view: The whole tensor.
    """

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy elements from `start` on into flat, contiguous `out`."""
        out.copy_(self._view[start : start + out.numel()])

    # SharedRemote needs no `scratch`; other implementations do
    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return elements `start` to `end`, in place; `scratch` is not used."""
        return self._view[start:end]


class PrivateRemote:
    """A peer's tensor in memory that other processes have not mapped.

    Args:
        transport: Transport that reads it.
        rank: Global rank of the owner.
        address: Address of the first byte in the owner's process.
        dtype: Dtype of the elements.
    """

    def __init__(
        self, transport: MemoryTransport, rank: int, address: int, dtype: torch.dtype
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._address = address
        self._itemsize = dtype.itemsize

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy elements from `start` on into flat, contiguous `out`."""
        self._transport.pull(self._rank, self._address + start * self._itemsize, out)

    def block(self, start: int, end: int, scratch: torch.Tensor) -> torch.Tensor:
        """Copy elements `start` to `end` into the beginning of `scratch`, and return them."""
        out = scratch[: end - start]
        self.read(start, out)
        return out
