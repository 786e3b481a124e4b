"""A collective on a virtual clock: its duration on a machine whose every cost is known.

The explorer records what each rank does; here the same actions take virtual time. A waiting rank
continues `a` seconds after the step that it waits for; touching a byte of shared memory takes `b`
seconds. Nothing depends on this machine, so a test can hold each algorithm to the cost that its
docstring states, to the last synchronisation and byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from braid.runtime.clock import VirtualClock
from support.explorer import Access, Acquire, Action, Publish

__all__ = ["VirtualRun", "run_on_virtual_clock"]


class VirtualRun(NamedTuple):
    """Result of a run on the virtual clock.

    Attributes:
        finished_ns: Time at which each rank had finished its actions.
        bytes_read: Bytes of shared memory that each rank read.
        bytes_written: Bytes of shared memory that each rank wrote.
        num_steps: Steps that each rank published.
    """

    finished_ns: tuple[int, ...]
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]
    num_steps: tuple[int, ...]


def run_on_virtual_clock(
    programs: Sequence[Sequence[Action]], *, a_ns: int, b_ns: int = 0
) -> VirtualRun:
    """Run every rank's recorded actions, each as early as possible.

    Args:
        programs: One list per rank, from `explorer.record`.
        a_ns: Nanoseconds from a step until a waiting peer continues.
        b_ns: Nanoseconds for each byte read or written.

    Raises:
        AssertionError: The ranks wait for each other.
    """
    clocks = [VirtualClock() for _ in programs]
    published: dict[tuple[int, int, int], int] = {}
    at = [0] * len(programs)
    read, written, steps = ([0] * len(programs) for _ in range(3))
    while any(position < len(p) for position, p in zip(at, programs, strict=True)):
        before = tuple(at)
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                action = program[at[rank]]
                if isinstance(action, Acquire):
                    seen = published.get((action.peer, action.channel, action.value))
                    if seen is None:
                        break
                    clocks[rank].advance(max(0, seen + a_ns - clocks[rank].now_ns()))
                elif isinstance(action, Publish):
                    published[rank, action.channel, action.value] = clocks[rank].now_ns()
                    steps[rank] += 1
                else:
                    reads, writes = _nbytes(action)
                    read[rank] += reads
                    written[rank] += writes
                    clocks[rank].advance((reads + writes) * b_ns)
                at[rank] += 1
        if tuple(at) == before:
            msg = f"ranks wait for each other, so none can finish: they are at {before}"
            raise AssertionError(msg)
    return VirtualRun(
        tuple(clock.now_ns() for clock in clocks), tuple(read), tuple(written), tuple(steps)
    )


def _nbytes(access: Access) -> tuple[int, int]:
    return (
        sum(span.end - span.start for span in access.reads),
        sum(span.end - span.start for span in access.writes),
    )
