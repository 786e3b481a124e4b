"""Leader/followers: which thread of a node receives, and which threads process its messages.

Problem: a thread that receives and hands each call to another costs two changes of threads for a
call, which take longer than a small call itself. A thread that receives and processes cannot
receive meanwhile.

Idea: one thread at a time receives, the leader. It processes its message itself, and a follower
becomes the leader. A thread of the program that waits for an answer leads as well: it processes its
answer, and hands calls of peers to the pool. While programs wait in quick succession the pool stays
back, and leads after `REST_S` without a leader: one follower, the standby, waits on an alarm.

               rpc_sync begins    a peer calls     rpc_sync ends    REST_S later   a peer calls
    program  ──┼─── LEADS ────────┼─── LEADS ──────┼─── computes ──────────────────────────────
    pool     LEADS ── follows ────┼── processes ───┼── follows ─────┼─── LEADS ────┼─ processes
    pool     ──────── follows ──────────────────────── follows ────────────────────┼─── LEADS

A bound holds for the calls that are processed at the same time, and for nothing else: each of them
may wait for an answer, or for the loss of a node, which comes after it.

Source: D. Schmidt et al., "Leader/Followers", PLoP 2000.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from braid.errors import CommTimeout, StaleError
from braid.runtime.alarm import Alarm
from braid.runtime.message import Delivery, Van

__all__ = ["LeaderFollowers"]

LOG = logging.getLogger(__name__)

REST_S = 0.003
_TICK_S = 0.25  # longest receive, so that deadlines are noticed
_TICK_NS = round(_TICK_S * 1e9)


class _Backlog:
    """Messages of one kind; the pool processes at most `limit` of them at the same time."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.waiting: deque[tuple[Delivery, int]] = deque()  # with its time of arrival
        self.num_processed = 0


