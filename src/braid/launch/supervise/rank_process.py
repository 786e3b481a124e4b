"""A rank on the launcher's own host: a process, two pipes and a black box."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGKILL

from braid.clock import Clock
from braid.diagnose import RankEnd, RankView, clause
from braid.launch.process.black_box import BlackBox
from braid.launch.process.child import Child
from braid.launch.process.hang_state import OpenWait
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.process.rank_snapshot import RankObserver
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.supervisor_state import RankFacts
from braid.rendezvous import FromRank

__all__ = ["RankProcess"]


class RankProcess(Rank):
    """A started rank of this host.

    Args:
        rank: Its rank.
        argv: Program and arguments.
        environ: Its environment.
        pass_fds: Descriptors it inherits, besides its black box's.
        box: Its black box; owned and closed by this object.
        output: Where its output goes; owned and closed by this object.
        selector: Where its pipes and its connection are watched; the data of a key is what to call.
        on_message: Called with what it says on its connection.
        clock: Time source.

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
        )
        self._look = RankObserver(rank, self._child.pid, box, clock)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        self._child.signal(signum)

    def drain(self) -> None:
        """Take all that its pipes hold now."""
        self._child.drain()

    def ended(self, change: Change, facts: RankFacts) -> RankEnd:
        """Note how it ended, once it has been reaped."""
        self._child.reaped(change)
        return super().ended(change, facts)

    def waits(self) -> list[OpenWait]:
        """Collectives that it is inside of."""
        return self._look.waits() if self.alive else []

    def ask(self) -> None:
        """StackRequest it for its stack."""
        self._look.ask(alive=self.alive, answers=self.has_said_hello)

    def view(self) -> RankView:
        """What is seen of it from outside."""
        ended = clause(self.end) if self.end is not None else ""
        return self._look.view(alive=self.alive, ended=ended)

    def lasted_ns(self, wait: OpenWait) -> int | None:
        """How long a wait took."""
        return self._look.lasted_ns(wait)

    def close(self) -> None:
        """End the process if it lives, and close everything. Idempotent."""
        self.signal(SIGKILL)
        if self._child.alive:
            with suppress(ChildProcessError):
                self._child.wait()
        self._hang_up()
        self._child.close()
        self.output.close(self._clock.now_ns())
        self.box.close()
