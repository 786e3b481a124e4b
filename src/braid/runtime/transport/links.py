"""Connections to all peers, and the threads that send and receive on them.

Problem: a rank must receive what its peers send even while it computes, or their sends would block
without end on full sockets. But if a separate thread receives, a rank that waits for a message
needs a thread switch for each one.

Idea: a thread that waits (`LinkWaiter`) also receives, at no extra cost. While no thread waits, one
other thread, the pump, receives; it sleeps in `poll` until data arrives. Sending never blocks:
bytes that a socket does not take are queued and sent later. The algorithms bound the size
of the queue, since they write into a slot again only when all peers have received its previous
content. For the same reason slots need not be copied into the queue.

A link ends when all data of its peer has been received: the last data contains the reason.
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

SPIN_NS = 200_000  # a peer that is ready answers within about 50 microseconds
LOCAL_LOOKS = 8
PAUSE_MS = 2  # pause of the pump while another thread receives
TURN_S = 1e-3  # how long to wait for a thread that is receiving
FLUSH_MS = 50  # pause between two checks of the deadline
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Link:
    """The connection to one peer.

    Attributes:
        rank: Global rank of the peer.
        host: Name of the peer's host; empty if it is this host.
        over_network: Whether the peer is on another host, so that the network may fail as well.
        fd: Descriptor of the socket.
        backlog: Number of bytes that the socket has not taken yet.
        open: Whether the connection is in use.

    Args:
        rank: See the attribute.
        connection: Connection after its handshake; owned by this object.
        root: First memory of this rank; its name table is sent to the peer as it grows.
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
        """Send writes, or queue them; without effect if the peer has ended.

        The buffers must not change until the peer has received them.

        Raises:
            PeerLostError: The connection failed for another reason.
        """
        with self._lock:
            if self._names_used[0] != self._names_sent:
                self._send_names()
            self.backlog = self._connection.post(pack_writes(writes), buffers) or 0

    def flush(self) -> None:
        """Send queued bytes that the socket takes now; raises like `send`."""
        with self._lock:
            self.backlog = self._connection.flush() or 0

    def receive(self) -> bool:
        """Receive available data; return whether a whole frame has arrived.

        Raises:
            PeerLostError: The connection has ended.
            CommError: The data is not a valid frame.
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
        """Send new names: texts first, since the byte count shows how many of them are valid."""
        used, sent = self._names_used[0], self._names_sent
        start = NAMES_START + 8 + sent
        writes = Writes(
            [(ROOT_EXTENT, start)], [(ROOT_EXTENT, NAMES_START, used.to_bytes(8, "little"))]
        )
        self._connection.post(pack_writes(writes), [self._root[start : NAMES_START + 8 + used]])
        self._names_sent = used


class Links:
    """All connections of a rank; owns the thread that receives in the background.

    Args:
        rank: This rank, for the name of the thread.
        links: Connections by rank of the peer.
        memory: Mirrors of the peers' memory, notified when a connection ends.
        bells: Doorbells of this rank, which wake its threads when data has arrived.
        health: Collector of lost peers.
        clock: Time source for the deadline of `close`.
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
        """Return the (descriptor, events) pairs to poll."""
        return [
            (link.fd, select.POLLIN | select.POLLOUT if link.backlog else select.POLLIN)
            for link in self._by_fd.values()
            if link.open
        ]

    def send(self, frames: Iterable[tuple[Link, Writes, Sequence[memoryview]]]) -> None:
        """Send each peer its writes, without waiting; peers that have ended are ignored."""
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
        """Receive from all peers and send queued bytes; return whether data has arrived."""
        if not self._receiving.acquire(timeout=TURN_S):  # another thread receives
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
        """Record that the calling thread receives, so that the background thread can sleep."""
        with self._counting:
            self._num_waiting += 1

    def end_waiting(self) -> None:
        """Record that the calling thread no longer receives."""
        with self._counting:
            self._num_waiting -= 1
        if not self._num_waiting and any(link.backlog for link in self._by_fd.values()):
            self._wake_pump()

    def close(self, linger_s: float) -> None:
        """Send queued bytes, close all connections, and end the background thread.

        Args:
            linger_s: Seconds to wait until the peers have received them.
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
        """Call `act`; return whether a whole frame has arrived or the link has ended."""
        try:
            return bool(act())
        except PeerLostError as exc:
            self._end(link, silence(exc))
        # invalid bytes of a peer must only end its own connection
        except Exception as exc:  # noqa: BLE001
            kind = "" if isinstance(exc, BraidError) else f"{type(exc).__name__}: "
            self._end(link, f"sent invalid data: {kind}{exc}")
        return True

    def _end(self, link: Link, how: str = "") -> None:
        state = self._memory.root(link.rank).words[STATE]
        link.close()
        where = f"on {link.host} " if link.host else ""
        if how or state != CLOSED:
            usual = "died, or the connection to it broke" if link.over_network else "died"
            self._health.ended(link.rank, where + (how or usual))
        else:
            self._health.ended(link.rank, f"{where}has closed its connections", on_purpose=True)
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
    """Return the failure of the peer's host or the network; empty if the peer itself has ended."""
    cause = exc.__cause__
    if isinstance(cause, OSError) and cause.errno in _SILENT:
        return f"cannot be reached any more: its host or the network is down ({cause.strerror})"
    return ""


class LinkWaiter(Waiter):
    """Waits for data from links, and receives it.

    Args:
        bells: Doorbells (pipes) that wake this rank's threads.
        health: Collector of lost peers.
        clock: Clock for the durations of waits.
        links: Connections to all peers.
        crowded: Whether this host has more ranks than cores; a thread without peers on this host
            then sleeps immediately.
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
        """Wait until `ready()` is true, and return the nanoseconds it took; see `Waiter.until`."""
        if ready():
            return 0
        links = self._links
        start = self._now_ns()
        links.begin_waiting()
        try:
            while self._now_ns() - start < self._spin_ns:
                # memory of local peers is checked without a system call; yielding leaves the core
                # to threads that work
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
