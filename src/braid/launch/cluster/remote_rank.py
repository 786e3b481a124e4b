"""A rank on another host; the host's agent reports the state of its process."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL
from typing import TypeAlias

from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import (
    FinalRecord,
    NotStarted,
    Output,
    ProcessChanged,
    RankStarted,
    SignalRequest,
)
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.processes import Change
from braid.launch.process.rank_snapshot import RankObserver
from braid.launch.supervise.backend import RankSpec
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.supervisor_state import RankFacts
from braid.runtime.diagnose.hang_view import RankView
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import RankEnd, clause

__all__ = ["RemoteRank"]

CANNOT_START = 127  # the shell's exit code for a program that cannot be started
OfRank: TypeAlias = RankStarted | NotStarted | Output | FinalRecord | ProcessChanged


class RemoteRank(Rank):
    """A rank that an agent starts.

    Args:
        spec: Objects of the rank; its box becomes a copy of the box (events and stacks) on the
            rank's host.
        agent: Agent of the rank's host.

    Attributes:
        wants_stacks: Whether a stack request for the rank has not been sent yet.
    """

    def __init__(self, spec: RankSpec, agent: AgentHandle) -> None:
        super().__init__(
            spec.environment.rank,
            box=spec.box,
            output=spec.output,
            selector=spec.selector,
            on_message=spec.on_message,
            clock=spec.clock,
            host=agent.name,
        )
        self._agent = agent
        self._pid = 0
        self._lost = ""
        self._waits: list[OpenWait] = []
        self._view: RankView | None = None
        self.wants_stacks = False
        spec.box.ring.clock_offset_ns = agent.offset_ns

    @property
    def pid(self) -> int:
        """Process id on its host; 0 while unknown."""
        return self._pid

    def on_agent_message(self, message: OfRank, buffers: Sequence[memoryview]) -> Change | None:
        """Process a message of the agent about this rank.

        Returns:
            State change of the process, on the launcher's clock; None if there is none.
        """
        if isinstance(message, RankStarted):
            self._pid = message.pid
        elif isinstance(message, Output):
            self.output.feed(message.stream, bytes(buffers[0]), self._clock.now_ns())
        elif isinstance(message, FinalRecord):
            pieces = list(zip(message.offsets, map(bytes, buffers), strict=False))
            self.box.load(pieces, bytes(buffers[-1]))
        elif isinstance(message, NotStarted):
            text = f"braid: cannot start this rank: {message.problem}\n"
            self.output.feed(2, text.encode(), self._clock.now_ns())
            return Change("exited", CANNOT_START)
        else:
            t_ns = min(message.t_ns + self._agent.offset_ns, self._clock.now_ns())
            return Change(message.kind, message.status, t_ns, message.memory_kill)
        return None

    def on_open_waits(self, waits: list[OpenWait]) -> None:
        """Record the open collectives of the rank, on its host's clock."""
        self._waits = waits

    def on_snapshot(self, view: RankView) -> None:
        """Record the agent's answer to a stack request."""
        self._view = view

    def on_host_lost(self, why: str) -> Change:
        """Mark the rank as lost with its host, for the reason `why`, and return the change."""
        self._lost = why
        return Change("lost", 0, self._clock.now_ns())

    def signal(self, signum: int) -> None:
        """Ask the agent to send the rank a signal, unless the rank has ended."""
        if self.alive:
            self._agent.send(SignalRequest(self.rank, signum))

    def drain(self) -> None:
        """Do nothing: output of the rank arrives before the news of its end."""

    def error(self) -> ParsedError | None:
        """Return the rank's error; the loss of its host if the rank has reported none."""
        if self._lost and self.failure is None:
            return ParsedError(type="HostLost", message=self._lost)
        return super().error()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Record and return how the rank ended."""
        self._waits = []
        return super().ended(change, facts)

    def waits(self) -> list[OpenWait]:
        """Return the open collectives of the rank, at most a second old."""
        offset_ns = self._agent.offset_ns
        return [wait._replace(t_ns=wait.t_ns + offset_ns) for wait in self._waits]

    def request_stack(self) -> None:
        """Request a stack dump; the backend sends one request for all ranks of a host."""
        self._view = None
        self.wants_stacks = True

    @property
    def has_answered(self) -> bool:
        """Whether the agent has answered the last stack request."""
        return not self.alive or self._view is not None

    def view(self) -> RankView:
        """Return the agent's last snapshot; the contents of the black box if the rank has ended."""
        ended = clause(self.end) if self.end is not None else ""
        view = self._view
        if view is None or not self.alive:
            look = RankObserver(self.rank, self.pid, self.box, self._clock)
            view = look.view(alive=False)
        shift_ns = self._agent.offset_ns
        spans = tuple(span._replace(t_ns=span.t_ns + shift_ns) for span in view.spans)
        links = tuple(x._replace(received_ns=x.received_ns + shift_ns) for x in view.links)
        return view._replace(spans=spans, ended=ended, links=links)

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """Return the duration of a wait that is over; None if unknown.

        It is unknown while the rank lives, since the rank's events are then on the other host.
        """
        if self.alive:
            return None
        look = RankObserver(self.rank, self.pid, self.box, self._clock)
        return look.lasted_ns(wait._replace(t_ns=wait.t_ns - self._agent.offset_ns))

    def close(self) -> None:
        """Kill the rank if it lives, and release all resources. Idempotent."""
        self.signal(SIGKILL)
        self._hang_up()
        self.output.close(self._clock.now_ns())
        self.box.close()
