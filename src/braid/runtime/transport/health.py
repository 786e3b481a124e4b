"""One verdict on each lost rank, for all waits of all groups of a process.

Problem: a lost rank shows in several ways (its pidfd becomes readable, a socket ends, the launcher
reports it, its heartbeat stops), to several threads, at different times. If each place draws its
own conclusion, ranks disagree on which rank failed, and often blame a victim.

Idea: all signs are reported here. The first report on a rank is the verdict and is never revised.
It increments the *epoch*, which every wait checks after each sleep. A rank that left on purpose is
not lost: only ranks that still need something from it fail.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from braid.errors import PeerLostError
from braid.runtime.clock import Clock

__all__ = ["Health", "Loss", "Witness"]

LOG = logging.getLogger(__name__)

REASON_GRACE_S = 0.1  # how long a pidfd's verdict is delayed for the launcher to name the cause
CONFIRM_S = 1.0  # longest time between the loss of a process's memory and its end


class Loss(NamedTuple):
    """Report that a rank is lost, with the reason.

    Attributes:
        rank: Global rank.
        reason: Clause with the event: "was killed by signal 9 (SIGKILL)".
        departed: Whether it ended on purpose after `shutdown()`; only ranks that wait for it are
            affected.
    """

    rank: int
    reason: str
    departed: bool = False


class Witness(Protocol):
    """Source of reports on lost ranks, such as the launcher's socket or a heartbeat monitor."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is news, -1 when closed."""
        ...

    def losses(self) -> list[Loss]:
        """Return the losses since the last call, without blocking."""
        ...


