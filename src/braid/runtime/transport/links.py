"""Connections to all peers: who sends, who receives, and who waits.

Problem: a rank must take what its peers send even while it computes, or their sends would block for
ever on full sockets; but a thread that receives costs a change of threads for every message of a
rank that waits anyway.

Idea: whoever waits (`LinkWaiter`) receives, and spends nothing on it. Only while nobody waits does
one thread, the pump, do it instead; it sleeps in `poll` as long as nothing comes. Sending never
waits: what a socket does not take at once stays in line and goes out when it does. How much that
can be is bounded by the algorithms, which write into a slot again only when everybody has what was
in it before. For the same reason slots need not be copied for the line.

A link ends when all that its peer has sent has been received: what a peer says last is why it
leaves.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from braid.errors import BraidError, PeerLostError
from braid.runtime.clock import Clock
from braid.runtime.transport.health import Health
from braid.runtime.transport.memory import CLOSED, NAMES_START, STATE, Root
from braid.runtime.transport.mirror import ROOT_EXTENT, MirroredMemory, Writes, pack_writes
from braid.runtime.transport.wait import Doorbells, Sleep, Waiter, silent_pipe, yield_core
from braid.runtime.wire import Connection

__all__ = ["Link", "LinkWaiter", "Links"]

SPIN_NS = 200_000  # the answer of a peer that is there takes some 50 microseconds
LOCAL_LOOKS = 8
PAUSE_MS = 2  # of the pump while somebody else receives
TURN_S = 1e-3  # how long to wait for a thread that is receiving just now
FLUSH_MS = 50  # between two looks at the deadline
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Link:
    """The connection to one peer.

    Attributes:
        rank: Global rank of the peer.
        host: Name of its host; empty if it is this one.
        over_network: Whether there is a network on the way, which may break, too.
        fd: Descriptor of the socket.
        backlog: Number of bytes that the socket has not taken yet.
        open: Whether the connection is in use.

    Args:
        rank: See the attribute.
        connection: Connection after its handshake; owned by this object.
        root: Root of this rank, whose name table is sent to the peer as it grows.
        memory: Mirrors into which received data is written.
        host: See the attribute.
        over_network: See the attribute.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        root: Root,
        memory: MirroredMemory,
        *,
        host: str = "",
        over_network: bool = False,
    ) -> None:
        self.rank = rank
        self.over_network = over_network
        self.host = host
        self.fd = connection.fileno()
        self.backlog = 0
        self.open = True
        self._connection = connection
        self._memory = memory
        self._targets = partial(memory.targets, rank)
        self._root = memoryview(root.file.map)
        self._names_used = self._root[NAMES_START : NAMES_START + 8].cast("Q")
        self._names_sent = 0
        self._lock = threading.Lock()

    def send(self, writes: Writes, buffers: Sequence[memoryview]) -> None:
        """Send writes, or queue them; a peer that has gone gets nothing.

        The buffers must not change until the peer has them.

        Raises:
            PeerLostError: The connection broke for another reason.
        """
        with self._lock:
            if self._names_used[0] != self._names_sent:
                self._send_names()
            self.backlog = self._connection.post(pack_writes(writes), buffers)

    def flush(self) -> None:
        """Send what the socket takes now; raises like `send`."""
        with self._lock:
            self.backlog = self._connection.flush()

    def receive(self) -> bool:
        """Receive what has come; return whether there was a whole frame.

        Raises:
            PeerLostError: The connection has ended.
            CommError: The data makes no sense.
        """
        received = False
        while (frame := self._connection.try_recv(self._targets)) is not None:
            self._memory.apply(self.rank, frame.meta)
            received = True
        return received

    def close(self) -> None:
        """Close the socket."""
        self.open = False
        self.backlog = 0
        self._connection.close()

    def _send_names(self) -> None:
        """Send new names; texts go first, since the byte count tells which of them may be read."""
        used, sent = self._names_used[0], self._names_sent
        start = NAMES_START + 8 + sent
        writes = Writes(
            [(ROOT_EXTENT, start)], [(ROOT_EXTENT, NAMES_START, used.to_bytes(8, "little"))]
        )
        self._connection.post(pack_writes(writes), [self._root[start : NAMES_START + 8 + used]])
        self._names_sent = used


