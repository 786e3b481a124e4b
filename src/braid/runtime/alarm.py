"""Alarm that wakes one thread when nothing has happened for a while.

Problem: a thread that takes over when other threads have been idle for 3 ms would have to look
every 3 ms whether they are. Each look takes the interpreter lock from a thread that computes, or
that waits for a message of 100 us.

Idea: a timer of the kernel, on which the thread blocks. A thread that does something puts the timer
off, which needs no change of threads. So the waiting thread wakes once for each idle time, and not
at all while the others are busy. Without such a timer it looks whether its time has come.

Source: timerfd_create(2).
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from contextlib import suppress

from braid.errors import InternalError

__all__ = ["Alarm"]

_NS_PER_S = 1_000_000_000
_NOW_NS = 1  # zero would disarm the timer
_Spec = ctypes.c_long * 4  # interval and first expiration, each in seconds and nanoseconds
# PyDLL: the call is shorter than releasing and taking the interpreter's lock
_libc = ctypes.PyDLL(None)


def _new_timer() -> int:
    """Return the descriptor of a timer of the kernel; -1 if there is none."""
    with suppress(AttributeError):  # another system than Linux
        return int(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC))
    return -1


class Alarm:
    """Wakes one thread `pause_s` after the last `put_off`, or when it is rung.

    Every method is called with the lock held; `wait` releases it while it blocks.

    Args:
        lock: Lock of the state that the threads share.
        pause_s: Most seconds without an event after which the thread wakes; at least half of them.
    """

    def __init__(self, lock: threading.RLock, pause_s: float) -> None:
        self._lock = lock
        self._pause_ns = round(pause_s * _NS_PER_S)
        self._put_off_ns = 0  # when the alarm was put off last
        self._is_rung = False
        self._timer = _new_timer()
        self._due_ns = math.inf  # without a timer
        self._change = threading.Condition(lock)

    def put_off(self) -> None:
        """Note an event: the alarm does not ring before a pause without events."""
        now_ns = time.monotonic_ns()
        # setting a timer takes up to 10 us, so an alarm that was just put off stays as it is
        if now_ns - self._put_off_ns > self._pause_ns // 2 and not self._is_rung:
            self._put_off_ns = now_ns
            self._set(self._pause_ns)

    def ring(self) -> None:
        """Wake the thread now, or end its next `wait` immediately."""
        if not self._is_rung:
            self._is_rung = True
            self._set(_NOW_NS)

    def wait(self) -> None:
        """Block until the alarm rings; the calling thread holds the lock once."""
        if self._timer >= 0:
            self._lock.release()
            try:
                os.read(self._timer, 8)
            finally:
                self._lock.acquire()
        else:
            while (left_ns := self._due_ns - time.monotonic_ns()) > 0:
                self._change.wait(None if left_ns == math.inf else left_ns / _NS_PER_S)
            self._due_ns = math.inf
        self._is_rung, self._put_off_ns = False, 0

    def close(self) -> None:
        """Release the timer; no thread waits any more. Idempotent."""
        if self._timer >= 0:
            os.close(self._timer)
            self._timer = -1

    def _set(self, pause_ns: int) -> None:
        if self._timer >= 0:
            spec = _Spec(0, 0, *divmod(pause_ns, _NS_PER_S))
            if _libc.timerfd_settime(self._timer, 0, ctypes.byref(spec), None):
                msg = "the descriptor of a timer of braid was closed by another part of the program"
                raise InternalError(msg)
            return
        due_ns = time.monotonic_ns() + pause_ns
        if due_ns < self._due_ns:
            self._change.notify()  # a thread that waits longer than needed looks again by itself
        self._due_ns = due_ns
