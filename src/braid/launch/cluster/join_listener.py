"""Where launchers that were started by hand on other hosts come in, one of them early, one late, one a stranger."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from braid.clock import Clock
from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import AGENT_ROLE, AgentHello, Refused
from braid.launch.cluster.agent_registry import AgentRegistry
from braid.message import Message
from braid.wire import Identity, Listener, Secret

__all__ = ["JOIN_RUN_ID", "JoinListener"]

JOIN_RUN_ID = "braid-nodes"  # the run's own name is told to those who are let in
MAX_NOTICES = 20  # somebody may be scanning ports
Judge = Callable[[AgentHandle], str]


class JoinListener:
    """Listens for launchers, and asks whether each may take part.

    Args:
        addresses: Where to listen.
        secret: Known to all nodes.
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
        """Where it listens, with the real ports."""
        return [listener.address for listener in self._listeners]

    @property
    def deadline_ns(self) -> int | None:
        """When `poll` is due though nothing is readable."""
        due = [listener.next_deadline_ns() for listener in self._listeners]
        return min((ns for ns in due if ns is not None), default=None)

    def register(
        self,
        selector: selectors.BaseSelector,
        registry: AgentRegistry,
        judge: Judge,
        notice: Callable[[str], None],
    ) -> None:
        """Be watched by `selector` from now on.

        Args:
            selector: Its keys' data is what to call.
            registry: Where those who come in are heard.
            judge: Asked about each that has said who it is: why it may not take part, or empty;
            then it is the judge's.
            notice: Told of those who were turned away.
        """
        self.unregister()
        self._selector, self._registry = selector, registry
        self._judge, self._notice = judge, notice
        for listener in self._listeners:
            selector.register(listener, selectors.EVENT_READ, self.poll)

    def unregister(self) -> None:
        """Be watched no more."""
        if self._selector is not None:
            for listener in self._listeners:
                self._selector.unregister(listener)
            self._selector = None

    def poll(self) -> None:
        """Let in who has proven that it knows the secret; tell of those who have not."""
        for listener in self._listeners:
            for connection in listener.accept_ready():
                assert self._registry is not None
                agent = self._registry.admit(connection, self._on_message, self._on_lost)
                self._pending.append(agent)
            self._report_refusals(listener)

    def close(self) -> None:
        """Turn everybody away. Idempotent."""
        self.unregister()
        for listener in self._listeners:
            listener.close()

    def _report_refusals(self, listener: Listener) -> None:
        """SendToRank of strangers, as far as there are not too many."""
        refusals = listener.refusals
        if self._notice is None or self._reported.get(listener.address, ()) == refusals:
            return
        self._reported[listener.address] = refusals
        self._num_notices += 1
        if self._num_notices <= MAX_NOTICES:
            self._notice(f"turned away {refusals[-1]}")

    def _on_message(
        self,
        agent: AgentHandle,
        message: Message,
        buffers: Sequence[memoryview],  # noqa: ARG002 - none follow
    ) -> None:
        if not isinstance(message, AgentHello) or self._judge is None or agent not in self._pending:
            return
        reason = self._judge(agent)
        if not reason:
            self._pending.remove(agent)
            return
        agent.send(Refused(reason))  # it hangs up when it has read that
        if self._notice is not None:
            self._notice(
                f"turned away {agent.name} ({message.hostname}, pid {message.pid}): {reason}"
            )

    def _on_lost(self, agent: AgentHandle, why: str) -> None:  # noqa: ARG002 - it was nobody yet
        if agent in self._pending:
            self._pending.remove(agent)
