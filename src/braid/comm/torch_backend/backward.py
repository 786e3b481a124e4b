"""Futures that are requested inside backward, and finished at its end.

Problem: stock DDP starts the all-reduce of a bucket from a hook and waits for its future, in C++,
when backward ends. This wait takes no steps, and it hides the error: a future that C++ waits for
carries only the text of an error.

Idea: autograd runs callbacks at the end of backward, in the order in which they were requested. Our
callback comes before DDP's, since a bucket is reduced before DDP knows that it was the last.

    backward     p6 p5 | p4 p3 p2 | p1 p0 |            callbacks
    bucket 0          >===                             > started: in a background thread
    bucket 1                     >====                   if there are spare cores, else all
    bucket 2                              >===========   steps at the end
                                          |  ours: wait for all  |  DDP's

An error is raised in that callback, hence by `loss.backward()`, with its type and message.
"""

from __future__ import annotations

from braid.comm.torch_backend.futures import WorkFuture
from braid.runtime.torch_internals import current_graph_task, current_node, queue_callback

__all__ = ["Backward", "inside_backward"]


def inside_backward() -> bool:
    """Return whether autograd is computing in this thread; False in a callback at its end."""
    return current_graph_task() >= 0 and current_node() is not None


class Backward:
    """Collection of the futures that one rank has requested inside backward."""

    def __init__(self) -> None:
        self._futures: list[WorkFuture] = []
        self._task = -1

    def finish_at_end(self, future: WorkFuture) -> None:
        """Finish `future` at the end of the current backward."""
        task = current_graph_task()
        if task != self._task:  # a nested backward (checkpointing) ends separately
            self._task = task
            queue_callback(self.finish)
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for all collectives and finish their futures; autograd calls this at the end.

        Raises:
            CommError: The first error of a collective.
        """
        self._task = -1
        while self._futures:
            future = self._futures.pop(0)
            future.finish()
            if not future.done():  # another thread has begun to finish it
                future.wait_for_other_thread()
            if future.error is not None:
                self._futures.clear()
                raise future.error
