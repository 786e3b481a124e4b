"""A thread that sleeps until the launcher asks for stacks, so that no call of the program does.

Problem: a signal interrupts the call in which the thread sleeps that receives it. Python goes on
with its own calls, and the kernel with most. `sleep`, `poll`, `select` and `semop`, called by a
library in C, return early, whatever flags the handler was installed with (signal(7)). A report
about a program would then change what it does.

Idea: the handler of `faulthandler` writes the stacks of all threads, whichever of them receives
the signal. So the launcher sends it to this thread, whose `read` the kernel starts again.

That handler reads frames which other threads change meanwhile, unless these wait: a rank whose
threads run calls of peers can die of it. This thread writes the same while it has the interpreter's
lock, when the launcher writes into its pipe instead.
"""

from __future__ import annotations

import faulthandler
import os
import threading

__all__ = ["ASK", "StackThread"]

ASK = b"?"  # what asks for stacks, in the pipe


class StackThread:
    """The thread; a context manager that ends it.

    Args:
        rank: Rank of this process, for the thread's name.
        stacks_fd: Descriptor of the file of the stacks.

    Attributes:
        native_id: Number by which the kernel knows the thread.
    """

    def __init__(self, rank: int, stacks_fd: int) -> None:
        self._reader, self._writer = os.pipe()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_receive_signals,
            args=(self._reader, stacks_fd),
            name=f"braid-stacks-{rank}",
            daemon=True,
        )
        self._thread.start()
        self.native_id = self._thread.native_id or 0

    @property
    def pipe(self) -> int:
        """Descriptor that asks for stacks when `ASK` is written to it."""
        return self._writer

    def close(self) -> None:
        """End the thread. Idempotent; a forked child only closes its descriptors."""
        if self._writer < 0:
            return
        if os.getpid() == self._pid:
            os.write(self._writer, b"x")  # a child may still hold the other end
            self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._writer = -1

    def __enter__(self) -> StackThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _receive_signals(reader: int, stacks_fd: int) -> None:
    """Sleep; the name stands in stack dumps, where `diagnose` passes this thread over."""
    while os.read(reader, 1) == ASK:
        faulthandler.dump_traceback(stacks_fd, all_threads=True)
