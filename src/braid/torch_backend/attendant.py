"""Steps for what nobody waits for, without a thread in anybody's way.

Problem: `async_op=True` promises that an operation goes on while the caller does something else. Handing each one to a thread
keeps the promise, but two threads of one interpreter that share a core take longer to hand over a KiB than Gloo takes to
send it; and most asynchronous calls of torch (functional collectives, tensor parallel layers, messages of pipelines) are
waited for at once.

Idea: the caller starts the operation and takes the steps that are possible; whoever waits takes the others. A thread comes by every
millisecond while anything is under way, takes the steps that have become possible since, and settles futures. It
has nothing to do for operations that are waited for sooner than that, and ends when it has not been needed for a while.

What is started inside backward is waited for at its end, and on a host without spare cores every step before that takes time
from the computation that all are waiting for: there it is started lazily, and the thread comes by rarely and leaves alone
what is younger than its last round.
"""

from __future__ import annotations

import threading

from braid.torch_backend.futures import WorkFuture
from braid.torch_backend.work import Started

__all__ = ["Attendant"]

ROUND_S = 1e-3
PATIENT_S = 0.25
IDLE_ROUNDS = 50  # before the thread ends; starting one costs as much as several rounds


class Attendant:
    """Attends to what is under way; owns a thread while there is anything.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._works: list[Started] = []
        self._patient: set[int] = set()  # those of them that can be left for longer
        self._young: set[int] = set()  # those of these that no round has seen
        self._futures: list[tuple[Started, WorkFuture]] = []
        self._thread: threading.Thread | None = None
        self._closing = False
        self._call = threading.Event()  # to come at once
        self._is_patient = False

    def attend(self, work: Started, *, patient: bool = False) -> None:
        """Take the steps of `work` until it is done.

        Args:
            work: What was started.
            patient: Rarely, because somebody will wait for it soon.
        """
        with self._lock:
            self._works.append(work)
            if patient:
                self._patient.add(id(work))
                self._young.add(id(work))
            self._come(hurry=not patient)

    def release(self, work: Started) -> None:
        """Forget `work`, which has ended; else what it returned would live until the next round."""
        with self._lock:
            self._forget(work)

    def settle(self, work: Started, future: WorkFuture) -> None:
        """Settle `future` when `work` is done."""
        with self._lock:
            self._futures.append((work, future))
            self._come(hurry=True)

    def close(self) -> None:
        """Join the thread; what it attends to is left as it is."""
        self._closing = True
        self._call.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _come(self, *, hurry: bool) -> None:
        if hurry and self._is_patient:
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
                    if not (self._works or self._futures):
                        self._thread = None
                        return

    def _pause(self) -> float:
        with self._lock:
            self._call.clear()
            if self._works or self._futures:  # else what comes next is probably like what came last
                all_patient = len(self._patient) == len(self._works)
                self._is_patient = all_patient and not self._futures
            return PATIENT_S if self._is_patient else ROUND_S

    def _round(self) -> bool:
        """Look after everything once; whether there was anything."""
        with self._lock:
            num_works = len(self._works)
            works = [work for work in self._works if id(work) not in self._young]
            futures = tuple(self._futures)
            self._young.clear()
        ended = [work for work in works if work.done()]
        settled = [pair for pair in futures if pair[0].done()]
        with self._lock:
            for work in ended:
                self._forget(work)
            for pair in settled:
                self._futures.remove(pair)
        for _, future in settled:
            future.settle()
        return bool(num_works or futures)

    def _forget(self, work: Started) -> None:
        if work in self._works:
            self._works.remove(work)
            self._patient.discard(id(work))
            self._young.discard(id(work))
