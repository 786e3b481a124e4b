"""Listens for launchers that were started by hand on other hosts and ask to join the job."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import AGENT_ROLE, AgentHello, AgentRefused
from braid.launch.cluster.agent_registry import AgentRegistry
from braid.runtime.clock import Clock
from braid.runtime.message import Message
from braid.runtime.wire import Identity, Listener, Secret

__all__ = ["JOIN_RUN_ID", "JoinListener"]

JOIN_RUN_ID = "braid-nodes"  # accepted launchers then receive the run's own name
MAX_NOTICES = 20  # limit for a host that scans ports
Judge = Callable[[AgentHandle], str]


class JoinListener:
    """Accepts connections of launchers that know the secret, if a callback admits them.

    Args:
        addresses: Addresses to listen on.
        secret: Secret of all nodes.
        clock: Time source.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(self, addresses: Sequence[str], secret: Secret, clock: Clock) -> None:
        identity = Identity(JOIN_RUN_ID, AGENT_ROLE, -1)
        self._pending: list[AgentHandle] = []
        self._reported: dict[str, tuple[str, ...]] = {}
        self._num_notices = 0
        self._selector: selectors.BaseSelector | None = None
        self._registry: AgentRegistry | None = None
        self._judge: Judge | None = None
        self._notice: Callable[[str], None] | None = None
        with ExitStack() as undo:
            self._listeners = [
                undo.enter_context(
                    Listener(address, secret, identity, listen_anywhere=True, clock=clock)
                )
                for address in addresses
            ]
            undo.pop_all()

    @property
    def addresses(self) -> list[str]:
        """Addresses of the listener, with the actual ports."""
        return [listener.address for listener in self._listeners]

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due even if no descriptor is readable."""
        due = [listener.next_deadline_ns() for listener in self._listeners]
        return min((ns for ns in due if ns is not None), default=None)

    def register(
        self,
        selector: selectors.BaseSelector,
        registry: AgentRegistry,
        judge: Judge,
        notice: Callable[[str], None],
    ) -> None:
        """Register with a selector; call `poll` when a listener is readable.

        Args:
            selector: Selector that polls the listeners; the data of a key is the function to call.
            registry: Registry that receives the messages of the launchers.
            judge: Called with each launcher that has sent hello. Returns the reason for a refusal,
                or an empty string if it admits the launcher, which the judge then owns.
            notice: Shows a text about refused launchers to the user.
        """
        self.unregister()
        self._selector, self._registry = selector, registry
        self._judge, self._notice = judge, notice
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self.poll)

    def unregister(self) -> None:
        """Unregister from the selector. Idempotent."""
        if self._selector is not None:
            for listener in self._listeners:
                self._selector.unregister(listener)
            self._selector = None

    def poll(self) -> None:
        """Accept launchers that have proven their knowledge of the secret; report all others."""
        for listener in self._listeners:
            for connection in listener.accept_ready():
                assert self._registry is not None
                agent = self._registry.admit(connection, self._on_message, self._on_lost)
                self._pending.append(agent)
            self._report_refusals(listener)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.unregister()
        for listener in self._listeners:
            listener.close()

    def _report_refusals(self, listener: Listener) -> None:
        """Notify the user of connections that were refused, up to a limit."""
        refusals = listener.refusals
        if self._notice is None or self._reported.get(listener.address, ()) == refusals:
            return
        self._reported[listener.address] = refusals
        self._num_notices += 1
        if self._num_notices <= MAX_NOTICES:
            self._notice(f"refused {refusals[-1]}")

    def _on_message(
        self,
        agent: AgentHandle,
        message: Message,
        buffers: Sequence[memoryview],  # noqa: ARG002 - a hello has none
    ) -> None:
        if not isinstance(message, AgentHello) or self._judge is None or agent not in self._pending:
            return
        reason = self._judge(agent)
        if not reason:
            self._pending.remove(agent)
            return
        agent.send(AgentRefused(reason))  # the launcher closes the connection when it reads this
        if self._notice is not None:
            self._notice(f"refused {agent.name} ({message.hostname}, pid {message.pid}): {reason}")

    def _on_lost(self, agent: AgentHandle, why: str) -> None:  # noqa: ARG002 - not yet admitted
        if agent in self._pending:
            self._pending.remove(agent)
