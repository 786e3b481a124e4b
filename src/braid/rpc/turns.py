"""Threads of a node: who receives, and who runs the calls that arrive.

Problem: a thread that receives and hands each call to another costs two changes of threads for a
call, which take longer than a small call itself. A thread that receives and runs is deaf meanwhile.

Idea: one thread at a time receives, the leader. It runs what it has received itself, and the next
idle thread leads. A thread of the program that waits for an answer leads, too, and hands calls of
peers to the pool. While programs wait in quick succession the pool stays back, and comes forward
after `REST_S`, as it does for a leader that runs a call for longer.

    event                                         leads next
    a thread of the program waits, nobody leads   that thread
    a pool's thread has run a call                that thread, if nobody leads
    nobody leads for REST_S                       an idle thread of the pool

A bound holds for the calls that run at the same time, and for nothing else: each of them may wait
for an answer, or for the loss of a node, which comes after it.

Source: D. Schmidt et al., "Leader/Followers", PLoP 2000.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable

from braid.errors import CommTimeout, StaleError
from braid.runtime.message import Delivery, Van

__all__ = ["REST_S", "Turns"]

LOG = logging.getLogger(__name__)

REST_S = 0.002
_ALERT_S = 0.2  # after the last message, for which an idle thread looks whether somebody leads
_TICK_S = 0.25  # longest receive, so that deadlines are noticed
_TICK_NS = round(_TICK_S * 1e9)


class Turns:
    """Receives the messages of a van, and runs work on a pool of threads.

    Args:
        van: The van.
        handle: Function for each message, and the time at which it came; it may block.
        is_bounded: Function that says for which messages `max_running` is meant.
        handle_at_once: Function for each message that comes, before `handle`: whether it was one
            that overtakes others and takes no time.
        tick: Function that is called often, for deadlines.
        max_running: Such messages that are handled by the pool at the same time.
    """

    def __init__(
        self,
        van: Van,
        handle: Callable[[Delivery, int], None],
        handle_at_once: Callable[[Delivery], bool],
        tick: Callable[[], None],
        is_bounded: Callable[[Delivery], bool],
        max_running: int,
    ) -> None:
        self._van = van
        self._now_ns = van.clock.now_ns
        self._handle = handle
        self._handle_at_once = handle_at_once
        self._tick = tick
        self._is_bounded = is_bounded
        self._max_running = max_running
        self._lock = threading.RLock()
        self._waiters: dict[object, threading.Condition] = {}  # threads of the program that wait
        self._idle = threading.Condition(self._lock)  # for threads of the pool
        self._queue: deque[tuple[Delivery, int]] = deque()  # and when each has come
        self._urgent: deque[tuple[Delivery, int]] = deque()  # those without a bound
        self._is_led = False
        self._leader: object = None  # key of the thread of the program that leads
        self._is_closed = False
        self._num_callers = 0
        self._num_idle = 0
        self._num_running = 0  # of the bounded ones
        self._num_urgent = 0
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()  # of threads
        self._has_standby = False
        self._ticked_ns = 0
        self._waited_ns = 0  # when a thread of the program waited last
        self._moved_ns = van.clock.now_ns()  # when somebody led or waited last

    def start(self) -> None:
        """Begin to receive."""
        with self._idle:
            self._spawn()
            self._spawn()

    def submit(self, delivery: Delivery) -> None:
        """Handle a message of this node to itself as one that arrives."""
        if self._handle_at_once(delivery):
            return
        with self._lock:
            self._put_off(delivery, self._now_ns())

    def wait(
        self,
        is_over: Callable[[], bool],
        timeout_s: float | None,
        is_own: Callable[[Delivery], bool],
        key: object = None,
        *,
        is_quick: bool = True,
    ) -> bool:
        """Wait in a thread of the program, which receives meanwhile if nobody else does.

        Args:
            is_over: Condition.
            is_own: Function that says which messages this thread handles itself.
            timeout_s: Deadline; none when None.
            key: Name of this wait for `wake`; only `notify` wakes it when None.
            is_quick: Whether those messages take no time; else others lead meanwhile.

        Returns:
            Whether it is over.

        Raises:
            StaleError: The van is closed.
        """
        until_ns = None if timeout_s is None else self._now_ns() + round(timeout_s * 1e9)
        key = object() if key is None else key
        with self._lock:
            self._num_callers += 1
            try:
                while not is_over():
                    left_s = _TICK_S
                    if until_ns is not None:
                        left_s = min(left_s, (until_ns - self._now_ns()) / 1e9)
                    if left_s <= 0:
                        return False
                    if self._is_led:
                        self._waiters[key] = waiter = threading.Condition(self._lock)
                        waiter.wait(left_s)
                        del self._waiters[key]
                        continue
                    self._leader = key
                    delivery = self._lead(left_s)
                    if delivery is None:
                        continue
                    if is_own(delivery):
                        self._handle_own(delivery, is_quick=is_quick)
                    else:
                        self._put_off(delivery, self._moved_ns)
                return True
            finally:
                self._step_back()

    def notify(self) -> None:
        """Let all threads of the program look at their conditions again."""
        with self._lock:
            self._notify_all()
            if self._leader is not None:
                self._van.rouse()

    def wake(self, key: object) -> None:
        """Let one thread of the program look at its condition again."""
        with self._lock:
            waiter = self._waiters.get(key)
            if waiter is not None:
                waiter.notify()
            elif self._leader == key:
                self._van.rouse()

    def expect(self) -> None:
        """Let the pool lead at once: an answer will come for which no thread may wait here."""
        with self._lock:
            self._waited_ns = 0
            if not self._is_led and not self._num_callers:
                self._idle.notify()

    def close(self) -> None:
        """End the threads; the van is closed already."""
        with self._idle:
            self._is_closed = True
            self._idle.notify_all()
            self._notify_all()
        for thread in list(self._threads):  # each takes itself out
            if thread is not threading.current_thread():
                thread.join(5.0)

    # -- inside, with the lock

    def _step_back(self) -> None:
        """Wait no longer in this thread: another waiting one leads, or the pool after `REST_S`."""
        self._num_callers -= 1
        self._waited_ns = self._moved_ns = self._now_ns()
        if self._num_callers and not self._is_led:
            self._call_waiter()
        elif not self._has_standby:
            self._idle.notify()

    def _handle_own(self, delivery: Delivery, *, is_quick: bool) -> None:
        """Handle a message in a thread that waits; the node hears others if that takes long."""
        if is_quick:
            self._unlocked(self._handle, delivery, self._moved_ns)
            return
        self._step_back()
        try:
            self._unlocked(self._handle, delivery, self._moved_ns)
        finally:
            self._num_callers += 1

    def _notify_all(self) -> None:
        for waiter in self._waiters.values():
            waiter.notify()

    def _call_waiter(self) -> None:
        """Let one of the threads that wait lead."""
        for waiter in self._waiters.values():
            waiter.notify()
            return

    def _spawn(self) -> None:
        name = f"braid-rpc-{self._van.node}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wake_pool(self) -> None:
        """Let an idle thread look; make one if there is none."""
        if self._num_idle:
            self._idle.notify()
        elif len(self._threads) <= self._max_running + self._num_urgent and not self._is_closed:
            self._spawn()

    def _put_off(self, delivery: Delivery, arrived_ns: int) -> None:
        """Leave a message to the pool."""
        queue = self._queue if self._is_bounded(delivery) else self._urgent
        queue.append((delivery, arrived_ns))
        self._wake_pool()

    def _lead(self, timeout_s: float) -> Delivery | None:
        """Receive one message; the lock is released meanwhile."""
        self._is_led = True
        self._lock.release()
        delivery = None
        try:
            delivery = self._van.recv(timeout_s)
            self._leader = None  # this thread looks again by itself
            if self._handle_at_once(delivery):
                delivery = None
        except CommTimeout:
            pass
        finally:
            self._lock.acquire()
            self._is_led = False
            self._leader = None
            self._moved_ns = self._now_ns()
            if self._moved_ns - self._ticked_ns > _TICK_NS:
                self._ticked_ns = self._moved_ns
                self._unlocked(self._tick)
        return delivery

    def _unlocked(self, work: Callable[..., None], *args: object) -> None:
        self._lock.release()
        try:
            work(*args)
        finally:
            self._lock.acquire()

    def _run(self) -> None:
        """Lead, run, or rest; in a thread of the pool."""
        with self._idle, contextlib.suppress(StaleError):
            self._num_idle += 1
            try:
                while not self._is_closed:
                    self._step()
            finally:
                self._num_idle -= 1
                self._threads.remove(threading.current_thread())
                self._notify_all()
                if not self._is_closed and not self._num_idle:
                    self._wake_pool()  # another takes the place of this one

    def _step(self) -> None:
        if self._urgent:
            self._handle_urgent(*self._urgent.popleft())
        elif self._queue and self._num_running < self._max_running:
            self._busy(*self._queue.popleft())
        elif self._may_lead():
            delivery = self._lead(_TICK_S)
            if self._num_callers:
                self._call_waiter()
            if delivery is None:
                return
            if not self._is_bounded(delivery):
                self._handle_urgent(delivery, self._moved_ns)
            elif self._num_running < self._max_running:
                self._busy(delivery, self._moved_ns)
            else:
                self._queue.append((delivery, self._moved_ns))
        else:
            self._rest()

    def _busy(self, delivery: Delivery, arrived_ns: int) -> None:
        """Handle a bounded message."""
        self._num_running += 1
        try:
            self._work(delivery, arrived_ns)
        finally:
            self._num_running -= 1

    def _handle_urgent(self, delivery: Delivery, arrived_ns: int) -> None:
        """Handle a message without a bound."""
        self._num_urgent += 1
        try:
            self._work(delivery, arrived_ns)
        finally:
            self._num_urgent -= 1

    def _work(self, delivery: Delivery, arrived_ns: int) -> None:
        """Handle a message; another thread must be able to lead meanwhile."""
        self._num_idle -= 1
        if not self._num_idle or self._queue or self._urgent or not self._has_standby:
            self._wake_pool()
        try:
            self._unlocked(self._handle, delivery, arrived_ns)
        except StaleError:
            raise
        except BaseException:  # what a program does must not end the threads of its node
            LOG.exception("%s could not handle %s", self._van.node, type(delivery.message).__name__)
        finally:
            self._num_idle += 1

    def _may_lead(self) -> bool:
        if self._is_led or self._num_callers:
            return False
        return self._now_ns() - self._waited_ns > REST_S * 1e9

    def _rest(self) -> None:
        """Wait; one idle thread looks from time to time whether somebody leads."""
        now_ns = self._now_ns()
        is_alert = now_ns - self._moved_ns < _ALERT_S * 1e9
        if is_alert and not self._has_standby:
            self._has_standby = True
            try:
                self._idle.wait(REST_S)
            finally:
                self._has_standby = False
        else:
            self._idle.wait(None if self._is_led else _TICK_S)
