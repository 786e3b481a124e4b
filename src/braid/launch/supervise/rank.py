"""One rank as the launcher sees it, wherever it runs: what it says, what it is told, how it ended.

A braid program connects to the launcher itself, from any host; what happens to its process is seen
by whoever started it, and comes here as a `Change`.
"""

from __future__ import annotations

import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable

from braid.clock import Clock
from braid.diagnose import ParsedError, RankEnd, RankView, parse_error
from braid.errors import BraidError
from braid.launch.process.black_box import BlackBox
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.supervise.supervisor_state import RankFacts
from braid.rendezvous import Failed, FromLauncher, FromRank
from braid.rendezvous.control import decode_from_rank, encode
from braid.wire import SocketConnection

__all__ = ["Rank"]


class Rank(ABC):
    """A started rank.

    Args:
        rank: Its rank.
        box: Its black box; owned and closed by this object.
        output: Where its output goes; owned and closed by this object.
        selector: Where its connection is watched; the data of a key is what to call.
        on_message: Called with what it says on its connection.
        clock: Time source.
        host: Name of its host; empty on the launcher's own.

    Attributes:
        has_said_hello: It has joined the job, and gives its stack when asked.
        said: What it said of its failure.
        end: How it ended; None while it lives.
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
        self.has_said_hello = False
        self.said: Failed | None = None
        self.end: RankEnd | None = None
        self._control: SocketConnection | None = None
        self._has_connected = False
        self._untold: list[FromLauncher] = []  # what there was to say before it connected
        self._selector = selector
        self._on_message = on_message
        self._clock = clock

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its host; 0 while unknown."""

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self.end is None

    @property
    def name(self) -> str:
        """`rank 1 on host b (pid 812)`."""
        host = f" on host {self.host}" if self.host else ""
        return f"rank {self.rank}{host} (pid {self.pid})"

    @abstractmethod
    def signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""

    @abstractmethod
    def drain(self) -> None:
        """Take all that it has written so far, as far as it is here."""

    @abstractmethod
    def waits(self) -> list[OpenWait]:
        """Collectives that it is inside of, on the launcher's clock."""

    @abstractmethod
    def ask(self) -> None:
        """StackRequest it for its stack; `view` has it after a moment."""

    @property
    def has_answered(self) -> bool:
        """Whether what was asked for is here as far as it will ever be; not so while another host has not said it."""
        return True

    @abstractmethod
    def view(self) -> RankView:
        """What is seen of it from outside, on the launcher's clock."""

    @abstractmethod
    def lasted_ns(self, wait: OpenWait) -> int | None:
        """How long a wait took; None where that is not known."""

    @abstractmethod
    def close(self) -> None:
        """End the process if it lives, and close everything. Idempotent."""

    def testimony(self, at_ns: int | None = None, *, gave_up: bool = False) -> str:
        """What it was inside of, see `BlackBox.testimony`; `at_ns` on the launcher's clock."""
        if at_ns is not None:
            at_ns -= self.box.ring.clock_offset_ns
        return self.box.testimony(at_ns, gave_up=gave_up)

    def adopt(self, connection: SocketConnection) -> None:
        """Take its control connection; a second one is refused."""
        if self._control is not None or not self.alive:
            connection.close()
            return
        self._control = connection
        self._selector.register(connection, selectors.EVENT_READ, self.on_message)
        self._has_connected = True
        untold, self._untold = self._untold, []
        for message in untold:
            self.send(message)
        self.on_message()

    def on_message(self) -> None:
        """Take all messages that have arrived on its control connection."""
        try:
            while self._control is not None and (frame := self._control.try_recv()) is not None:
                self._on_message(self, decode_from_rank(frame.meta))
        except BraidError:  # it has gone, or talks nonsense: its process tells how it ends
            self._hang_up()

    def send(self, message: FromLauncher) -> None:
        """Send a message, as soon as there is a connection; never waits."""
        try:
            if self.alive and self._control is not None:
                self._control.post(encode(message))
            elif self.alive and not self._has_connected:
                self._untold.append(message)
        except BraidError:
            self._hang_up()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Note how it ended, once it has been reaped.

        Args:
            change: What its process did.
            facts: What was done to it.
        """
        ended_ns = change.t_ns or self._clock.now_ns()
        exit_code = change.status if change.what == "exited" else None
        signum = change.status if change.what == "killed" else None
        asked = facts.signalled and facts.failed_ns is None
        was_stopped = asked and facts.stopped_ns is not None
        stopped_s = (ended_ns - (facts.stopped_ns or 0)) / 1e9 if was_stopped else None
        if facts.failed_ns is not None:  # it failed then; how its process was ended is our doing
            ended_ns = facts.failed_ns
            exit_code, signum = (exit_code, signum) if not facts.signalled else (1, None)
        lines = self.output.stderr_tail.splitlines() if exit_code != 0 else []
        self.end = RankEnd(
            rank=self.rank,
            pid=self.pid,
            host=self.host,
            ended_ns=ended_ns,
            exit_code=exit_code,
            signal=signum,
            asked_to_stop=asked,
            stopped_s=stopped_s,
            stop_signal=facts.stop_signal,
            declared_dead=facts.declared_dead,
            memory_kill=change.memory_kill,
            error=None if exit_code == 0 else self.error(),
            last_words=next((line for line in reversed(lines) if line.strip()), "")[:200],
        )
        return self.end

    def error(self) -> ParsedError | None:
        """What it said of its failure: through its connection if it could, else on stderr."""
        said = self.said
        if said is None:
            return parse_error(self.output.stderr_tail)
        written = parse_error(said.traceback)
        message, *details = said.message.split("\n")
        return ParsedError(
            type=said.type.rpartition(".")[2],
            message=message,
            where=said.where or (written.where if written else ""),
            details=tuple(details),
            chain=written.chain if written else (),
        )

    def _hang_up(self) -> None:
        connection, self._control = self._control, None
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
