"""Ranks that cannot, or shall not, share memory: the same algorithms over copies, sent by TCP on the loopback address.

Problem: shared memory needs Linux (files without a name, descriptors of other processes, pidfds) and a processor that
keeps the order of stores. macOS, ARM and some sandboxes have neither.

Idea: what a rank publishes is written into a mirror of its memory at every rank that looks at it (`mirror`), over one
connection per pair (`links`). Arena, lines, channels and everything above stay as they are; only what reads tensors of
others where they lie is not there, so data takes the way through the slots.

Both ends of a connection prove that they know the job's secret: the launcher's, or, without one, 32 random bytes that
rank 0 puts into the store where the ranks meet, so that whoever may join the job there may also join here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from itertools import repeat

from braid.clock import Clock
from braid.errors import CommTimeout, RendezvousError
from braid.transport.arena import LINE_BYTES, OFFSET_BITS
from braid.transport.base import LINGER_S, Audience, MemoryTransport
from braid.transport.health import Health
from braid.transport.links import Link, Links, LinkWaiter
from braid.transport.meeting import LOOK_S, Meeting
from braid.transport.memory import (
    CLOSED,
    ROOT_BYTES,
    ROOT_WORDS_BYTES,
    RUNNING,
    STATE,
    MemoryFile,
    Root,
)
from braid.transport.mirror import ROOT_EXTENT, MirroredMemory, PrivateArena, Writes
from braid.transport.wait import Doorbells
from braid.wire import Identity, Listener, Secret, SocketConnection
from braid.wire import connect as dial

__all__ = ["PORTABLE", "MirrorTransport", "connect_portable"]

PORTABLE = "portable (BRAID_PORTABLE, or no shared memory on this system)"
ROLE = "memory"
ANSWER_S = 30.0  # of a rank that has said where it listens


class MirrorTransport(MemoryTransport):
    """A rank's end where nothing is shared.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        root: Own root, in private memory.
        bells: Own doorbells, for the threads of this process.
        mirrors: Copies of the peers' memory.
        links: Connections to the peers.
        clock: Time source of all waits.
        health: Where lost peers are reported.
        crowded: Whether there are more ranks than cores here.
    """

    shares_memory = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        root: Root,
        bells: Doorbells,
        mirrors: MirroredMemory,
        links: Links,
        clock: Clock,
        health: Health,
        crowded: bool,
    ) -> None:
        super().__init__(
            rank,
            world_size,
            root=root,
            bells=bells,
            peers=mirrors,
            clock=clock,
            health=health,
            crowded=crowded,
            arena=PrivateArena(rank, root, mirrors, self._announce),
            waiter=LinkWaiter(bells, health, clock, links, crowded=crowded),
        )
        self._links = links
        self._memory = memoryview(root.file.map)

    def audience(self, ranks: Sequence[int]) -> Audience:
        """Some peers, to be handed to `publish`."""
        return [self._links.by_rank[rank] for rank in ranks]

    def publish(
        self,
        audience: Audience,
        line: int,
        block: int = 0,
        nbytes: int = 0,
        parts: Sequence[tuple[int, int]] | None = None,
        *,
        changes: bool = False,
    ) -> None:
        """Send `audience` a block of the arena and a line; see `MemoryTransport.publish`."""
        small = [(*_place(line), self._line(line))]
        if not nbytes:
            self._links.send([(link, Writes([], small), ()) for link in audience])
            return
        extent, offset = _place(block)
        data = self.arena.piece(self.rank, block, nbytes)
        if changes:
            data = memoryview(bytes(data))
        frames = []
        for link, (start, end) in zip(audience, parts or repeat((0, nbytes)), strict=False):
            large = [(extent, offset + start)] if start < end else []
            frames.append((link, Writes(large, small), [data[start:end]] if large else []))
        self._links.send(frames)

    def fds(self) -> list[int]:
        """Descriptors that a forked child must not keep."""
        return [*super().fds(), *self._links.fds()]

    def close(self) -> None:
        """Say goodbye and give everything back."""
        if not self.forked:
            if self._root.words[STATE] == RUNNING:
                self._root.words[STATE] = CLOSED
                self.publish(list(self._links.by_rank.values()), 0)
            self._links.close(LINGER_S)
        self._memory.release()
        super().close()

    def _line(self, place: int) -> bytes:
        if place >> OFFSET_BITS == ROOT_EXTENT:
            return bytes(self._memory[:LINE_BYTES])
        return bytes(self.arena.piece(self.rank, place, LINE_BYTES))

    def _announce(self, number: int) -> None:
        """Tell all peers of an extent: they may hear of places in it by other ways."""
        offset = ROOT_WORDS_BYTES + 16 * number
        entry = bytes(self._memory[offset : offset + 16])
        writes = Writes([], [(ROOT_EXTENT, offset, entry)])
        self._links.send([(link, writes, ()) for link in self._links.by_rank.values()])


def connect_portable(meeting: Meeting, *, crowded: bool, secret: Secret | None) -> MirrorTransport:
    """Connect to all ranks of a job.

    Args:
        meeting: Where they find each other.
        crowded: Whether there are more ranks than cores.
        secret: Of the job; from the store when None.

    Raises:
        RendezvousError: Some rank did not answer, or has another secret.
    """
    rank, world_size, health = meeting.rank, meeting.world_size, meeting.health
    with contextlib.ExitStack() as undo:
        root = Root(MemoryFile.private(ROOT_BYTES, f"braid-root-{rank}"))
        undo.callback(root.close)
        bells = Doorbells(root)
        undo.callback(bells.close)
        mirrors = MirroredMemory(rank, world_size, root)
        undo.callback(mirrors.close)
        links = {}
        for peer, (pid, connection) in _connect_all(
            meeting, secret or _shared_secret(meeting)
        ).items():
            undo.callback(connection.close)
            links[peer] = Link(peer, connection, root, mirrors)
            health.expect_end(peer, pid)
        undo.pop_all()
    return MirrorTransport(
        rank,
        world_size,
        root=root,
        bells=bells,
        mirrors=mirrors,
        links=Links(rank, links, memory=mirrors, bells=bells, health=health, clock=meeting.clock),
        clock=meeting.clock,
        health=health,
        crowded=crowded,
    )


def _place(word: int) -> tuple[int, int]:
    """Extent and first byte."""
    return word >> OFFSET_BITS, (word & (1 << OFFSET_BITS) - 1) * LINE_BYTES


def _shared_secret(meeting: Meeting) -> Secret:
    """One that all who meet there read."""
    key = "shm/secret"
    if meeting.rank == 0:
        meeting.store.set(key, secrets.token_hex(32).encode())
    meeting.wait([key])
    return Secret(bytes.fromhex(meeting.store.get(key).decode()))


def _connect_all(meeting: Meeting, secret: Secret) -> dict[int, tuple[int, SocketConnection]]:
    """A connection to each peer, and its process id: each rank calls those before it."""
    who = Identity("job", ROLE, meeting.rank)
    with Listener("tcp://127.0.0.1:0", secret, who, clock=meeting.clock) as listener:
        texts = meeting.addresses(PORTABLE, f"{os.getpid()}@{listener.address}")
        found: dict[int, SocketConnection] = {}
        with contextlib.ExitStack() as undo:
            for peer in range(meeting.rank):
                found[peer] = _call(meeting, peer, texts[peer].partition("@")[2], secret, who)
                undo.callback(found[peer].close)
            while len(found) < meeting.world_size - 1:
                connection = _answer(meeting, listener, found)
                peer = connection.peer.rank
                if peer <= meeting.rank or peer in found or connection.peer.role != ROLE:
                    connection.close()
                    continue
                found[peer] = connection
                undo.callback(connection.close)
            undo.pop_all()
    return {peer: (int(texts[peer].partition("@")[0]), found[peer]) for peer in sorted(found)}


def _call(
    meeting: Meeting, peer: int, address: str, secret: Secret, who: Identity
) -> SocketConnection:
    try:
        timeout_s = min(meeting.timeout_s, ANSWER_S)
        connection = dial(address, secret, who, timeout_s=timeout_s, clock=meeting.clock)
    except RendezvousError:
        meeting.look()  # the launcher may know more
        raise
    if connection.peer.rank != peer:
        connection.close()
        msg = f"expected rank {peer} at {address}, found {connection.peer}: is the store that of another job?"
        raise RendezvousError(msg)
    return connection


def _answer(
    meeting: Meeting, listener: Listener, found: dict[int, SocketConnection]
) -> SocketConnection:
    deadline_ns = meeting.clock.now_ns() + round(meeting.timeout_s * 1e9)
    while True:
        left_s = (deadline_ns - meeting.clock.now_ns()) / 1e9
        try:
            return listener.accept(max(0.0, min(left_s, LOOK_S)))
        except CommTimeout as exc:
            meeting.look()
            if left_s <= LOOK_S:
                missing = [r for r in range(meeting.rank + 1, meeting.world_size) if r not in found]
                refused = "".join(f"\n  refused {one}" for one in listener.refusals)
                msg = (
                    f"expected connections from ranks {missing} within {meeting.timeout_s:g} s (this is rank "
                    f"{meeting.rank}), found none: see their errors, or whether they have the job's secret{refused}"
                )
                raise RendezvousError(msg) from exc
