"""Futures that are requested inside backward, and finished at its end.

Problem: stock DDP starts the all-reduce of a bucket from a hook and waits for its future, in C++,
when backward ends. There it takes no steps, and it does not show what went wrong: a future that C++
waits for carries an error's text at best.

Idea: autograd calls back at the end of backward, in the order in which callbacks were requested.
Ours comes before DDP's own, since a bucket is reduced before DDP knows that it was the last.

    backward     p6 p5 | p4 p3 p2 | p1 p0 |            callbacks
    bucket 0          >===                             > started: with a thread of its own
    bucket 1                     >====                   where there are spare cores, else all
    bucket 2                              >===========   steps at the end
                                          |  ours: wait for all  |  DDP's

An error is raised out of that callback, hence out of `loss.backward()`, as itself.
"""

from __future__ import annotations

from braid.comm.torch_backend.futures import WorkFuture
from braid.runtime.torch_internals import current_graph_task, current_node, queue_callback

__all__ = ["Backward", "inside_backward"]


def inside_backward() -> bool:
    """Return whether autograd is computing in this thread; False in a callback at its end."""
    return current_graph_task() >= 0 and current_node() is not None


class Backward:
    """Futures that one rank has requested inside backward."""

    def __init__(self) -> None:
        self._futures: list[WorkFuture] = []
        self._task = -1

    def finish_at_end(self, future: WorkFuture) -> None:
        """Finish `future` at the end of the backward that is running."""
        task = current_graph_task()
        if task != self._task:  # a nested backward (checkpointing) has an end of its own
            self._task = task
            queue_callback(self.finish)
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for all collectives and finish their futures; called by autograd at its end.

        Raises:
            CommError: The first error of a collective.
        """
        self._task = -1
        while self._futures:
            future = self._futures.pop(0)
            future.finish()
            if future.error is not None:
                self._futures.clear()
                raise future.error
