"""Runs a rank as a child process on the launcher's own host."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGKILL

from braid.launch.process.black_box import BlackBox
from braid.launch.process.child import Child, LauncherInput
from braid.launch.process.fork_server import ForkServer
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.process.rank_snapshot import RankObserver
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.supervisor_state import RankFacts
from braid.runtime.clock import Clock
from braid.runtime.diagnose.hang_view import RankView
from braid.runtime.diagnose.verdict import RankEnd, clause
from braid.runtime.rendezvous import FromRank

__all__ = ["RankProcess"]


class RankProcess(Rank):
    """A started rank on this host.

    Args:
        rank: Number of the rank.
        argv: Program and arguments.
        environ: Environment variables of the rank.
        pass_fds: Descriptors that the rank inherits, besides the black box's descriptors.
        box: Black box of the rank (its events and stacks); owned and closed by this object.
        output: Destination of the rank's output; owned and closed by this object.
        selector: Selector that polls the rank's pipes and connection; the data of a key is the
            function to call.
        on_message: Called with each message from the rank.
        clock: Time source.
        stdin: Standard input of the rank; None for an empty one.
        server: Server that may fork the rank; None for none.

    Raises:
        OSError: The system cannot start another process.
    """

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        box: BlackBox,
        output: RankOutput,
        selector: selectors.BaseSelector,
        on_message: Callable[[Rank, FromRank], None],
        clock: Clock,
        stdin: LauncherInput | None = None,
        server: ForkServer | None = None,
    ) -> None:
        super().__init__(
            rank, box=box, output=output, selector=selector, on_message=on_message, clock=clock
        )
        self._child = Child(
            argv,
            environ=environ,
            pass_fds=[*pass_fds, box.events_fd, box.stacks_fd],
            selector=selector,
            on_output=lambda stream, chunk: output.feed(stream, chunk, clock.now_ns()),
            stdin=stdin,
            server=server,
        )
        self._observer = RankObserver(rank, self._child.pid, box, clock)

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self._child.pid

    def signal(self, signum: int) -> None:
        """Send the rank a signal, unless it has ended."""
        self._child.signal(signum)

    def drain(self) -> None:
        """Read all output that is in the rank's pipes now."""
        self._child.drain()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Record and return how the rank ended, after its process has been reaped."""
        self._child.reaped(change)
        return super().ended(change, facts)

    def waits(self) -> list[OpenWait]:
        """Return the open collectives of the rank."""
        return self._observer.waits() if self.alive else []

    def request_stack(self) -> None:
        """Request a stack dump from the rank."""
        self._observer.request_stack(alive=self.alive, answers=self.has_joined)

    def view(self) -> RankView:
        """Return a view of the rank from outside."""
        ended = clause(self.end) if self.end is not None else ""
        return self._observer.view(alive=self.alive, ended=ended)

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """Return the duration of a wait that is over; None if unknown."""
        return self._observer.lasted_ns(wait)

    def close(self) -> None:
        """Kill the process if it lives, and release all resources. Idempotent."""
        self.signal(SIGKILL)
        if self._child.alive:
            with suppress(ChildProcessError):
                self._child.wait()
        self._hang_up()
        self._child.close()
        self.output.close(self._clock.now_ns())
        self.box.close()
