"""Collectives that are asked for inside backward, and end with it.

Problem: stock DDP starts the all-reduce of a bucket from a hook and waits for its future, in C++, when backward ends. A thread
that carries it out meanwhile helps if there is a core for it. Where every core computes already, it takes its time from the
very backward that it wants to overlap, plus a hand-over per bucket.

Idea: without a spare core such collectives are *held*: noted, in order, and carried out by the thread of
backward itself in a callback that autograd runs at its end, just before DDP's own.

    backward     p6 p5 | p4 p3 p2 | p1 p0 |            callbacks
    spare core        >===========                     > asked for   = carried out
    held              >          >        > ========== |  DDP's finish

Held ones must not hold up anybody. As soon as this rank communicates in any other way, asks whether one is done, or
waits in another thread, all of them go to the progress thread, in their order. A rank that computes on without
communicating reaches the end of backward, so peers never wait for longer than that.

An error of a collective is raised out of that callback, hence out of `loss.backward()`, as itself: the futures that
C++ waits for could only carry its text.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from braid.torch_backend.futures import Settler, WorkFuture
from braid.torch_backend.work import Started

__all__ = ["Backward", "has_spare_cores", "inside_backward"]

Call = Callable[
    [bool], Started
]  # with True it starts in the background, with False it has ended on return

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001 - -1 outside of backward; there is no public way
_node = torch._C._current_autograd_node  # noqa: SLF001 - as above


def inside_backward() -> bool:
    """Whether autograd is computing in this thread: not in a callback at the end, after which none of ours may come."""
    return _graph_task() >= 0 and _node() is not None


def has_spare_cores(world_size: int) -> bool:
    """Whether every rank of this host can have a core for communication beside those that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) >= world_size * (torch.get_num_threads() + 1)


class _Held:
    """A collective that waits for the end of backward."""

    def __init__(self, owner: Backward, call: Call) -> None:
        self.call = call
        self.started: Started | None = None
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._owner = owner
        self._thread = threading.get_ident()

    def run(self) -> None:
        """Carry it out here."""
        try:
            self.call(False)
        except BaseException as exc:
            self.error = exc
            raise
        finally:
            self.ended.set()

    def start(self) -> None:
        """Hand it to the progress thread."""
        try:
            self.started = self.call(True)
        except BaseException as exc:  # noqa: BLE001 - kept for whoever waits
            self.error = exc
        self.ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.ended.is_set():
            if threading.get_ident() == self._thread:
                self._owner.run_until(self)
            else:
                self._owner.release()
                self.ended.wait()
        if self.started is not None:
            self.started.wait(timeout_s)
        elif self.error is not None:
            raise self.error

    def done(self) -> bool:
        self._owner.release()
        if self.started is not None:
            return self.started.done()
        return self.ended.is_set()

    def exception(self) -> BaseException | None:
        return self.started.exception() if self.started is not None else self.error


class Backward:
    """What one rank has asked for inside backward.

    Attributes:
        held: Collectives that have not begun.

    Args:
        settler: For futures that are asked for outside of backward.
        holds: Whether there is no spare core.
    """

    def __init__(self, settler: Settler, *, holds: bool) -> None:
        self.held: deque[_Held] = deque()
        self.holds = holds
        self._settler = settler
        self._futures: list[WorkFuture] = []
        self._task = -1

    def begin(self, call: Call) -> Started:
        """Start a collective that nobody waits for yet."""
        if not (self.holds and inside_backward()):
            if self.held:
                self.release()
            return call(True)
        self._finish_later()
        held = _Held(self, call)
        self.held.append(held)
        return held

    def watch(self, future: WorkFuture) -> None:
        """See to it that `future` is set."""
        if inside_backward():
            self._finish_later()
            self._futures.append(future)
        else:
            self._settler.add(future)

    def release(self) -> None:
        """Hand everything that is held to the progress thread."""
        while (held := self._next()) is not None:
            held.start()

    def run_until(self, last: _Held) -> None:
        """Carry out everything that is held up to `last`."""
        while not last.ended.is_set() and (held := self._next()) is not None:
            held.run()
        last.ended.wait()

    def finish(self) -> None:
        """Carry out everything that is held and settle all futures; called by autograd at the end of backward.

        Raises:
            CommError: The first thing that went wrong.
        """
        self._task = -1
        futures, self._futures = self._futures, []
        while (held := self._next()) is not None:
            held.run()
        for future in futures:
            future.settle()
        for future in futures:
            if future.error is not None:
                raise future.error

    def _next(self) -> _Held | None:
        try:
            return self.held.popleft()
        except IndexError:
            return None

    def _finish_later(self) -> None:
        task = _graph_task()
        if task != self._task:  # a nested backward (checkpointing) has an end of its own
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # noqa: SLF001 - there is no public way
