"""Slots of which members know the places after one step, so that several steps can be under way at once.

Problem: a channel's own slots are two, and a step may begin only when everybody has finished the
last but one. That suits memory, where a step takes microseconds. On a network the next chunk must
leave while the last one is still on its way.

Idea: the first step says where a member's window lies; from then on a step only counts, and says
nothing of places. What lies in which part of the window, and when it may be written again, is the
algorithm's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.comm.channel.channel import Audience, Channel
from braid.transport import Steps

__all__ = ["LINE_BYTES", "Window"]

LINE_BYTES = 64


class Window:
    """Part of every member's memory, for one operation on one channel.

    Args:
        ch: The channel.
        nbytes: Of the own window; every member's has the same layout.
    """

    def __init__(self, ch: Channel, nbytes: int) -> None:
        self._ch = ch
        self._block = ch.windows.borrow(nbytes)
        self._bases: list[int] = []
        self._first = 0
        self._audiences: dict[tuple[int, ...], Any] = {}

    def open(self) -> Steps:
        """Say where this window lies and hear where the others do; compares what was asked for. One step."""
        ch = self._ch
        ch.own.expose_address(self._block.word)
        yield from ch.publish_and_wait()
        self._first = ch.value + 1
        self._bases = [ch.entry(member, ch.value).block for member in range(ch.size)]
        self._bases[ch.rank] = self._block.word

    def close(self) -> Steps:
        """End, and wait for all: who is done early would else begin something that others compare with this."""
        self.leave()
        yield from self._ch.wait_all_read()

    def leave(self) -> None:
        """Take the last step; nobody waits for it, but when all have taken it the window may be used for something else."""
        ch = self._ch
        ch.own.expose_address(self._block.word)  # who is late may read it in this step's line
        value = ch.publish()
        others = tuple(ch.others)
        ch.windows.give_back(self._block, lambda: all(ch.has_come(m, value) for m in others))

    def value_of(self, number: int) -> int:
        """Value of the step number `number` after `open`."""
        return self._first + number

    def view(self, member: int, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in the window of `member`.

        Args:
            member: Group rank.
            offset: First byte, a multiple of 64.
            numel: Elements.
            dtype: Of the elements.
        """
        return self._ch.view(member, self._bases[member] + offset // LINE_BYTES, numel, dtype)

    def publish(
        self,
        to: Sequence[int],
        offset: int = 0,
        nbytes: int = 0,
        parts: Sequence[tuple[int, int]] | None = None,
    ) -> int:
        """Take the next step, and let `to` see it.

        Args:
            to: Group ranks; for all others the step is one that they do not look at.
            offset: First byte of what they shall read, a multiple of 64.
            nbytes: Its length.
            parts: First and last byte of what each of them reads of it; None for all.

        Returns:
            Value of the step, the same on all members.
        """
        key = tuple(to)
        audience = self._audiences.get(key)
        if audience is None:
            audience = self._audiences[key] = self._ch.audience(key)
        word = self._block.word + offset // LINE_BYTES if nbytes else 0
        ch = self._ch
        ch.own.expose_address(
            self._block.word
        )  # in every line: a slow member may read only a late one
        return ch.publish(Audience(audience, word, nbytes, parts))

    def reached(self, members: Sequence[int], value: int) -> Steps:
        """Wait until `members` have taken step `value`."""
        for member in members:
            if member != self._ch.rank:
                yield from self._ch.await_step(member, value)
