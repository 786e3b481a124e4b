"""Ranks as threads: a whole job inside one test, in milliseconds.

`run_threads(3, main)` calls `main(group)` on three threads, each with its own group over shared
memory, and returns their results. If ranks fail, it raises the exception of the first, with those
of the others as notes. The peers of a failed rank learn that it is gone, so none waits for a
deadline. If the world does not end in time, the error holds every rank's Python stack and last
events.

Threads share what processes do not: torch's default random generator, grad mode set per thread,
autocast. The caller's grad mode and autocast are copied. A world that moved the default generator
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

from braid.comm import Group
from braid.errors import CommError
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.events import EventRing, Recorder
from braid.runtime.store import HashStore
from braid.runtime.transport import Fabric, RankContext

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
            self._world.fabric.lose(self.rank, "has already left", on_purpose=True)


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
        main: Function of the group of all ranks.
        args: Further arguments of `main`.
        timeout_s: Seconds until the world is abandoned.
        clock: Clock of the ranks' waits.

    Raises:
        TimeoutError: The world did not end in time; holds stacks and last events of all ranks.
        AssertionError: A rank used the default random generator.
        Exception: The exception of the rank that failed first.
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
            _abandon(world, ranks, stuck, timeout_s)
    finally:
        _let_background_work_end(size)
        world.fabric.close()
    _raise_first(ranks)
    if not torch.equal(generator, torch.random.get_rng_state()):
        msg = (
            "ranks on threads share torch's default generator, and one of them has used it: pass "
            "a torch.Generator, or run this test with --world=procs"
        )
        raise AssertionError(msg)
    return [rank.result for rank in ranks]


def _let_background_work_end(size: int) -> None:
    """Wait for progress threads, which look at memory until they end.

    Such a thread reports the end of its last operation before it ends itself.
    """
    names = {f"braid-comm-{rank}" for rank in range(size)}
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(BACKGROUND_S)


def thread_stacks(names: dict[int, str]) -> str:
    """Format the Python stacks of the threads with these identifiers."""
    frames = sys._current_frames()
    parts = []
    for ident, name in names.items():
        if ident in frames:
            parts.append(f"--- {name}\n" + "".join(traceback.format_stack(frames[ident])))
    return "\n".join(parts)


def last_events(ring: EventRing, count: int = 8) -> str:
    """Format the last events of a rank, one a line."""
    lines = [
        f"    {ring.name(e.kind)}#{e.seq} {'open' if e.open else f'{e.dur_ns / 1e3:.0f} us'} "
        f"{ring.name(e.site)}"
        for e in ring.tail(count)
    ]
    return "\n".join(lines) or "    (none)"


def _abandon(world: _World, ranks: list[_Rank], stuck: list[_Rank], timeout_s: float) -> None:
    stacks = thread_stacks({rank.ident or 0: f"rank {rank.rank}" for rank in stuck})
    events = "\n".join(
        f"--- last events of rank {r.rank}\n{last_events(r.recorder.ring)}" for r in ranks
    )
    for rank in stuck:
        world.fabric.lose(rank.rank, "was abandoned by the test")
    for rank in stuck:
        rank.join(5.0)
    msg = (
        f"ranks {[r.rank for r in stuck]} of {world.size} still run after {timeout_s:g} s\n"
        f"{stacks}\n{events}"
    )
    raise TimeoutError(msg)


def _raise_first(ranks: list[_Rank]) -> None:
    """Raise the failure that caused the others: the first that is no consequence, or the first."""
    failed = sorted((r for r in ranks if r.error is not None), key=lambda r: r.ended_ns)
    if not failed:
        return
    causes = [r for r in failed if not isinstance(r.error, CommError)]
    first = (causes or failed)[0]
    assert first.error is not None
    first.error.__dict__["rank_errors"] = {r.rank: r.error for r in failed}
    raise first.error
