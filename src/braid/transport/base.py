"""What a rank has to communicate through memory: arena, doorbells, and a way to its peers' memory.

Processes and threads differ in one thing only, how peers' memory is found (`PeerMemory`): `shm` opens it through the
kernel, `inproc` looks it up in a dictionary. Everything above runs on both, so every collective can be tested with
threads and used with processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from braid.clock import Clock
from braid.events import NameTable
from braid.transport.arena import Arena
from braid.transport.health import Health
from braid.transport.memory import LEFT, SLEEPERS, STATE, PeerMemory, Root
from braid.transport.wait import Doorbells, Waiter

__all__ = ["MemoryTransport"]


class MemoryTransport:
    """This rank's end of the shared memory of a job.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        root: Own root, already visible to the peers.
        bells: Own doorbells.
        peers: Way to the others' memory.
        clock: Time source of all waits.
        health: Where lost peers are reported.
        crowded: Whether there are more ranks than cores here.
        on_close: Called last by `close`, for what serves this transport.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        root: Root,
        bells: Doorbells,
        peers: PeerMemory,
        clock: Clock,
        health: Health,
        crowded: bool,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.health = health
        self.bells = bells
        self.arena = Arena(rank, root, peers)
        self.waiter = Waiter(bells, health, clock, crowded=crowded)
        self._root = root
        self._peers = peers
        self._fence = threading.Lock()
        self._pid = os.getpid()
        self._on_close = on_close
        health.on_loss(bells.ring_own)
        health.ask_left(self._has_left)

    @property
    def names(self) -> NameTable:
        """Own name table: texts that peers may want to read."""
        return self._root.names

    def names_of(self, rank: int) -> NameTable:
        """Name table of `rank`."""
        return self._root.names if rank == self.rank else self._peers.root(rank).names

    def sleeper_words(self, ranks: list[int]) -> list[tuple[int, memoryview]]:
        """Root words of `ranks`, to be handed to `ring`."""
        return [(rank, self._peers.root(rank).words) for rank in ranks]

    def ring(self, sleepers: list[tuple[int, memoryview]]) -> None:
        """Wake those of `sleepers` that sleep; call after the values they wait for are stored."""
        self._fence.acquire()  # a full fence: our store before our look at their announcement
        self._fence.release()
        for rank, words in sleepers:
            slots = words[SLEEPERS]
            if slots:
                self._peers.ring(rank, slots)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the transport."""
        return os.getpid() != self._pid

    def fds(self) -> list[int]:
        """Descriptors of doorbells, memory and pidfds, which a forked child must not keep."""
        return [*self.bells.fds(), *self.arena.fds(), self._root.file.fd, *self.health.fds()]

    def leave(self) -> None:
        """Tell the peers that this rank ends on purpose."""
        self._root.words[STATE] = LEFT
        self.ring(self.sleeper_words([r for r in range(self.world_size) if r != self.rank]))

    def close(self) -> None:
        """Give everything back. Peers that still map this memory keep it until they unmap it."""
        self.arena.close()
        self._peers.close()
        self.bells.close()
        self.health.close()
        self._root.close()
        if self._on_close is not None:
            self._on_close()

    def _has_left(self, rank: int) -> bool:
        return int(self._peers.root(rank).words[STATE]) == LEFT
