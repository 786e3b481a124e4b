"""Vans inside one process: for programs on threads, and for tests of programs that use vans.

The thread that sends or receives transfers frames itself, under one lock for all nodes of a
network: no background thread, no socket, and no delay. Types, copies, order, back-pressure,
deadlines and epochs are as between processes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from braid.errors import CommError, ConfigError, RendezvousError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.message.guard import Guard
from braid.runtime.message.protocol.schema import Schema
from braid.runtime.message.protocol.send_queue import OutFrame
from braid.runtime.message.protocol.van_state import VanState
from braid.runtime.message.protocol.vocabulary import VanConfig
from braid.runtime.message.van import Van

__all__ = ["LocalNetwork", "LocalVan", "hand_over"]


class _End(NamedTuple):
    """One end of a link.

    Attributes:
        van: Van of the node at this end.
        link: Number of the link at this end.
    """

    van: LocalVan
    link: int


class LocalNetwork:
    """Nodes of one process, which connect to each other by name.

    Args:
        schema: Messages of all nodes.
        config: Limits of all nodes.
        clock: Clock for deadlines; must advance by itself; None for the host's clock.
    """

    def __init__(
        self, schema: Schema, *, config: VanConfig | None = None, clock: Clock | None = None
    ) -> None:
        self.schema = schema
        self.config = config or VanConfig()
        self.clock: Clock = clock or MonotonicClock()
        self.guard = Guard()
        self._vans: dict[str, LocalVan] = {}
        self._peer_ends: dict[int, _End] = {}
        self._links = itertools.count(1)
        self._incarnations = itertools.count(1)

    def join(self, node: str, *, epoch: int = 0) -> LocalVan:
        """Return a van for `node`.

        Raises:
            ConfigError: The network has a node of that name, or the name is not valid.
        """
        with self.guard:
            if node in self._vans:
                msg = f"this network already has a node {node}: close the van of that node first"
                raise ConfigError(msg)
            incarnation = next(self._incarnations)
            state = VanState(
                node,
                self.schema,
                self.config,
                incarnation=incarnation,
                epoch=epoch,
                detects_silence=False,
            )
            van = self._vans[node] = LocalVan(self, state)
            self.guard.notify_all()  # a van may wait to connect to it
            return van

    def link(self, node: str, to: str) -> None:
        """Link two nodes; both send Hello. The caller holds the network's lock.

        Raises:
            RendezvousError: The node `to` does not exist.
        """
        here, there = self._vans[node], self._vans.get(to)
        if there is None:
            names = ", ".join(self._vans)
            msg = (
                f"this process has no node {to} (only {names}): call join({to!r}) of the network "
                "first"
            )
            raise RendezvousError(msg)
        ours, theirs = next(self._links), next(self._links)
        self._peer_ends[ours] = _End(there, theirs)
        self._peer_ends[theirs] = _End(here, ours)
        now_ns = self.clock.now_ns()
        here.state.link_up(ours, to, now_ns)
        there.state.link_up(theirs, node, now_ns)
        here.act()
        there.act()

    def carry(self, state: VanState, link: int) -> None:
        """Transfer queued frames of `state` to the other end of `link` while that end reads.

        The caller holds the network's lock.
        """
        end = self._peer_ends.get(link)
        now_ns = self.clock.now_ns()
        while end is not None and end.van.state.wants_read(end.link):
            frame = state.next_frame(link, now_ns)
            if frame is None:
                return
            try:
                hand_over(frame, end.van.state, end.link, now_ns)
            except CommError as exc:
                end.van.state.link_lost(end.link, f"it broke the protocol: {exc}")
            state.frame_sent(link, now_ns)
            end.van.act()
            end = self._peer_ends.get(link)

    def read_again(self, link: int) -> None:
        """Transfer frames of a link again: its receiver has space. The caller holds the lock."""
        end = self._peer_ends.get(link)
        if end is not None:
            self.carry(end.van.state, end.link)
            end.van.act()

    def cut(self, link: int) -> None:
        """End both ends of a link that one end has removed. The caller holds the lock."""
        end = self._peer_ends.pop(link, None)
        if end is not None:
            self._peer_ends.pop(end.link, None)
            end.van.state.link_lost(end.link, "it closed the connection")
            end.van.act()

    def remove(self, node: str) -> None:
        """Remove a node after its van has closed."""
        with self.guard:
            del self._vans[node]


class LocalVan(Van):
    """Van (typed messages) between nodes of one process; made by `LocalNetwork.join`."""

    def __init__(self, network: LocalNetwork, state: VanState) -> None:
        super().__init__(state, network.schema, network.clock, network.guard)
        self._network = network

    @property
    def state(self) -> VanState:
        """State machine of the van; `LocalNetwork` uses it."""
        return self._state

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Link this node to another; wait for a node that has not joined yet."""
        deadline_ns = self._deadline_ns(timeout_s)
        with self._guard:
            self._check_open()
            while to not in self._state.peers:
                try:
                    self._network.link(self.node, to)
                except RendezvousError:
                    if not self._wait(deadline_ns):
                        raise

    def act(self) -> None:
        """Execute the instructions of the van's state machine; `LocalNetwork` calls this."""
        self._act()

    def _carry(self, link: int) -> None:
        self._network.carry(self._state, link)

    def _cut(self, link: int) -> None:
        self._network.cut(link)

    def _read_again(self, link: int) -> None:
        self._network.read_again(link)

    def _wait(self, deadline_ns: int) -> bool:
        due_ns = self._state.next_deadline_ns()
        waited = super()._wait(deadline_ns if due_ns is None else min(deadline_ns, due_ns))
        now_ns = self.clock.now_ns()
        self._tick_if_due(now_ns)
        return waited or now_ns < deadline_ns

    def _release(self) -> None:
        self._network.remove(self.node)


def hand_over(frame: OutFrame, receiver: VanState, link: int, now_ns: int) -> None:
    """Pass a frame to the receiving van in this process, with one copy of its pieces.

    Raises:
        CommError: The receiver refuses the frame.
    """
    if frame.pieces:
        targets = receiver.allocate(link, frame.meta, tuple(map(len, frame.pieces)), now_ns)
        for target, piece in zip(targets, frame.pieces, strict=True):
            target[:] = piece
    receiver.frame_received(link, frame.meta, now_ns)