class Links:
    """All connections of a rank; owns the pump.

    Args:
        rank: This rank, for the name of the thread.
        links: By rank of the peer.
        memory: Told of the end of a connection.
        bells: Rung when something has come.
        health: Likewise, told of the end.
        clock: For `close`.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        *,
        memory: MirroredMemory,
        bells: Doorbells,
        health: Health,
        clock: Clock,
    ) -> None:
        self.by_rank = dict(links)
        self._memory = memory
        self._bells = bells
        self._health = health
        self._clock = clock
        self._by_fd = {link.fd: link for link in links.values()}
        self._poller = select.poll()
        for fd in self._by_fd:
            self._poller.register(fd, select.POLLIN)
        self._receiving = threading.Lock()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._closing = False
        self._wake = silent_pipe()
        self._pump = threading.Thread(target=self._run, name=f"braid-transport-{rank}", daemon=True)
        if links:
            self._pump.start()

    def fds(self) -> list[int]:
        """Return all descriptors."""
        return [*self._wake, *(link.fd for link in self.by_rank.values() if link.open)]

    def interests(self) -> list[tuple[int, int]]:
        """Return what to poll for: (descriptor, events)."""
        return [
            (link.fd, select.POLLIN | select.POLLOUT if link.backlog else select.POLLIN)
            for link in self._by_fd.values()
            if link.open
        ]

    def send(self, frames: Iterable[tuple[Link, Writes, Sequence[memoryview]]]) -> None:
        """Send each peer its writes, without waiting; peers that are gone are ignored."""
        backlog = False
        for link, writes, buffers in frames:
            if link.open:
                try:
                    link.send(writes, buffers)
                except PeerLostError as exc:
                    self._end(link, silence(exc))
                backlog |= link.backlog > 0
        if backlog and not self._num_waiting:
            self._wake_pump()

    def drain(self) -> bool:
        """Receive from all peers and send what is queued; return whether there was news."""
        if not self._receiving.acquire(timeout=TURN_S):  # another thread is at it
            return False
        news = False
        try:
            for fd, _ in self._poller.poll(0):
                link = self._by_fd[fd]
                if link.open:
                    news |= self._attempt(link, link.receive)
                if not link.open:
                    self._poller.unregister(fd)
            for link in self._by_fd.values():
                if link.backlog:
                    news |= self._attempt(link, link.flush)
        finally:
            self._receiving.release()
        if news:
            self._bells.ring_own()
        return news

    def begin_waiting(self) -> None:
        """Note that the calling thread receives from now on."""
        with self._counting:
            self._num_waiting += 1

    def end_waiting(self) -> None:
        """Note that the calling thread does not receive any longer."""
        with self._counting:
            self._num_waiting -= 1
        if not self._num_waiting and any(link.backlog for link in self._by_fd.values()):
            self._wake_pump()

    def close(self, linger_s: float) -> None:
        """Send what is queued, close all connections, and join the pump.

        Args:
            linger_s: Seconds that peers have to receive it.
        """
        deadline_ns = self._clock.after_ns(linger_s)
        self.drain()
        while any(link.backlog for link in self._by_fd.values()):
            if self._clock.now_ns() > deadline_ns:
                break
            poller = select.poll()
            for fd, events in self.interests():
                poller.register(fd, events)
            poller.poll(FLUSH_MS)
            self.drain()
        self._closing = True
        if self._pump.ident is not None:
            self._wake_pump()
            self._pump.join()
        for link in self.by_rank.values():
            link.close()
        for fd in self._wake:
            os.close(fd)

    def _attempt(self, link: Link, act: Callable[[], bool | None]) -> bool:
        """Whether there is news: a whole frame, or the end."""
        try:
            return bool(act())
        except PeerLostError as exc:
            self._end(link, silence(exc))
        # a peer's bytes can only end its own connection
        except Exception as exc:  # noqa: BLE001
            kind = "" if isinstance(exc, BraidError) else f"{type(exc).__name__}: "
            self._end(link, f"sent what makes no sense: {kind}{exc}")
        return True

    def _end(self, link: Link, how: str = "") -> None:
        state = self._memory.root(link.rank).words[STATE]
        link.close()
        where = f"on {link.host} " if link.host else ""
        if how or state != CLOSED:
            usual = "died, or the connection to it broke" if link.over_network else "died"
            self._health.ended(link.rank, where + (how or usual))
        else:
            self._health.ended(link.rank, f"{where}has closed its connections", left=True)
        self._memory.ended(link.rank)

    def _wake_pump(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"!")

    def _run(self) -> None:
        pause = select.poll()
        pause.register(self._wake[0], select.POLLIN)
        while not self._closing:
            poller = select.poll()
            for fd, events in [(self._wake[0], select.POLLIN), *self.interests()]:
                poller.register(fd, events)
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], 4096)
            if self._num_waiting:
                pause.poll(PAUSE_MS)
            elif not self._closing:
                self.drain()


def silence(exc: PeerLostError) -> str:
    """Return the reason if a peer's host has stopped answering; empty if the peer has ended."""
    cause = exc.__cause__
    if isinstance(cause, OSError) and cause.errno in _SILENT:
        return f"cannot be reached any more: its host or the network is down ({cause.strerror})"
    return ""


class LinkWaiter(Waiter):
    """Waits for data that comes by links, and receives meanwhile.

    Args:
        bells: Doorbells of this rank.
        health: Verdicts on peers.
        clock: Clock for the times of waits.
        links: Connections to all peers.
        crowded: Whether there are more ranks than cores, so that a thread without peers on this
            host sleeps at once.
        local: Whether some peers share memory with this rank.
    """

    def __init__(
        self,
        bells: Doorbells,
        health: Health,
        clock: Clock,
        links: Links,
        *,
        crowded: bool,
        local: bool = False,
    ) -> None:
        super().__init__(bells, health, clock, crowded=crowded)
        self._links = links
        self._spin_ns = 0 if crowded and not local else SPIN_NS
        self._looks = LOCAL_LOOKS if local else 1

    def until(self, ready: Callable[[], bool], check: Callable[[], None]) -> int:
        """See `Waiter.until`."""
        if ready():
            return 0
        links = self._links
        start = self._now_ns()
        links.begin_waiting()
        try:
            while self._now_ns() - start < self._spin_ns:
                # a local peer needs no call of the system to be seen; and who waits leaves the core
                # to those who work
                for _ in range(self._looks):
                    yield_core()
                    if ready():
                        return self._now_ns() - start
                links.drain()
                if ready():
                    return self._now_ns() - start
            with Sleep(self._bells) as sleep:
                while not sleep.poll(ready, self._health.fds(), links.interests()):
                    links.drain()
                    if not ready():
                        self._health.collect()
                        check()
        finally:
            links.end_waiting()
        return self._now_ns() - start
