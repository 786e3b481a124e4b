"""Background progress for asynchronous operations, by polling once a millisecond.

Problem: an asynchronous operation must progress while the caller does something else. The progress
thread could do this. But two threads of one interpreter on one core need more time to hand over a
KiB than Gloo needs to send it. And most asynchronous calls of torch (functional collectives, tensor
parallel layers, messages of pipelines) are waited for immediately.

Idea: the caller starts the operation and takes the steps that are possible; the thread that waits
takes the others. While operations are in progress, a background thread polls them every
millisecond, and runs callbacks when they have ended. If an operation is waited for sooner than
that, the thread finds nothing to do. It ends after some idle time.

Operations that are started inside backward are waited for at the end of backward. On a host without
spare cores, each earlier step takes time from the computation that all ranks wait for. Such
operations are polled rarely, and not in the first round after their start.

The progress thread (`progress`) cannot run these callbacks. They belong to the program and may wait
for other operations, which a thread that runs operations must never do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from braid.comm.engines.work import Work, Works

__all__ = ["BackgroundPoller"]

ROUND_S = 1e-3
RARE_S = 0.25
IDLE_ROUNDS = 50  # before the thread ends; starting it again costs as much as several rounds


class _Callback(NamedTuple):
    """Function to call when a work has ended."""

    work: Work | Works
    act: Callable[[], object]
    rarely: bool


class BackgroundPoller:
    """Poller of works until they are done; owns a thread while there are any.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: list[Work | Works] = []
        self._rare: set[int] = set()  # ids of works that are polled rarely
        self._new: set[int] = set()  # ids of rare works that have been in no round
        self._callbacks: list[_Callback] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._hurry = threading.Event()  # ends a pause
        self._is_rare = False

    def poll(self, work: Work | Works, *, rarely: bool = False) -> None:
        """Poll `work` in the background until it is done.

        Args:
            work: Work in progress.
            rarely: Whether to poll rarely, because the caller will wait for the work soon.
        """
        with self._lock:
            self._works.append(work)
            if rarely:
                self._rare.add(id(work))
                self._new.add(id(work))
            self._start_thread(hurry=not rarely)

    def release(self, work: Work | Works) -> None:
        """Drop a work that has ended, so that its result can be freed before the next polls."""
        with self._lock:
            self._forget(work)

    def when_done(
        self, work: Work | Works, act: Callable[[], object], *, rarely: bool = False
    ) -> None:
        """Call a function when a work has succeeded or failed.

        Args:
            work: Work in progress.
            act: Function; it may wait for other works.
            rarely: Whether to poll rarely, because the caller usually calls the function itself.
        """
        with self._lock:
            self._callbacks.append(_Callback(work, act, rarely))
            if rarely:
                self._new.add(id(work))
            self._start_thread(hurry=not rarely)

    def close(self) -> None:
        """End the thread; works that are not done are no longer polled."""
        self._closing = True
        self._hurry.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start_thread(self, *, hurry: bool) -> None:
        """Start the thread if needed, and end its pause if `hurry`. The caller holds the lock."""
        if hurry and self._is_rare:
            self._hurry.set()
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        idle = 0
        while True:
            self._hurry.wait(self._pause())
            if self._closing:
                return
            idle = 0 if self._round() else idle + 1
            if idle > IDLE_ROUNDS:
                with self._lock:
                    if not (self._works or self._callbacks):
                        self._thread = None
                        return

    def _pause(self) -> float:
        """Return the seconds until the next round: more if all works are polled rarely."""
        with self._lock:
            self._hurry.clear()
            if self._works or self._callbacks:  # else keep the pace of the last works
                all_rare = len(self._rare) == len(self._works)
                self._is_rare = all_rare and all(callback.rarely for callback in self._callbacks)
            return RARE_S if self._is_rare else ROUND_S

    def _round(self) -> bool:
        """Poll every work once; return whether there were any."""
        with self._lock:
            num_works = len(self._works)
            works = [work for work in self._works if id(work) not in self._new]
            callbacks = [
                callback for callback in self._callbacks if id(callback.work) not in self._new
            ]
            self._new.clear()
        ended = [work for work in works if work.done()]
        due = [callback for callback in callbacks if callback.work.done()]
        with self._lock:
            for work in ended:
                self._forget(work)
            for callback in due:
                self._callbacks.remove(callback)
        for callback in due:
            callback.act()
        return bool(num_works or callbacks)

    def _forget(self, work: Work | Works) -> None:
        if work in self._works:
            self._works.remove(work)
            self._rare.discard(id(work))
            self._new.discard(id(work))
