"""Windows: memory of each member at addresses that peers know, so that steps can overlap.

Problem: a channel has two slots, and a step may begin only when all members have finished the last
step but one. That suits shared memory, where a step takes microseconds. On a network the next chunk
must be sent while the previous one is still on the wire.

Idea: the first step exchanges the addresses of all members' windows. Later steps only increment
counters, and carry no address. The algorithm decides the layout of the window, and when each part
may be overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.comm.channel.channel import Audience, Channel
from braid.runtime.transport import Steps

__all__ = ["LINE_BYTES", "Window"]

LINE_BYTES = 64


class Window:
    """Shared memory on every member of a group for one collective on one channel.

    Args:
        ch: The channel.
        nbytes: Size of this rank's window; the windows of all members have the same layout.
    """

    def __init__(self, ch: Channel, nbytes: int) -> None:
        self._ch = ch
        self._block = ch.windows.borrow(nbytes)
        self._bases: list[int] = []
        self._first = 0
        self._audiences: dict[tuple[int, ...], Any] = {}

    def open(self) -> Steps:
        """Exchange the addresses of the windows and compare descriptions, in one step."""
        ch = self._ch
        ch.own.expose_address(self._block.address)
        yield from ch.publish_and_wait()
        self._first = ch.value + 1
        self._bases = [ch.entry(member, ch.value).block for member in range(ch.size)]
        self._bases[ch.rank] = self._block.address

    def close(self) -> Steps:
        """Take the last step, and wait for all members.

        Without this wait, other members would compare this member's next operation with this one.
        """
        self.take_last_step()
        yield from self._ch.wait_all_read()

    def take_last_step(self) -> None:
        """Take the last step, and return the window to the pool without waiting.

        Another operation may use the window when all members have taken this step.
        """
        ch = self._ch
        ch.own.expose_address(self._block.address)  # late members may read it there
        value = ch.publish()
        peers = tuple(ch.peers)
        ch.windows.give_back(self._block, lambda: all(ch.has_published(m, value) for m in peers))

    def value_of(self, number: int) -> int:
        """Return the counter that members publish in step `number`, counted from `open`."""
        return self._first + number

    def view(self, member: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in a member's window.

        Args:
            member: Group rank.
            offset: First byte, a multiple of 64.
            numel: Number of elements.
            dtype: Dtype of the elements.
        """
        return self._ch.view(member, self._bases[member] + offset // LINE_BYTES, numel, dtype)

    def publish(
        self,
        to: Sequence[int],
        offset: int = 0,
        nbytes: int = 0,
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> int:
        """Publish the next step, and with it bytes of the window that the members `to` may read.

        Args:
            to: Group ranks; all other members ignore this step.
            offset: First byte that they read, a multiple of 64.
            nbytes: Number of bytes that they read.
            parts: First and past-the-end byte for each of them, from `offset`; None for all bytes.

        Returns:
            Value of the step, the same on all members.
        """
        key = tuple(to)
        audience = self._audiences.get(key)
        if audience is None:
            audience = self._audiences[key] = self._ch.audience(key)
        address = self._block.address + offset // LINE_BYTES if nbytes else 0
        ch = self._ch
        # the address is in every line, as a slow member may read only a late one
        ch.own.expose_address(self._block.address)
        return ch.publish(Audience(audience, address, nbytes, parts))

    def reached(self, members: Sequence[int], value: int) -> Steps:
        """Wait until `members` have published step `value`."""
        for member in members:
            if member != self._ch.rank:
                yield from self._ch.await_step(member, value)
