"""A thread that receives the launcher's signals for stacks, so that no other thread is interrupted.

Problem: a signal interrupts the system call of the thread that receives it. Python restarts its own
calls, and the kernel restarts most. But `sleep`, `poll`, `select` and `semop`, called by a C
library, return early, whatever flags the handler was installed with (signal(7)). A request for
stacks could then change what the program does.

Idea: the handler of `faulthandler` writes the stacks of all threads, whichever thread receives the
signal. So the launcher sends it to this thread, and the kernel restarts its `read`.

That handler reads frames that other threads may change meanwhile; a rank whose threads run remote
calls can crash in it. Therefore the launcher may write to this thread's pipe instead: the thread
then writes the stacks while it holds the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import threading

from braid.runtime.closing import Closing

__all__ = ["ASK", "StackThread"]

ASK = b"?"  # the byte in the pipe that asks for stacks


class StackThread(Closing):
    """Thread that receives the launcher's requests for stack dumps; a context manager.

    Args:
        rank: Rank of this process, for the thread's name.
        stacks_fd: Descriptor of the file of the stacks.

    Attributes:
        native_id: Thread identifier of the kernel.
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
        """Descriptor of a pipe; this thread dumps all stacks when `ASK` is written to it."""
        return self._writer

    def close(self) -> None:
        """End the thread. Idempotent; a forked child only closes its descriptors."""
        if self._writer < 0:
            return
        if os.getpid() == self._pid:
            os.write(self._writer, b"x")  # closing is not enough: a child may hold the other end
            self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._writer = -1


def _receive_signals(reader: int, stacks_fd: int) -> None:
    """Wait for requests. `diagnose` recognizes this thread in stacks by this function's name."""
    while os.read(reader, 1) == ASK:
        faulthandler.dump_traceback(stacks_fd, all_threads=True)
