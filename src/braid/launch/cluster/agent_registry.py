"""Connects a launcher with all of its agents through one van."""

from __future__ import annotations

import itertools
import selectors
from contextlib import ExitStack

from braid.launch.cluster.agent_channel import MESSAGES_PER_TURN, van_config
from braid.launch.cluster.agent_handle import END_LIMIT_S, SILENCE_S, AgentHandle, OnLost, OnMessage
from braid.launch.cluster.agent_messages import AGENT_ROLE, AGENT_SCHEMA
from braid.launch.cluster.remote_shell import Placed, Placement
from braid.runtime.clock import Clock
from braid.runtime.message import PipeVan
from braid.runtime.wire import Connection

__all__ = ["AgentRegistry"]


class AgentRegistry:
    """All agents of a launcher, on one van; closing the registry ends the agents.

    The van numbers agents independently of hosts, because several may claim to be the same host. A
    launcher that has joined is removed when it is lost, so that it can join again.

    Args:
        clock: Time source.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._van = PipeVan("launcher", AGENT_SCHEMA, config=van_config(SILENCE_S), clock=clock)
        self._agents: dict[str, AgentHandle] = {}
        self._numbers = itertools.count()
        self._selector: selectors.BaseSelector | None = None

    def start(
        self, node: int, name: str, placement: Placement, on_message: OnMessage, on_lost: OnLost
    ) -> AgentHandle:
        """Start an agent on a host and return its handle.

        Args:
            node: Number of the host.
            name: Name of the host for messages.
            placement: Way to start a process on the host.
            on_message: Called with each message and its buffers.
            on_lost: Called once when the agent is lost, with the reason.

        Raises:
            ConfigError: The agent cannot be started.
        """
        return self._add(self._new_peer(), node, name, placement.start(), on_message, on_lost)

    def admit(self, connection: Connection, on_message: OnMessage, on_lost: OnLost) -> AgentHandle:
        """Register a launcher that joins as an agent over an authenticated connection.

        The callbacks are the same as for `start`.
        """
        peer, node = self._new_peer(), connection.peer.rank
        self._van.attach(peer, connection)
        return self._add(peer, node, f"node {node}", None, on_message, on_lost)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with `selector`; the data of a key is the function to call."""
        self.unregister()
        self._selector = selector
        selector.register(self._van, selectors.EVENT_READ, self._on_readable)
        for agent in self._agents.values():
            agent.register(selector)

    def unregister(self) -> None:
        """Unregister from the selector. Idempotent."""
        if self._selector is not None:
            self._selector.unregister(self._van)
            self._selector = None
            for agent in self._agents.values():
                agent.unregister()

    def close(self) -> None:
        """Close all connections and wait for the agents, which end their ranks. Idempotent."""
        self.unregister()
        deadline_ns = self._clock.after_ns(END_LIMIT_S)
        with ExitStack() as stack:
            for agent in self._agents.values():
                stack.callback(agent.close, deadline_ns)
            for agent in self._agents.values():
                stack.callback(agent.hang_up)
            self._van.close()

    def _new_peer(self) -> str:
        return f"{AGENT_ROLE}:{next(self._numbers)}"

    def _add(
        self,
        peer: str,
        node: int,
        name: str,
        placed: Placed | None,
        on_message: OnMessage,
        on_lost: OnLost,
    ) -> AgentHandle:
        agent = self._agents[peer] = AgentHandle(
            node,
            name,
            self._van,
            peer,
            placed,
            clock=self._clock,
            on_message=on_message,
            on_lost=on_lost,
        )
        if self._selector is not None:
            agent.register(self._selector)
        return agent

    def _on_readable(self) -> None:
        """Pass the messages that have arrived to their agents."""
        for _ in range(MESSAGES_PER_TURN):
            delivery = self._van.try_recv()
            if delivery is None:
                return
            agent = self._agents[delivery.sender]
            agent.receive(delivery)
            if not agent.alive and agent.has_joined:
                del self._agents[delivery.sender]