class Health:
    """State of the other ranks, as far as this rank knows.

    Args:
        rank: This rank.
        clock: Clock for the short wait until the launcher names the cause.
        debugged: Whether waits for a running rank have no deadline, since a debugger is in use.
        numbers: Number that the launcher gave each rank of an elastic run's epoch, for messages;
            empty if they are the ranks.
    """

    def __init__(
        self, rank: int, clock: Clock, *, debugged: bool = False, numbers: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.numbers = numbers
        self.debugged = debugged
        self.epoch = 0
        self.lost: dict[int, Loss] = {}
        self.missed: set[int] = set()  # ranks that had left when an operation here needed them
        self._clock = clock
        self._pids: dict[int, int] = {}  # ranks that are watched in any way
        self._pidfds: dict[int, int] = {}
        self._gone: dict[int, Loss] = {}  # ranks whose connection has ended
        self._is_leaving: Callable[[int], bool] = lambda _rank: False
        self._witnesses: list[Witness] = []
        self._on_loss: list[Callable[[], None]] = []
        self._looking = threading.Lock()

    def number(self, rank: int) -> int:
        """Return the number that the launcher gave a rank, as its messages print it."""
        return self.numbers[rank] if 0 <= rank < len(self.numbers) else rank

    def register_process(self, rank: int, pid: int) -> None:
        """Watch a process of this host."""
        try:
            self._pidfds[rank] = os.pidfd_open(pid)
            self._pids[rank] = pid
        except ProcessLookupError:
            self.report(Loss(rank, f"(pid {pid}) was gone before it could be watched"))
        except (OSError, AttributeError):
            return  # a kernel before 5.3, a sandbox or another system: the launcher still reports

    def expect_end(self, rank: int, pid: int) -> None:
        """Register a process that other code watches, and reports with `ended` when it ends."""
        self._pids[rank] = pid

    def ended(self, rank: int, how: str, *, on_purpose: bool = False) -> None:
        """Report that the connection to a process has ended; `collect` turns it into a verdict.

        Args:
            rank: Global rank of the process.
            how: Clause on the process, used if no better one is known: "died".
            on_purpose: See `Loss.departed`.
        """
        self._gone.setdefault(rank, Loss(rank, f"(pid {self._pids[rank]}) {how}", on_purpose))

    def register(self, witness: Witness) -> None:
        """Add a source of reports on lost ranks."""
        self._witnesses.append(witness)

    def set_leave_check(self, is_leaving: Callable[[int], bool]) -> None:
        """Set the function that returns whether a rank is ending on purpose."""
        self._is_leaving = is_leaving

    def on_loss(self, wake: Callable[[], None]) -> None:
        """Register a function to call after each newly lost rank, to wake sleeping threads."""
        self._on_loss.append(wake)

    def report(self, loss: Loss) -> None:
        """Report that a rank is lost; the first report on a rank counts, later ones are ignored."""
        if loss.rank == self.rank or loss.rank in self.lost:
            return
        self.lost[loss.rank] = loss
        LOG.info("rank %d %s", self.number(loss.rank), loss.reason)
        self.epoch += 1
        for wake in self._on_loss:
            wake()

    def fds(self) -> list[int]:
        """Return the descriptors that become readable when there is news."""
        fds = [fd for rank, fd in self._pidfds.items() if rank not in self.lost]
        fds += [fd for fd in (w.fileno() for w in self._witnesses) if fd >= 0]
        return fds

    def collect(self) -> None:
        """Read new losses from every source, in one thread at a time.

        Blocks for at most `REASON_GRACE_S`, to wait for the launcher's reason.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._ask_witnesses()
            for rank in self._ended():
                self._judge(rank)
        finally:
            self._looking.release()

    def confirm(self, rank: int) -> Loss | None:
        """Wait until the death of `rank`, whose memory is gone already, is reported.

        Without this wait, this rank might end first, and other ranks would blame it.

        Returns:
            The loss of `rank`; None if it is not reported within a second.
        """
        deadline_ns = self._clock.after_ns(CONFIRM_S)
        while rank not in self.lost and self._clock.now_ns() < deadline_ns:
            self.collect()
            self._clock.sleep(0.001)
        return self.lost.get(rank)

    def check(self, ranks: Iterable[int], epoch: int, *, needed: int = -1) -> None:
        """Raise if a rank of a group is lost, unless it left on purpose and is not needed.

        Args:
            ranks: Global ranks of the group.
            epoch: Epoch at the caller's last check; if it is the current one, nothing has changed.
            needed: Rank that the caller waits for; it counts as lost even if it left on purpose.

        Raises:
            PeerLostError: Such a rank is lost.
        """
        if epoch == self.epoch:
            return
        for rank in ranks:
            loss = self.lost.get(rank)
            if loss is not None and (not loss.departed or rank == needed):
                if loss.departed:
                    self.missed.add(rank)
                msg = f"rank {self.number(rank)} {loss.reason}"
                raise PeerLostError(msg, rank=rank)

    def check_now(self, ranks: Iterable[int]) -> None:
        """Check every source, and raise PeerLostError if one of `ranks` is lost."""
        self.collect()
        self.check(ranks, -1)

    def close(self) -> None:
        """Close the pidfds and stop watching."""
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        self._pids.clear()

    def _ask_witnesses(self) -> None:
        for witness in self._witnesses:
            for loss in witness.losses():
                self.report(loss)

    def _ended(self) -> list[int]:
        """Return ranks whose process has ended, or that have announced their end."""
        poller = select.poll()
        ranks = {}
        ended = []
        for rank in self._pids:
            if rank in self.lost:
                continue
            if rank in self._gone or self._is_leaving(rank):
                ended.append(rank)
            elif rank in self._pidfds:
                poller.register(self._pidfds[rank], select.POLLIN)
                ranks[self._pidfds[rank]] = rank
        return ended + ([ranks[fd] for fd, _ in poller.poll(0)] if ranks else [])

    def _judge(self, rank: int) -> None:
        pid = self._pids[rank]
        if self._is_leaving(rank):
            self.report(Loss(rank, f"(pid {pid}) has already left", departed=True))
            return
        deadline_ns = self._clock.after_ns(REASON_GRACE_S)
        while self._witnesses and self._clock.now_ns() < deadline_ns:
            self._ask_witnesses()
            if rank in self.lost:
                return
            self._clock.sleep(0.001)
        self.report(self._gone.get(rank, Loss(rank, f"(pid {pid}) died")))