@dataclass(eq=False)
class LeaderFollowers:
    """Receives the messages of a van, and processes them in a pool of threads.

    Attributes:
        van: The van.
        handle: Called with each message and the time at which it came; it may block.
        handle_at_once: Called with each message before `handle`; handles an urgent message without
            blocking, and returns whether the message was urgent.
        tick: Called often, to check deadlines.
        is_bounded: Function that returns whether `max_running` applies to a message.
        max_running: Maximum number of such messages that the pool processes at the same time.
        num_waiting: Number of threads of the program that wait.
    """

    van: Van
    handle: Callable[[Delivery, int], None]
    handle_at_once: Callable[[Delivery], bool]
    tick: Callable[[], None]
    is_bounded: Callable[[Delivery], bool]
    max_running: int

    def __post_init__(self) -> None:
        """Begin without threads."""
        self._now_ns = self.van.clock.now_ns
        self._lock = threading.RLock()
        self._is_closed = False
        # the leader
        self._has_leader = False
        self._leader_key: object = None  # of the thread of the program that leads
        self._led_ns = self._now_ns()  # when a thread led last
        self._ticked_ns = 0
        # threads of the program
        self.num_waiting = 0
        self._waiters: dict[object, threading.Condition] = {}  # threads that wait and do not lead
        # threads of the pool
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()  # of threads
        self._follower = threading.Condition(self._lock)
        self._num_followers = 0  # with a leader of the pool
        self._num_asleep = 0  # followers that have neither been promoted nor are the standby
        self._num_promoted = 0  # threads that were promoted, and do not run yet
        self._has_standby = False  # a follower that waits on the alarm
        self._alarm = Alarm(self._lock, REST_S)
        self._is_called = False  # whether the standby was promoted, and does not run yet
        self._stays_back = False  # since a thread of the program waited, until the alarm rings
        self._answering: set[int] = set()  # threads that process an urgent message
        self._bounded, self._urgent = _Backlog(self.max_running), _Backlog(float("inf"))

    def start(self) -> None:
        """Start the threads that receive messages and run calls."""
        with self._lock:
            self._spawn()
            self._spawn()

    def close(self) -> None:
        """End the threads; the van is closed already."""
        with self._lock:
            self._is_closed = True
            self._follower.notify_all()
            self._alarm.ring()
            self._wake_waiters()
        for thread in list(self._threads):  # each removes itself
            if thread is not threading.current_thread():
                thread.join(5.0)
        with self._lock:
            if not self._has_standby:
                self._alarm.close()

    # -- the leader: a thread of the program or of the pool

    def _lead(self, timeout_s: float) -> Delivery | None:
        """Receive one message, without the lock; None at the deadline."""
        # Receiving and decoding happen without the lock, so that other threads can begin waits and
        # hand over messages meanwhile.
        self._has_leader = True
        delivery = None
        self._lock.release()
        try:
            delivery = self.van.recv(timeout_s)
            self._leader_key = None  # this thread looks again by itself
            if self.handle_at_once(delivery):
                delivery = None
        except CommTimeout:
            pass
        finally:
            self._lock.acquire()
            self._has_leader = False
            self._leader_key = None
            self._led_ns = self._now_ns()
            if self._led_ns - self._ticked_ns > _TICK_NS:
                self._ticked_ns = self._led_ns
                self._unlocked(self.tick)
        return delivery

    # -- a thread of the program

    def wait(
        self,
        is_over: Callable[[], bool],
        timeout_s: float | None,
        is_own: Callable[[Delivery], bool],
        key: object = None,
        *,
        is_quick: bool = True,
    ) -> bool:
        """Wait in a thread of the program; the thread receives messages if no other one does.

        Args:
            is_over: Condition to wait for.
            is_own: Function that returns whether this thread processes a message itself.
            timeout_s: Deadline in seconds; no deadline when None.
            key: Name of this wait for `wake`; only `notify` wakes it when None.
            is_quick: Whether the messages of `is_own` are processed quickly; if not, another thread
                receives meanwhile.

        Returns:
            Whether the condition is true.

        Raises:
            StaleError: The van is closed.
        """
        until_ns = None if timeout_s is None else self._now_ns() + round(timeout_s * 1e9)
        key = object() if key is None else key
        with self._lock:
            self.num_waiting += 1
            try:
                while not is_over():
                    left_s = _TICK_S
                    if until_ns is not None:
                        left_s = min(left_s, (until_ns - self._now_ns()) / 1e9)
                    if left_s <= 0:
                        return False
                    # Each thread that follows sleeps on another condition: the leader that reads
                    # its answer wakes this thread alone, and not all that wait.
                    if self._has_leader:
                        self._waiters[key] = waiter = threading.Condition(self._lock)
                        waiter.wait(left_s)
                        del self._waiters[key]
                        continue
                    self._leader_key = key
                    delivery = self._lead(left_s)
                    if delivery is None:
                        continue
                    if is_own(delivery):
                        self._process_own(delivery, is_quick=is_quick)
                    else:
                        self._hand_to_pool(delivery, self._led_ns)
                return True
            finally:
                self._step_back()

    def _process_own(self, delivery: Delivery, *, is_quick: bool) -> None:
        """Process a message in a thread that waits; others lead if that takes long."""
        # Processing that takes long would leave the node without a leader: other answers would lie
        # unread, and deadlines would pass unseen.
        if is_quick:
            self._unlocked(self.handle, delivery, self._led_ns)
            return
        self._step_back()
        try:
            self._unlocked(self.handle, delivery, self._led_ns)
        finally:
            self.num_waiting += 1

    def _step_back(self) -> None:
        """Wait no longer in this thread: another waiting one leads, or the pool after `REST_S`."""
        self.num_waiting -= 1
        # A program that calls in a loop waits again microseconds after each answer. If the pool led
        # in between, each answer would cost a change of threads.
        self._stays_back = True
        self._alarm.put_off()
        if self.num_waiting and not self._has_leader:
            self._wake_waiters(1)
        elif not self._has_standby:
            self._promote_follower()

    # -- a thread of the pool

    def _run(self) -> None:
        """Process, lead or follow."""
        with self._lock, contextlib.suppress(StaleError):
            self._num_promoted -= 1
            self._num_followers += 1
            try:
                while not self._is_closed:
                    if (backlog := self._ready()) is not None:
                        self._process(backlog)
                    elif self._may_lead():
                        self._lead_in_pool()
                    else:
                        self._follow()
            finally:
                self._num_followers -= 1
                self._threads.remove(threading.current_thread())
                self._wake_waiters()
                if not self._is_closed and not self._num_followers:
                    self._promote_follower()  # it takes the place of this thread

    def _ready(self) -> _Backlog | None:
        """Return a backlog with a message that may be processed now."""
        if self._urgent.waiting:
            return self._urgent
        bounded = self._bounded
        return bounded if bounded.waiting and bounded.num_processed < bounded.limit else None

    def _process(self, backlog: _Backlog) -> None:
        """Process the next message; a follower must be able to lead meanwhile."""
        delivery, arrived_ns = backlog.waiting.popleft()
        backlog.num_processed += 1
        if backlog is self._urgent:
            self._answering.add(threading.get_ident())
        self._num_followers -= 1
        is_backed_up = self._bounded.waiting or self._urgent.waiting
        if not self._num_followers or is_backed_up or not self._has_standby:
            self._promote_follower()
        try:
            self._unlocked(self.handle, delivery, arrived_ns)
        except StaleError:
            raise
        except BaseException:  # what a program does must not end the threads of its node
            LOG.exception("%s could not handle %s", self.van.node, type(delivery.message).__name__)
        finally:
            self._num_followers += 1
            backlog.num_processed -= 1
            self._answering.discard(threading.get_ident())

    def _may_lead(self) -> bool:
        return not (self._has_leader or self.num_waiting or self._stays_back)

    def _lead_in_pool(self) -> None:
        """Receive one message; this thread processes it next, unless too many are processed."""
        delivery = self._lead(_TICK_S)
        if self.num_waiting:
            self._wake_waiters(1)
        if delivery is not None:
            self._alarm.put_off()
            self._backlog_of(delivery).waiting.append((delivery, self._led_ns))

    def _follow(self) -> None:
        """Wait for a promotion, or as the standby until no thread has led for `REST_S`."""
        if self._has_standby:
            self._num_asleep += 1
            self._follower.wait()
            self._num_promoted -= 1
            return
        self._has_standby = True
        self._alarm.wait()
        self._num_promoted -= self._is_called
        self._has_standby = self._stays_back = self._is_called = False

    # -- promotions, with the lock

    def _promote_follower(self) -> None:
        """Wake a follower, which processes or leads; start one if there is none."""
        if self._is_closed:
            return
        num_waiting = len(self._bounded.waiting) + len(self._urgent.waiting)
        if self._num_promoted > num_waiting:  # one of them leads
            return
        if self._num_asleep:
            self._num_asleep -= 1
            self._num_promoted += 1
            self._follower.notify()
        elif self._has_standby and not self._is_called:
            self._is_called = True
            self._num_promoted += 1
            self._alarm.ring()
        elif len(self._threads) <= self._bounded.limit + self._urgent.num_processed:
            self._spawn()

    def _spawn(self) -> None:
        name = f"braid-rpc-{self.van.node}-{next(self._numbers)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        self._num_promoted += 1
        thread.start()

    def _wake_waiters(self, limit: int | None = None) -> None:
        """Wake threads of the program that wait: all, or one to lead if its wait is not over."""
        for waiter in itertools.islice(self._waiters.values(), limit):
            waiter.notify()

    def _hand_to_pool(self, delivery: Delivery, arrived_ns: int) -> None:
        self._backlog_of(delivery).waiting.append((delivery, arrived_ns))
        self._promote_follower()

    def _backlog_of(self, delivery: Delivery) -> _Backlog:
        return self._bounded if self.is_bounded(delivery) else self._urgent

    def _unlocked(self, work: Callable[..., None], *args: object) -> None:
        self._lock.release()
        try:
            work(*args)
        finally:
            self._lock.acquire()

    # -- from any thread

    def submit(self, delivery: Delivery) -> None:
        """Handle a message that this node sends to itself, like a received one."""
        if self.handle_at_once(delivery):
            return
        with self._lock:
            self._hand_to_pool(delivery, self._now_ns())

    def expect(self) -> None:
        """Make a thread of the pool receive immediately, if no thread receives or waits.

        Call it when an answer will come for which no thread may wait.
        """
        with self._lock:
            self._stays_back = False
            if self._has_leader or self.num_waiting:
                return
            # a thread that processes an answer leads next, unless it makes this call and may wait
            if not self._answering or threading.get_ident() in self._answering:
                self._promote_follower()

    def notify(self) -> None:
        """Wake all waiting threads of the program, which then check their conditions."""
        with self._lock:
            self._wake_waiters()
            if self._leader_key is not None:
                self.van.rouse()

    def wake(self, key: object) -> None:
        """Wake the thread that waits with this key, which then checks its condition."""
        with self._lock:
            waiter = self._waiters.get(key)
            if waiter is not None:
                waiter.notify()
            elif self._leader_key == key:
                self.van.rouse()
