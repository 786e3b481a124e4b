"""The launcher's view of one rank, on any host: its messages, its output and its end.

A braid program connects to the launcher itself, from any host. The launcher or the agent that
started the process reports its state changes as `Change`.
"""

from __future__ import annotations

import re
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable

from braid.errors import BraidError
from braid.launch.process.black_box import BlackBox
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.supervise.supervisor_state import RankFacts
from braid.runtime.clock import Clock
from braid.runtime.diagnose.hang_view import RankView
from braid.runtime.diagnose.tracebacks import ParsedError, final_error, parse_error
from braid.runtime.diagnose.verdict import RankEnd
from braid.runtime.rendezvous import Exiting, FromLauncher, FromRank, RankFailed
from braid.runtime.rendezvous.control import decode_from_rank, encode
from braid.runtime.wire import Connection

__all__ = ["Rank"]

OWN_LINE = re.compile(r"(?!braid: )\s*\S")  # of the program, and not a hint of braid


class Rank(ABC):
    """A started rank.

    Args:
        rank: Number of the rank.
        box: Black box of the rank (its events and stacks); owned and closed by this object.
        output: Destination of the rank's output; owned and closed by this object.
        selector: Selector that polls the rank's connection; the data of a key is the function to
            call.
        on_message: Called with each message from the rank.
        clock: Time source.
        host: Name of the rank's host; empty on the launcher's own.

    Attributes:
        has_joined: Whether the rank has joined the job, and so dumps its stack on request.
        left_ns: Time at which the rank left its groups (launcher's clock), if no signal of the
            launcher made it leave; None if it has not.
        missed: Ranks that had left before, while this rank still needed them.
        failure: The failure that the rank has reported; None if it has not.
        exiting: The call of `sys.exit` that the rank has reported; None if it has not.
        end: End of the rank; None while it lives.
    """

    def __init__(
        self,
        rank: int,
        *,
        box: BlackBox,
        output: RankOutput,
        selector: selectors.BaseSelector,
        on_message: Callable[[Rank, FromRank], None],
        clock: Clock,
        host: str = "",
    ) -> None:
        self.rank = rank
        self.host = host
        self.box = box
        self.output = output
        self.has_joined = False
        self.left_ns: int | None = None
        self.missed: tuple[int, ...] = ()
        self.failure: RankFailed | None = None
        self.exiting: Exiting | None = None
        self.end: RankEnd | None = None
        self._control: Connection | None = None
        self._has_connected = False
        self._unsent: list[FromLauncher] = []  # messages from before the rank connected
        self._selector = selector
        self._on_message = on_message
        self._clock = clock

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on the rank's host; 0 while unknown."""

    @property
    def alive(self) -> bool:
        """Whether the rank's process has not been reaped."""
        return self.end is None

    @property
    def name(self) -> str:
        """Name for messages, such as `rank 1 on host b (pid 812)`."""
        host = f" on host {self.host}" if self.host else ""
        return f"rank {self.rank}{host} (pid {self.pid})"

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send the rank a signal, unless it has ended."""

    @abstractmethod
    def drain(self) -> None:
        """Read all output of the rank that has arrived on this host."""

    @abstractmethod
    def waits(self) -> list[OpenWait]:
        """Return the open collectives of the rank, on the launcher's clock."""

    @abstractmethod
    def request_stack(self) -> None:
        """Request a stack dump from the rank; `view` contains it a moment later."""

    @property
    def has_answered(self) -> bool:
        """Whether no answer to the last `request_stack` is outstanding from another host."""
        return True

    @abstractmethod
    def view(self) -> RankView:
        """Return a view of the rank from outside, on the launcher's clock."""

    @abstractmethod
    def lasted_ns(self, wait: OpenWait) -> int | None:
        """Return the duration of a wait that is over; None if unknown."""

    @abstractmethod
    def close(self) -> None:
        """Kill the process if it lives, and release all resources. Idempotent."""

    def last_events(self, at_ns: int | None = None, *, gave_up: bool = False) -> str:
        """Describe the rank's last activity; see `BlackBox.last_events`.

        Args:
            at_ns: Time of the fault, on the launcher's clock; now when None.
            gave_up: Whether the rank ended because of another rank.
        """
        if at_ns is not None:
            at_ns -= self.box.ring.clock_offset_ns
        return self.box.last_events(at_ns, gave_up=gave_up)

    def adopt(self, connection: Connection) -> None:
        """Use `connection` as the rank's control connection; a second one is closed."""
        if self._control is not None or not self.alive:
            connection.close()
            return
        self._control = connection
        self._selector.register(connection, selectors.EVENT_READ, self.on_message)
        self._has_connected = True
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.send(message)
        self.on_message()

    def on_message(self) -> None:
        """Process all messages that have arrived on the control connection."""
        try:
            while self._control is not None and (frame := self._control.try_recv()) is not None:
                self._on_message(self, decode_from_rank(frame.meta))
        except BraidError:  # closed or corrupt; the end of the process explains why
            self._hang_up()

    def send(self, message: FromLauncher) -> None:
        """Send a message, now or once the rank connects; never blocks."""
        try:
            if self.alive and self._control is not None:
                self._control.post(encode(message))
            elif self.alive and not self._has_connected:
                self._unsent.append(message)
        except BraidError:
            self._hang_up()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Record and return how the rank ended, after its process has been reaped.

        Args:
            change: Last state change of the process.
            facts: State of the process, as the supervisor knows it.
        """
        ended_ns = change.t_ns or self._clock.now_ns()
        exit_code = change.status if change.kind == "exited" else None
        signum = change.status if change.kind == "killed" else None
        asked = facts.signalled and facts.failed_ns is None
        was_stopped = asked and facts.stopped_ns is not None
        stopped_s = facts.stops_ns(ended_ns) / 1e9 if was_stopped else None
        if facts.failed_ns is not None:  # the rank failed then; the launcher may have ended it
            ended_ns = facts.failed_ns
            reported_code = 1 if self.exiting is None else self.exiting.code
            exit_code, signum = (reported_code, None) if facts.signalled else (exit_code, signum)
        elif self.left_ns is not None and (exit_code or asked):
            # its peers lost it when it left its groups
            ended_ns = min(ended_ns, self.left_ns)
        lines = self.output.stderr_tail.splitlines() if exit_code != 0 else []
        error = self.error()
        if error is None and exit_code != 0 and self.exiting is None:
            error = final_error(self.output.stderr_tail, exit_code=exit_code, signal=signum)
        age_ns = ended_ns - (self.output.stderr_ns or ended_ns)
        self.end = RankEnd(
            rank=self.rank,
            pid=self.pid,
            host=self.host,
            ended_ns=ended_ns,
            exit_code=exit_code,
            signal=signum,
            unclosed=exit_code == 0 and self.has_joined,
            missed=self.missed,
            departed=asked and self.left_ns is not None,
            asked_to_stop=asked,
            stopped_s=stopped_s,
            stop_signal=facts.stop_signal,
            paused_s=facts.paused_ns / 1e9,
            declared_dead=facts.declared_dead,
            memory_kill=change.memory_kill,
            error=None if exit_code == 0 else error,
            handled=self.exiting is not None,
            last_line=next((line for line in reversed(lines) if OWN_LINE.match(line)), "")[:200],
            last_line_s=max(0, age_ns) / 1e9,
        )
        return self.end

    def error(self) -> ParsedError | None:
        """Return the error that the rank has reported; None if it has reported none.

        The rank raised it, or was handling it when it called `sys.exit`.
        """
        failure = self.failure or self.exiting
        if failure is None or not failure.type:
            return None
        written = parse_error(failure.traceback)
        message, *details = failure.message.split("\n")
        return ParsedError(
            type=failure.type.rpartition(".")[2],
            message=message,
            where=failure.where or (written.where if written else ""),
            details=tuple(details),
            chain=written.chain if written else (),
            raised_by=written.raised_by if written else "",
            module=written.module if written else "",
        )

    def _hang_up(self) -> None:
        connection, self._control = self._control, None
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
