"""This process's link to braid's launcher: events, stacks on request, control messages.

A process has one link, whether it is a rank, a node of remote calls, or both: the memory for events
has one writer, and the launcher learns only once that the process takes part, and that it left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
from collections.abc import Iterable

from braid.runtime.events import EventRing, Recorder
from braid.runtime.rendezvous.control import ControlClient, Left, RankHello
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.stack_thread import StackThread
from braid.runtime.store import STORE_ROLE
from braid.runtime.wire import Identity, Secret

__all__ = ["LauncherLink", "open_link"]


class LauncherLink:
    """Link of this process to braid's launcher, shared by all its users; see `open_link`.

    Attributes:
        recorder: Recorder of the events, which the launcher reads.
        control: Control connection.
    """

    def __init__(self, environment: JobEnvironment, secret: Secret, timeout_s: float) -> None:
        fds = (environment.events_fd, environment.stacks_fd)
        events_fd, stacks_fd = (-1 if fd is None else fd for fd in fds)
        identity = Identity(environment.run_id, STORE_ROLE, environment.rank)
        with contextlib.ExitStack() as stack:
            self.control = ControlClient.dial(
                environment.store_address, secret, identity, timeout_s=timeout_s
            )
            stack.callback(self.control.close)
            memory = mmap.mmap(events_fd, os.fstat(events_fd).st_size)
            ring = EventRing(memory, names_lock=threading.Lock())
            ring.pid = os.getpid()
            faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
            stack.callback(faulthandler.unregister, signal.SIGUSR1)
            stack.callback(setattr, ring, "stack_thread", 0)
            thread = stack.enter_context(StackThread(environment.rank, stacks_fd))
            stack.callback(setattr, ring, "stack_pipe", 0)  # before the thread ends
            ring.stack_thread, ring.stack_pipe = thread.native_id, thread.pipe
            self.recorder = Recorder(ring)
            self._closers = stack.pop_all()
        self._pid = os.getpid()
        self._num_users = 0
        self._num_here = 0
        self._missed: set[int] = set()

    def arrive(self) -> None:
        """Notify the launcher that the process takes part in the job; only the first call sends."""
        self._num_here += 1
        if self._num_here == 1:
            self.control.send(RankHello(self._pid))

    def leave(self, missed: Iterable[int] = ()) -> None:
        """Notify the launcher that the process has left; only the last user's call sends `Left`.

        `missed` are ranks that had left before, while this rank still needed them.
        """
        self._num_here -= 1
        self._missed.update(missed)
        if self._num_here == 0 and os.getpid() == self._pid:
            self.control.send(Left(tuple(sorted(self._missed))))

    def close(self) -> None:
        """Release the link; the call of the last user closes it."""
        self._num_users -= 1
        if self._num_users == 0:
            _OPEN.discard(self)
            self._closers.close()


_OPEN: set[LauncherLink] = set()  # at most one: there is one ring and one signal handler


def open_link(environment: JobEnvironment, secret: Secret, timeout_s: float) -> LauncherLink:
    """Return this process's link to braid's launcher; each caller closes it at the end.

    Raises:
        RendezvousError: The launcher cannot be reached.
    """
    link = next(iter(_OPEN), None) or LauncherLink(environment, secret, timeout_s)
    _OPEN.add(link)
    link._num_users += 1  # noqa: SLF001 - of this module
    return link
