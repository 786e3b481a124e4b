"""A rank on another host: its agent is its parent, and what the agent says is all that is known of its process."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGKILL
from typing import TypeAlias

from braid.diagnose import ParsedError, RankEnd, RankView, clause
from braid.launch.cluster.agent_handle import AgentHandle
from braid.launch.cluster.agent_messages import (
    FinalRecord,
    NotStarted,
    Output,
    ProcessChanged,
    Send,
    Started,
)
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.processes import Change
from braid.launch.process.rank_snapshot import RankObserver
from braid.launch.supervise.backend import RankSpec
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.supervisor_state import RankFacts

__all__ = ["OfRank", "RemoteRank"]

CANNOT_START = 127  # the shell's exit code for a program that cannot be started
OfRank: TypeAlias = Started | NotStarted | Output | FinalRecord | ProcessChanged


class RemoteRank(Rank):
    """A rank that an agent has been told to start.

    Args:
        spec: Everything that is ready for it; its box becomes a copy of the one on its host.
        agent: The agent of its host.
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
        """What its agent says of it; a change of its process, on the launcher's clock, is returned."""
        if isinstance(message, Started):
            self._pid = message.pid
        elif isinstance(message, Output):
            self.output.feed(message.stream, bytes(buffers[0]), self._clock.now_ns())
        elif isinstance(message, FinalRecord):
            pieces = list(zip(message.offsets, map(bytes, buffers), strict=False))
            self.box.load(pieces, bytes(buffers[-1]))
        elif isinstance(message, NotStarted):
            words = f"braid: cannot start this rank: {message.problem}\n"
            self.output.feed(2, words.encode(), self._clock.now_ns())
            return Change("exited", CANNOT_START)
        else:
            t_ns = min(message.t_ns + self._agent.offset_ns, self._clock.now_ns())
            return Change(message.kind, message.status, t_ns, message.memory_kill)
        return None

    def on_open_waits(self, waits: list[OpenWait]) -> None:
        """It is inside of these, on its own clock."""
        self._waits = waits

    def on_snapshot(self, view: RankView) -> None:
        """Its agent has looked at it."""
        self._view = view

    def on_host_lost(self, why: str) -> Change:
        """Its host is gone, and it with it."""
        self._lost = why
        return Change("lost", 0, self._clock.now_ns())

    def signal(self, signum: int) -> None:
        """Have it sent a signal, unless it has ended."""
        if self.alive:
            self._agent.send(Send(self.rank, signum))

    def drain(self) -> None:
        """Nothing to do: what it wrote came before the news of its end."""

    def error(self) -> ParsedError | None:
        """What it said of its failure; that its host is gone, when it said nothing."""
        if self._lost and self.failure is None:
            return ParsedError(type="HostLost", message=self._lost)
        return super().error()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Note how it ended."""
        self._waits = []
        return super().ended(change, facts)

    def waits(self) -> list[OpenWait]:
        """Collectives that it was inside of, a second ago at most."""
        return [self._here(wait) for wait in self._waits]

    def request_stack(self) -> None:
        """Have it asked for its stack, with all others of its host."""
        self._view = None
        self.wants_stacks = True

    @property
    def has_answered(self) -> bool:
        """Whether its agent has said what it saw."""
        return not self.alive or self._view is not None

    def view(self) -> RankView:
        """What its agent saw; what it has left, when it has ended."""
        ended = clause(self.end) if self.end is not None else ""
        view = self._view
        if view is None or not self.alive:
            look = RankObserver(self.rank, self.pid, self.box, self._clock)
            view = look.view(alive=False)
        shift_ns = self._agent.offset_ns
        spans = tuple(span._replace(t_ns=span.t_ns + shift_ns) for span in view.spans)
        return view._replace(spans=spans, ended=ended)

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """From its record, of which there is a copy here once it has ended."""
        if self.alive:
            return None
        look = RankObserver(self.rank, self.pid, self.box, self._clock)
        return look.lasted_ns(wait._replace(t_ns=wait.t_ns - self._agent.offset_ns))

    def close(self) -> None:
        """End it if it lives, and close everything. Idempotent."""
        self.signal(SIGKILL)
        self._hang_up()
        self.output.close(self._clock.now_ns())
        self.box.close()

    def _here(self, wait: OpenWait) -> OpenWait:
        return wait._replace(t_ns=wait.t_ns + self._agent.offset_ns)
