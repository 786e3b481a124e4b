"""Collectives that are asked for inside backward, and end with it.

Problem: stock DDP starts the all-reduce of a bucket from a hook and waits for its future, in C++, when backward ends. A thread
that carries it out meanwhile helps if there is a core for it. Where every core computes already, it takes its time from the
very backward that it wants to overlap, plus a hand-over per bucket. But the thread that waits is in C++, where it takes no
steps.

Idea: without a spare core such collectives are started in passing: their first steps are taken at once, the rest by
whatever this rank waits for next, and at the latest in a callback that autograd runs at the end of backward, just before
DDP's own.

    backward     p6 p5 | p4 p3 p2 | p1 p0 |            callbacks
    spare core        >===========                     > asked for   = carried out
    none              >=         >==      >= ========= |  DDP's finish

An error of a collective is raised out of that callback, hence out of `loss.backward()`, as itself: the futures that
C++ waits for could only carry its text.
"""

from __future__ import annotations

import os

import torch

from braid.torch_backend.futures import Settler, WorkFuture

__all__ = ["Backward", "has_spare_cores", "inside_backward"]

_graph_task = torch._C._current_graph_task_id  # noqa: SLF001 - -1 outside of backward; there is no public way
_node = torch._C._current_autograd_node  # noqa: SLF001 - as above


def inside_backward() -> bool:
    """Whether autograd is computing in this thread: not in a callback at the end, after which none of ours may come."""
    return _graph_task() >= 0 and _node() is not None


def has_spare_cores(world_size: int) -> bool:
    """Whether every rank of this host can have a core for communication beside those that it computes on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) >= world_size * (torch.get_num_threads() + 1)


class Backward:
    """What one rank has asked for inside backward.

    Attributes:
        in_passing: Whether to start it without a thread.

    Args:
        settler: For futures that are asked for outside of backward.
        in_passing: See above.
    """

    def __init__(self, settler: Settler, *, in_passing: bool) -> None:
        self.in_passing = in_passing
        self._settler = settler
        self._futures: list[WorkFuture] = []
        self._task = -1

    def watch(self, future: WorkFuture) -> None:
        """See to it that `future` is set."""
        if not inside_backward():
            self._settler.add(future)
            return
        task = _graph_task()
        if task != self._task:  # a nested backward (checkpointing) has an end of its own
            self._task = task
            self._futures.clear()  # of one that an exception has ended: nobody waits for them
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # noqa: SLF001 - there is no public way
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for everything and settle its future; called by autograd at the end of backward.

        Raises:
            CommError: The first thing that went wrong.
        """
        self._task = -1
        while self._futures:
            future = self._futures.pop(0)
            future.settle()
            if future.error is not None:
                self._futures.clear()
                raise future.error
