"""Vans inside one process: for programs on threads, and for tests of programs that use vans.

Frames are handed over by whoever sends or receives, under one lock for all nodes of a network: no
thread, no socket, and no delay. Everything else is as between processes: types, copies, order,
back-pressure, deadlines, epochs.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

from braid.clock import Clock, MonotonicClock
from braid.errors import CommError, ConfigError, RendezvousError
from braid.message.protocol.schema import Schema
from braid.message.protocol.van import VanConfig
from braid.message.protocol.van_state import Carry, Close, Instruction, VanState
from braid.message.vans.state_van import StateVan, hand_over

__all__ = ["LocalNetwork", "LocalVan"]


class _Member(NamedTuple):
    """One node: its state, and how to let it act on what happened to it."""

    state: VanState
    act: Callable[[], None]


class _End(NamedTuple):
    """Where a link leads."""

    member: _Member
    link: int


class LocalNetwork:
    """The nodes of one process, which find each other by name.

    Args:
        schema: The messages of all of them.
        config: Limits of all of them.
        clock: For deadlines; must move by itself; the host's when None.
    """

    def __init__(
        self, schema: Schema, *, config: VanConfig | None = None, clock: Clock | None = None
    ) -> None:
        self.schema = schema
        self.config = config or VanConfig()
        self.clock: Clock = clock or MonotonicClock()
        self.guard = threading.Condition()
        self._members: dict[str, _Member] = {}
        self._ends: dict[int, _End] = {}
        self._links = itertools.count(1)
        self._incarnations = itertools.count(1)

    def join(self, node: str, *, epoch: int = 0) -> LocalVan:
        """A van for `node`.

        Raises:
            ConfigError: There is a node of that name, or it is no name.
        """
        with self.guard:
            if node in self._members:
                msg = (
                    f"expected a new name in this network, found {node} again: close its van first"
                )
                raise ConfigError(msg)
            incarnation = next(self._incarnations)
            state = VanState(
                node,
                self.schema,
                self.config,
                incarnation=incarnation,
                epoch=epoch,
                watches_silence=False,
            )
            van = LocalVan(self, state)
            self._members[node] = _Member(state, van.act)
            self.guard.notify_all()  # somebody may wait to connect to it
            return van

    def link(self, node: str, to: str) -> None:
        """Join two nodes; both greet. With the guard held.

        Raises:
            RendezvousError: There is no node `to`.
        """
        here, there = self._members[node], self._members.get(to)
        if there is None:
            names = ", ".join(self._members)
            msg = f"expected a node {to} in this process, found {names}: let it join first"
            raise RendezvousError(msg)
        ours, theirs = next(self._links), next(self._links)
        self._ends[ours] = _End(there, theirs)
        self._ends[theirs] = _End(here, ours)
        now_ns = self.clock.now_ns()
        here.state.link_up(ours, to, now_ns)
        there.state.link_up(theirs, node, now_ns)
        here.act()
        there.act()

    def carry(self, state: VanState, link: int) -> None:
        """Hand over what `state` has for `link`, as long as the other end reads. With the guard held."""
        end = self._ends.get(link)
        now_ns = self.clock.now_ns()
        while end is not None and end.member.state.wants_read(end.link):
            frame = state.next_frame(link, now_ns)
            if frame is None:
                return
            try:
                hand_over(frame, end.member.state, end.link, now_ns)
            except CommError as exc:
                end.member.state.link_lost(end.link, f"it broke the protocol: {exc}")
            state.frame_sent(link, now_ns)
            end.member.act()
            end = self._ends.get(link)

    def read_again(self, link: int) -> None:
        """The node at this end of `link` has room again. With the guard held."""
        end = self._ends.get(link)
        if end is not None:
            self.carry(end.member.state, end.link)
            end.member.act()

    def cut(self, link: int) -> None:
        """This end of `link` has been given up. With the guard held."""
        end = self._ends.pop(link, None)
        if end is not None:
            self._ends.pop(end.link, None)
            end.member.state.link_lost(end.link, "it closed the connection")
            end.member.act()

    def leave(self, node: str) -> None:
        """The van of `node` is closed."""
        with self.guard:
            del self._members[node]


class LocalVan(StateVan):
    """A `Van` between nodes of one process; made by `LocalNetwork.join`."""

    def __init__(self, network: LocalNetwork, state: VanState) -> None:
        super().__init__(state, network.schema, network.clock, network.guard)
        self._network = network

    def __enter__(self) -> LocalVan:
        return self

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:  # noqa: ARG002 - Van's
        """See `Van.connect`; a node that has not joined yet is waited for."""
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
        """Something happened to this node's state; for the network."""
        self._act()

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Carry):
            self._network.carry(self._state, instruction.link)
        elif isinstance(instruction, Close):
            self._network.cut(instruction.link)
        else:
            self._network.read_again(instruction.link)

    def _wait(self, deadline_ns: int) -> bool:
        due_ns = self._state.next_deadline_ns()
        waited = super()._wait(deadline_ns if due_ns is None else min(deadline_ns, due_ns))
        now_ns = self._clock.now_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._state.tick(now_ns)
            self._act()
        return waited or now_ns < deadline_ns

    def _shut(self) -> None:
        self._network.leave(self.node)
