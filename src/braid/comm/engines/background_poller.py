"""Takes the steps of operations that nobody waits for, without a thread in anybody's way.

Problem: an asynchronous operation promises to go on while the caller does something else. Handing
each one to the progress thread keeps the promise, but two threads of one interpreter that share a
core take longer to hand over a KiB than Gloo takes to send it; and most asynchronous calls of torch
(functional collectives, tensor parallel layers, messages of pipelines) are waited for at once.

Idea: the caller starts the operation and takes the steps that are possible; whoever waits takes the
others. A thread comes by every millisecond while anything is under way, takes the steps that have
become possible since, and calls back. It has nothing to do for operations that are waited for
sooner than that, and ends when it has not been needed for a while.

What is started inside backward is waited for at its end. On a host without spare cores every step
before that takes time from the computation that all ranks wait for: such operations are polled
rarely, and not in the round after their start.

This is not the progress thread (`progress`): callbacks here are the program's and may wait for
other operations, which the thread that carries operations out must never do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from braid.comm.engines.work import Work, Works

__all__ = ["BackgroundPoller"]

ROUND_S = 1e-3
RARE_S = 0.25
IDLE_ROUNDS = 50  # before the thread ends; starting one costs as much as several rounds


class BackgroundPoller:
    """Polls what is under way; owns a thread while there is anything.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: list[Work | Works] = []
        self._rare: set[int] = set()  # ids of those that are polled rarely
        self._new: set[int] = set()  # ids of those of these that no round has seen
        self._callbacks: list[tuple[Work | Works, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._call = threading.Event()  # to come at once
        self._is_rare = False

    def poll(self, work: Work | Works, *, rarely: bool = False) -> None:
        """Take the steps of `work` until it is done.

        Args:
            work: Work under way.
            rarely: Come by rarely, because somebody will wait for it soon.
        """
        with self._lock:
            self._works.append(work)
            if rarely:
                self._rare.add(id(work))
                self._new.add(id(work))
            self._come(hurry=not rarely)

    def release(self, work: Work | Works) -> None:
        """Forget `work`, which has ended; else what it returned would live until the next round."""
        with self._lock:
            self._forget(work)

    def when_done(self, work: Work | Works, act: Callable[[], object]) -> None:
        """Call `act` when `work` is done, well or badly; it may wait for other works."""
        with self._lock:
            self._callbacks.append((work, act))
            self._come(hurry=True)

    def close(self) -> None:
        """Join the thread; what it polls is left as it is."""
        self._closing = True
        self._call.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _come(self, *, hurry: bool) -> None:
        if hurry and self._is_rare:
            self._call.set()
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        idle = 0
        while True:
            self._call.wait(self._pause())
            if self._closing:
                return
            idle = 0 if self._round() else idle + 1
            if idle > IDLE_ROUNDS:
                with self._lock:
                    if not (self._works or self._callbacks):
                        self._thread = None
                        return

    def _pause(self) -> float:
        with self._lock:
            self._call.clear()
            if self._works or self._callbacks:  # else what comes next is probably like the last
                all_rare = len(self._rare) == len(self._works)
                self._is_rare = all_rare and not self._callbacks
            return RARE_S if self._is_rare else ROUND_S

    def _round(self) -> bool:
        """Poll everything once; whether there was anything."""
        with self._lock:
            num_works = len(self._works)
            works = [work for work in self._works if id(work) not in self._new]
            callbacks = tuple(self._callbacks)
            self._new.clear()
        ended = [work for work in works if work.done()]
        due = [pair for pair in callbacks if pair[0].done()]
        with self._lock:
            for work in ended:
                self._forget(work)
            for pair in due:
                self._callbacks.remove(pair)
        for _, act in due:
            act()
        return bool(num_works or callbacks)

    def _forget(self, work: Work | Works) -> None:
        if work in self._works:
            self._works.remove(work)
            self._rare.discard(id(work))
            self._new.discard(id(work))
