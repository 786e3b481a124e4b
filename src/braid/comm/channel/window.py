"""Windows: memory of each member whose address peers know, so that several steps can be under way.

Problem: a channel has two slots of its own, and a step may begin only when all members have
finished the last but one. That suits memory, where a step takes microseconds. On a network the next
chunk must leave while the last one is still on its way.

Idea: the first step tells where each member's window lies. From then on a step only counts, and
carries no address. The algorithm decides what lies in which part of the window, and when that part
may be written again.
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
    """A part of every member's memory, for one operation on one channel.

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
        """Leave, and wait for all members.

        A member that went on early would begin a step that others compare with a step of this
        operation.
        """
        self.take_last_step()
        yield from self._ch.wait_all_read()

    def take_last_step(self) -> None:
        """Take the last step, for which nobody waits.

        The window may serve another operation when all members have taken it.
        """
        ch = self._ch
        ch.own.expose_address(self._block.address)  # who is late may read it in this step's line
        value = ch.publish()
        peers = tuple(ch.peers)
        ch.windows.give_back(self._block, lambda: all(ch.has_published(m, value) for m in peers))

    def value_of(self, number: int) -> int:
        """Return the value of step number `number` after `open`."""
        return self._first + number

    def view(self, member: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor in the window of `member`.

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
        """Take the next step, and tell the members `to`.

        Args:
            to: Group ranks; all other members do not look at this step.
            offset: First byte of what they read, a multiple of 64.
            nbytes: Number of bytes that they read.
            parts: First and last byte that each of them reads of it; None for all.

        Returns:
            Value of the step, the same on all members.
        """
        key = tuple(to)
        audience = self._audiences.get(key)
        if audience is None:
            audience = self._audiences[key] = self._ch.audience(key)
        address = self._block.address + offset // LINE_BYTES if nbytes else 0
        ch = self._ch
        ch.own.expose_address(
            self._block.address
        )  # in every line: a slow member may read only a late one
        return ch.publish(Audience(audience, address, nbytes, parts))

    def reached(self, members: Sequence[int], value: int) -> Steps:
        """Wait until `members` have taken step `value`."""
        for member in members:
            if member != self._ch.rank:
                yield from self._ch.await_step(member, value)
