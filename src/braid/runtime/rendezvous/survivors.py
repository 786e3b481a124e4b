"""Prints the error block of ranks without a launcher of braid: under srun, mpirun and torchrun.

Problem: such a launcher ends all ranks and reports hardly any cause. Each surviving rank prints its
own traceback, and only one of the tracebacks shows the cause.

Idea: each rank that ends by an exception writes it to the store. The first one waits a moment for
the others and prints one block with the same verdict as `braid run`. A lost rank writes nothing, so
the survivors' knowledge of its loss is used instead. mpirun of Open MPI ends survivors after one
second; the block is printed before.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from braid.errors import BraidError
from braid.runtime.clock import Clock
from braid.runtime.diagnose.block import StopReport, error_block, render_block
from braid.runtime.diagnose.last_events import last_events, last_operation_end
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import Ending, RankEnd, judge
from braid.runtime.events import Recorder
from braid.runtime.store import Store
from braid.runtime.transport import Health

__all__ = ["LOST", "Survivor"]

WAIT_S = 0.6  # for the ends of other ranks; mpirun ends them one second after the first
POLL_S = 0.01
STORE_LIMIT_S = 0.5
EXCHANGE_LIMIT_S = 1.5
LOST = "RankLost"
PRINTER, PRINTED = "ends/printer", "ends/printed"  # keys of the store
T = TypeVar("T")
PID = re.compile(r"\(pid (\d+)\) ")


class Survivor(NamedTuple):
    """A rank without braid's launcher, which may survive other ranks and print the error block.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        launched_by: Launcher that has started the ranks.
        store: Store of all ranks.
        health: Losses of other ranks that this rank has noticed.
        events: Events of this rank.
        clock: Time source.
        start_ns: Time at which the rank joined.
    """

    rank: int
    world_size: int
    launched_by: str
    store: Store
    health: Health
    events: Recorder
    clock: Clock
    start_ns: int

    def last_words(self, error: ParsedError) -> tuple[str, bool]:
        """Write the exception that ends this rank to the store, for the other ranks.

        Args:
            error: The exception.

        Returns:
            Error block for this rank to print (empty if another rank prints it), and whether the
            exception is only a symptom of another rank's end.
        """
        ring = self.events.ring
        end = RankEnd(
            rank=self.rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            ended_ns=time.time_ns(),  # compared between hosts
            exit_code=1,
            error=error,
            last_events=last_events(ring, last_operation_end(ring) - 1),
        )
        is_symptom = end.ending is Ending.SYMPTOM
        known, prints = {self.rank: end}, False
        exchanged = _in_time(lambda: self._exchange(end, is_symptom=is_symptom))
        if exchanged is not None:
            prints, others = exchanged
            known |= others
        else:  # rank 0 served the store, and is gone or does not answer
            self.health.collect()
            prints = self.rank == min(set(range(self.world_size)) - set(self.health.lost))
        return (self._block(known) if prints else ""), is_symptom

    def _exchange(self, end: RankEnd, *, is_symptom: bool) -> tuple[bool, dict[int, RankEnd]]:
        """Write the end to the store; return whether this rank prints, and the ends of others."""
        self.store.set(f"ends/{self.rank}", msgspec.json.encode(end))
        if not is_symptom:  # the rank at fault does not wait; others learn of its end by the store
            return False, {}
        ours = str(self.rank).encode()
        prints = self.store.compare_set(PRINTER, b"", ours) == ours
        return prints, self._others() if prints else {}

    def linger(self) -> None:
        """Keep rank 0 alive, which serves the store, until another rank has read how ranks ended.

        Waits for `WAIT_S` at most.
        """
        if self.rank == 0:
            _in_time(self._until_printed)

    def _until_printed(self) -> None:
        deadline_ns = self.clock.after_ns(WAIT_S)
        while self.clock.now_ns() < deadline_ns and not self.store.check([PRINTED]):
            self.clock.sleep(POLL_S)

    def _others(self) -> dict[int, RankEnd]:
        """Return the ends that other ranks have written; waits for all, but `WAIT_S` at most."""
        known: dict[int, RankEnd] = {}
        deadline_ns = self.clock.after_ns(WAIT_S)
        while self.clock.now_ns() < deadline_ns:
            self.health.collect()
            others = set(range(self.world_size)) - {self.rank}
            missing = others - set(known) - set(self.health.lost)
            for rank in [r for r in others - set(known) if self.store.check([f"ends/{r}"])]:
                text = self.store.get(f"ends/{rank}", STORE_LIMIT_S)
                known[rank] = msgspec.json.decode(text, type=RankEnd)
                missing.discard(rank)
            if not missing:
                break
            self.clock.sleep(POLL_S)
        self.store.set(PRINTED, b"1")
        return known

    def _block(self, known: dict[int, RankEnd]) -> str:
        ends = dict(known)
        for rank, loss in self.health.lost.items():
            if rank not in ends and not loss.departed:
                named = PID.match(loss.reason)
                reason = loss.reason[named.end() :] if named is not None else loss.reason
                reason = f"{reason}; {self.launched_by} may say how"
                ends[rank] = RankEnd(
                    rank=rank,
                    pid=int(named[1]) if named is not None else 0,
                    ended_ns=min(end.ended_ns for end in known.values()) - 1,
                    exit_code=1,
                    error=ParsedError(type=LOST, message=reason),
                )
        elapsed_s = (self.clock.now_ns() - self.start_ns) / 1e9
        verdict = judge(ends.values())
        return render_block(
            error_block(StopReport(verdict=verdict, exit_code=1, elapsed_s=elapsed_s))
        )


def _in_time(do: Callable[[], T]) -> T | None:
    """Return the result of a function that uses the store, or None if it fails or takes too long.

    A call of torch's store may never return if its server is stopped, so a thread makes the call.
    """
    results: list[T] = []

    def run() -> None:
        with suppress(BraidError, OSError):
            results.append(do())

    thread = threading.Thread(target=run, name="braid-survivor", daemon=True)
    try:
        thread.start()
        thread.join(EXCHANGE_LIMIT_S)
    except RuntimeError:  # Python 3.12 and newer cannot start threads during shutdown
        run()
    return results[0] if results else None
