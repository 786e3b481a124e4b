"""Turns at polling: one thread at a time polls a van's streams, preferably one that waits.

Problem: if a thread of the van receives for a program's thread, it must wake that thread for each
message. Waking a thread costs more than a small message. But a van without a background thread does
nothing while the program computes: it sends no heartbeats, and does not read from peers.

Idea: a thread that waits in a van polls the streams itself (the leader). Other waiting threads
follow, and lead when the leader's wait is over. The van's thread polls while no thread waits. It
does not start between two waits in quick succession, but after `REST_S` without any.

    event                                         thread that polls next
    a thread waits, no thread polls               that thread
    a thread waits, the van's thread polls        that thread, once the van's thread has ended its
                                                  poll
    a thread waits, another one polls             unchanged; it follows
    the leader ends its wait, others follow       one of them
    no thread waits for REST_S                    the van's thread
    no thread waits, but a write is pending       the van's thread, immediately

Source: D. Schmidt et al., "Leader/Followers: A Design Pattern for Efficient Multi-threaded Event
Demultiplexing and Dispatching", PLoP 2000.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from braid.runtime.alarm import Alarm
from braid.runtime.message.guard import Guard

__all__ = ["REST_S", "PollTurns"]

REST_S = 0.003  # longer than the usual time between two waits of a program


class PollTurns:
    """Scheduler of the thread that polls a van's connections.

    Every method is called with the van's lock held.

    Args:
        guard: Lock of the van, and condition on which threads wait for changes.
        interrupt: Function that ends a poll of another thread early.
    """

    def __init__(self, guard: Guard, interrupt: Callable[[], None]) -> None:
        self._guard = guard
        self._interrupt = interrupt
        self._rest = Alarm(guard.lock, REST_S)  # for the van's thread
        self._leader = 0  # identity of the thread that polls; 0 if none does
        self._own = 0
        self._followers = 0
        self._is_stopping = False

    @property
    def is_taken(self) -> bool:
        """Whether a thread polls."""
        return bool(self._leader)

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread polls."""
        return self._leader == threading.get_ident()

    def begin(self) -> bool:
        """Make the calling thread the one that polls; return False if another thread polls."""
        if self._leader or self._is_stopping:
            return False
        self._leader = threading.get_ident()
        return True

    def end(self, *, hand_over: bool) -> None:
        """End the polling of the calling thread.

        Args:
            hand_over: Whether the van's thread must begin to poll immediately, because the program
                waits outside of the van.
        """
        self._leader = 0
        if self._followers:
            self._guard.notify_all()
        elif hand_over:
            self._rest.ring()
        self._rest.put_off()

    def follow(self, seconds: float) -> None:
        """Wait while another thread polls, until the van's state changes or this one may poll."""
        if self._leader and self._leader == self._own:
            self._interrupt()
        self._followers += 1
        try:
            self._guard.wait(seconds)
        finally:
            self._followers -= 1

    def wake(self) -> None:
        """Interrupt the thread that polls; if no thread polls, make the van's thread begin."""
        if self.is_mine:
            return
        if self._leader:
            self._interrupt()
        else:
            self._rest.ring()

    def begin_own(self) -> bool:
        """Block the van's thread until it has to poll; return False when it has to end."""
        self._own = threading.get_ident()
        if self._leader == self._own:
            self._leader = 0
        if self._followers:
            self._guard.notify_all()
        while self._leader or self._followers:
            if self._is_stopping:
                return False
            if not self._leader:
                self._rest.put_off()  # the followers may end their waits without leading
            self._rest.wait()
        if self._is_stopping:
            return False
        self._leader = self._own
        return True

    def stop(self) -> None:
        """Prevent further polls, and end the current one."""
        self._is_stopping = True
        self._rest.ring()
        if self._leader:
            self._interrupt()

    def close(self) -> None:
        """Release the alarm; the van's thread has ended."""
        self._rest.close()
