"""Ranks as threads: a whole job inside one test, in milliseconds.

`run_threads(3, main)` calls `main(group)` on three threads, each with its own group over shared
memory, and returns their results. The first rank that fails decides: its exception is raised, with
the others' as notes, and its peers are told that it is gone, so nobody waits for a deadline. If the
world does not end in time, the error holds every rank's Python stack and last events.

Threads share what processes do not: torch's default random generator, grad mode set per thread,
autocast. The caller's grad mode and autocast are copied; a world that moved the default generator
fails, since its ranks would have drawn from one stream in an arbitrary order.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from braid.clock import Clock, MonotonicClock
from braid.comm import Group
from braid.errors import CommError
from braid.events import EventRing, Recorder
from braid.store import HashStore
from braid.transport import Fabric, RankContext

__all__ = ["last_events", "run_threads", "thread_stacks"]

TIMEOUT_S = 60.0
BACKGROUND_S = 1.0


class _Rank(threading.Thread):
    """One rank of a thread world."""

    def __init__(
        self, world: _World, rank: int, main: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        super().__init__(name=f"rank-{rank}", daemon=True)
        self.rank = rank
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended_ns = 0
        self.recorder = Recorder()
        self._world = world
        self._main = main
        self._args = args
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")

    def run(self) -> None:
        transport = self._world.fabric.transports[self.rank]
        context = RankContext(
            self.rank,
            self._world.size,
            self._world.clock,
            self.recorder,
            transport.health,
            self._world.store,
        )
        try:
            with torch.set_grad_enabled(self._grad), torch.autocast("cpu", enabled=self._autocast):
                group = Group.world(context, transport)
                self.result = self._main(group, *self._args)
        except BaseException as exc:  # noqa: BLE001 - raised by the one who runs the world
            self.error = exc
            self.ended_ns = time.monotonic_ns()
            self._world.fabric.lose(self.rank, f"raised {type(exc).__name__}: {exc}")
        else:
            self._world.fabric.lose(self.rank, "has already left", left=True)


class _World:
    def __init__(self, size: int, clock: Clock) -> None:
        self.size = size
        self.clock = clock
        self.store = HashStore()
        self.fabric = Fabric(size, clock)


def run_threads(
    size: int,
    main: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    clock: Clock | None = None,
) -> list[Any]:
    """Run `main(group, *args)` on `size` ranks and return their results in the order of ranks.

    Args:
        size: Number of ranks.
        main: Gets the group of all ranks.
        args: Passed on.
        timeout_s: Seconds until the world is given up.
        clock: Time source of the ranks' waits.

    Raises:
        TimeoutError: Holds stacks and last events of all ranks.
        AssertionError: The default random generator was used.
        Exception: That of the rank that failed first.
    """
    world = _World(size, clock or MonotonicClock())
    generator = torch.random.get_rng_state()
    ranks = [_Rank(world, rank, main, args) for rank in range(size)]
    try:
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout_s
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
        stuck = [rank for rank in ranks if rank.is_alive()]
        if stuck:
            _give_up(world, ranks, stuck, timeout_s)
    finally:
        _let_background_work_end(size)
        world.fabric.close()
    _raise_first(ranks)
    if not torch.equal(generator, torch.random.get_rng_state()):
        msg = (
            "expected ranks on threads to leave torch's default generator alone, found it moved: "
            "pass a "
            "torch.Generator, or run this test with --world=procs"
        )
        raise AssertionError(msg)
    return [rank.result for rank in ranks]


def _let_background_work_end(size: int) -> None:
    """A progress thread tells that its last operation has ended before it ends itself; until then it looks at memory."""
    names = {f"braid-comm-{rank}" for rank in range(size)}
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(BACKGROUND_S)


def thread_stacks(names: dict[int, str]) -> str:
    """Python stacks of the threads with these identifiers."""
    frames = sys._current_frames()  # noqa: SLF001 - the documented way to look at other threads
    parts = []
    for ident, name in names.items():
        if ident in frames:
            parts.append(f"--- {name}\n" + "".join(traceback.format_stack(frames[ident])))
    return "\n".join(parts)


def last_events(ring: EventRing, count: int = 8) -> str:
    """The last events of a rank, one a line."""
    lines = [
        f"    {ring.name(e.kind)}#{e.seq} {'open' if e.open else f'{e.dur_ns / 1e3:.0f} us'} "
        f"{ring.name(e.site)}"
        for e in ring.tail(count)
    ]
    return "\n".join(lines) or "    (none)"


def _give_up(world: _World, ranks: list[_Rank], stuck: list[_Rank], timeout_s: float) -> None:
    stacks = thread_stacks({rank.ident or 0: f"rank {rank.rank}" for rank in stuck})
    events = "\n".join(
        f"--- last events of rank {r.rank}\n{last_events(r.recorder.ring)}" for r in ranks
    )
    for rank in stuck:
        world.fabric.lose(rank.rank, "was given up by the test")
    for rank in stuck:
        rank.join(5.0)
    msg = (
        f"expected {world.size} ranks to end within {timeout_s:g} s, found ranks "
        f"{[r.rank for r in stuck]} "
        f"still running\n{stacks}\n{events}"
    )
    raise TimeoutError(msg)


def _raise_first(ranks: list[_Rank]) -> None:
    """Raise the failure that caused the others: the first that is not a consequence, else the first."""
    failed = sorted((r for r in ranks if r.error is not None), key=lambda r: r.ended_ns)
    if not failed:
        return
    causes = [r for r in failed if not isinstance(r.error, CommError)]
    first = (causes or failed)[0]
    assert first.error is not None
    first.error.__dict__["rank_errors"] = {r.rank: r.error for r in failed}
    raise first.error
