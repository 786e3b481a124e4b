"""Decides who takes the steps of operations: a thread that waits, or the progress thread.

A started operation needs this rank's steps even while the rank waits for something else. If rank 0
waited for bucket A and rank 1 for bucket B, and each advanced only what it waits for, neither would
end (MPI calls this the progress rule). So a thread that waits takes the steps of every started
operation as they become possible.

`StepsBy.THREAD` hands an operation to the progress thread. Operations of one channel are carried
out in the order in which they were started; those of different channels advance independently, so a
late one blocks no other. An operation that is started in the background behind one of the program's
threads is left to the thread, together with what it stands behind. The progress thread exists only
while something is under way. While it runs, the interpreter's switch interval is lowered (a 1 MiB
all-reduce would pay the default of 5 ms several times) and restored afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

from braid.comm.channel.channel import Channel
from braid.comm.channel.control_pages import ControlPages
from braid.comm.engines.operation import Operation
from braid.comm.engines.work import StepsBy
from braid.errors import BraidError, CommTimeout, StaleError
from braid.transport import MemoryTransport

__all__ = ["Progress"]

SWITCH_INTERVAL_S = 1e-4
CLOSE_GRACE_S = 5.0
LOOK_S = 0.05  # how often a thread that waits for the progress thread looks at what was started


class Progress:
    """Progress of all operations of one rank; owns the thread, if there is one; a context manager.

    Args:
        transport: The transport whose waits are taken over.
    """

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._now_ns = transport.clock.now_ns
        self._lock = threading.Lock()
        self._ordering = threading.Lock()  # threads take their places on channels one by one
        self._started: list[Operation] = []  # in order, whether somebody waits for them or not
        self._num_started = 0  # how many nobody was waiting for when they began
        self._queues: dict[Channel, deque[Operation]] = {}
        self._left: list[Operation] = []  # started ones that the thread sees to when nobody waits
        self._thread: threading.Thread | None = None
        self._fresh = False
        self._closing = False
        self._waiting: set[int] = set()  # threads in `wait`

    def execute(self, operation: Operation) -> None:
        """Carry out a new operation in this thread, behind what is queued on its channel."""
        if self._transport.forked or self._thread is not None:
            self.check_caller(operation.text)
        with self._ordering:
            queued = operation.channel in self._queues
            if queued:
                self._submit(operation)
            else:
                self._started.append(operation)
        if queued:
            self._join(operation, None)
        else:
            self._take_steps(operation, None)

    def start(self, operation: Operation, steps_by: StepsBy, *, opens: bool = False) -> None:
        """Give a new operation its place in the order of its channel, and take steps.

        Args:
            operation: New.
            steps_by: Policy for the steps.
            opens: Take the first step in any case: it only tells where a tensor lies, and nothing
                stands before it.
        """
        if self._transport.forked:
            self.refuse_fork()
        with self._ordering:
            by_thread = steps_by is StepsBy.THREAD and not self._pending(operation.channel)
            if by_thread or operation.channel in self._queues:
                self._submit(operation)
                return
            self._started.append(operation)
        start_ns = self._now_ns()
        if opens:
            operation.advance(until_wait=True)
        if steps_by is not StepsBy.WAITER:
            if len(self._started) > 1:
                self.advance_started()
            if not self._behind(operation):
                operation.advance()
        operation.statistics.spent_ns += self._now_ns() - start_ns
        if operation.done:
            self._strike(operation)
            return
        self._num_started += 1
        self._transport.bells.ring_own()  # threads that wait take its steps from now on
        if steps_by is StepsBy.THREAD:  # together with what it stands behind
            with self._lock:
                self._left.append(operation)
            self._wake()

    def _pending(self, channel: Channel) -> bool:
        """Whether something that was started on `channel` has not ended."""
        return any(o.channel is channel and not o.done for o in tuple(self._started))

    def advance_started(self) -> bool:
        """Advance each started operation that is first on its channel; return whether any moved."""
        return self._advance(self._heads())

    def _advance(self, heads: list[Operation]) -> bool:
        """Advance those that can move and that no other thread is at; whether there were any."""
        moved = False
        for operation in heads:
            if operation.ready():
                moved = True
                if operation.advance():
                    self._strike(operation)
                    self._transport.bells.ring_own()  # another thread may wait behind it
                elif operation.ready():  # who looked while this thread was at it may be asleep now
                    self._transport.bells.ring_own()
        return moved

    def poll(self, operation: Operation) -> None:
        """Take the steps that are possible now until `operation` has ended or nothing moves."""
        if not operation.done and self._transport.forked:
            self.refuse_fork()
        if self._waiting - {threading.get_ident()}:
            return  # a waiting thread takes all steps, and two threads hinder each other
        while not operation.done and self.advance_started():
            pass

    def _heads(self) -> list[Operation]:
        """The first started operation of each channel."""
        heads: dict[Channel, Operation] = {}
        for operation in tuple(self._started):
            if not operation.done:
                heads.setdefault(operation.channel, operation)
            else:
                self._strike(operation)
        return list(heads.values())

    def _strike(self, operation: Operation) -> None:
        """Forget an operation that has ended."""
        with self._ordering:
            if operation in self._started:
                self._started.remove(operation)

    def _behind(self, operation: Operation) -> bool:
        """Return whether an unfinished operation stands before this one on its channel."""
        started = self._started
        if operation.done or len(started) < 2:  # the usual case: it is alone
            return False
        for other in tuple(started):
            if other is operation:
                return False
            if other.channel is operation.channel and not other.done:
                return True
        return False

    def wait(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Take all steps of `operation` in this thread, and those of started ones in between.

        Args:
            operation: Started; if the progress thread carries it out, this waits for the thread.
            timeout_s: Seconds for this wait, within the operation's own deadline.

        Raises:
            CommTimeout: `timeout_s` passed; the operation goes on.
            CommError: What stopped it.
        """
        if not operation.done and (self._transport.forked or self._thread is not None):
            self.check_caller(operation.text)
        if operation.submitted is not None:
            self._join(operation, timeout_s)
        else:
            self._take_steps(operation, timeout_s)

    def _take_steps(self, operation: Operation, timeout_s: float | None) -> None:
        """Take the steps of `operation` to its end, and of what stands before it."""
        start_ns = self._now_ns()
        late = None if timeout_s is None else self._late(timeout_s)
        thread, started = threading.get_ident(), self._started
        self._waiting.add(thread)
        try:
            while (len(started) > 1 and self._behind(operation)) or not operation.advance(
                in_turn=True
            ):
                if len(started) > 1 and self.advance_started():
                    continue
                if late is not None and late():
                    break
                self._wait(operation, late)
        except BaseException as exc:  # noqa: BLE001 - an interrupt, say: peers must hear of it
            operation.fail(exc)
        finally:
            self._waiting.discard(thread)
            if self._left and not self._waiting:
                self._wake()
            operation.statistics.spent_ns += self._now_ns() - start_ns
        if operation.done:
            self._strike(operation)
        if operation.error is not None:
            _raise_error(operation)
        if not operation.done:
            raise CommTimeout(_timeout_text(operation, timeout_s))

    def _wait(self, operation: Operation, late: Callable[[], bool] | None) -> None:
        start_ns = self._now_ns()
        ready = self._watcher(operation, late)
        try:
            waited_ns = self._transport.waiter.until(ready, operation.check)
        except BaseException:
            operation.note_wait(self._now_ns() - start_ns)
            raise
        operation.note_wait(waited_ns)

    def busy(self, channel: Channel) -> bool:
        """Whether operations of `channel` are queued here, so that the next one must be, too."""
        return channel in self._queues

    def _join(self, operation: Operation, timeout_s: float | None) -> None:
        """Wait for the progress thread; take the steps of started operations meanwhile."""
        ended = operation.submitted
        assert ended is not None, "it has been submitted"
        start_ns = self._now_ns()
        late = None if timeout_s is None else self._late(timeout_s)
        try:
            while not ended.is_set() and not (late is not None and late()):
                if not self._started:
                    ended.wait(LOOK_S if timeout_s is None else min(LOOK_S, timeout_s))
                elif not self.advance_started():
                    ready = self._any_watcher(operation, late, is_ready=ended.is_set)
                    self._transport.waiter.until(ready, lambda: None)
        finally:
            operation.statistics.spent_ns += self._now_ns() - start_ns
        if not ended.is_set():
            raise CommTimeout(_timeout_text(operation, timeout_s))
        if operation.error is not None:
            _raise_error(operation)

    def refuse_fork(self) -> None:
        """Raise StaleError in a forked child, whose steps would be taken in its parent's name."""
        if self._transport.forked:
            msg = (
                "this process was forked from the one that made the group: use the group, its "
                "works and its requests "
                "in the parent only"
            )
            raise StaleError(msg)

    def check_caller(self, text: str) -> None:
        """Raise StaleError in a forked child, and in the progress thread."""
        self.refuse_fork()
        if threading.current_thread() is self._thread:
            msg = (
                f"a callback waits for {text} in the thread that carries it out: start it there "
                "with async_op=True, and wait for it in a thread of the program"
            )
            raise StaleError(msg)

    def _submit(self, operation: Operation) -> None:
        """Have the thread carry an operation out; `operation.submitted` is set at its end."""
        if self._transport.forked:
            self.refuse_fork()
        ended = operation.submitted = threading.Event()

        def end() -> None:
            ended.set()
            self._transport.bells.ring_own()

        operation.on_done(end)
        with self._lock:
            self._queues.setdefault(operation.channel, deque()).append(operation)
        self._wake()

    def _wake(self) -> None:
        """Have the thread look at what is to be done; it is started if there is none."""
        with self._lock:
            self._fresh = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"braid-comm-{self._transport.rank}", daemon=True
                )
                self._thread.start()
        self._transport.bells.ring_own()

    def abandon(self, pages: ControlPages) -> None:
        """Fail what is under way in a group that is being closed."""
        with self._lock:
            queued = [o for queue in self._queues.values() for o in queue]
        for operation in (*self._started, *queued):
            if operation.pages is pages and not operation.done:
                operation.fail(_closed(operation))
        for operation in tuple(self._started):
            if operation.pages is pages:
                self._strike(operation)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Join the thread.

        Args:
            grace_s: Seconds in which what is under way may end; then it fails with StaleError.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join(grace_s)
        if thread.is_alive():
            self._closing = True
            self._transport.bells.ring_own()
            thread.join()
            self._closing = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _late(self, timeout_s: float) -> Callable[[], bool]:
        now_ns = self._now_ns
        end_ns = now_ns() + round(timeout_s * 1e9)
        return lambda: now_ns() >= end_ns

    def _watcher(self, operation: Operation, late: Callable[[], bool] | None) -> Callable[[], bool]:
        """The condition that ends a wait: `operation` can move, or something else has been started.

        The usual wait is for one counter, and nothing else has been started. It is resolved to that
        word once, so that each look costs a single call.
        """
        seen = self._num_started  # first: what is started after this look must end the wait
        if late is None and len(self._started) == 1:
            line, value = operation.awaited_line()
            if line is not None:
                return lambda: line[0] >= value or operation.done or self._num_started != seen
        return self._any_watcher(operation, late)

    def _any_watcher(
        self,
        operation: Operation,
        late: Callable[[], bool] | None,
        is_ready: Callable[[], bool] | None = None,
    ) -> Callable[[], bool]:
        """Return the condition that an operation can move, or that the wait is late.

        Args:
            operation: Operation that is waited for.
            late: Whether the deadline of the wait has passed; None without one.
            is_ready: Stands for `operation` where the thread carries it out.
        """
        seen = self._num_started
        looks = [o.ready for o in self._heads() if o is not operation]
        if is_ready is not None or not self._behind(operation):
            looks.append(is_ready or operation.ready)
        looks += [late] if late is not None else []
        return lambda: self._num_started != seen or any(look() for look in looks)

    def _run(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_INTERVAL_S))
        try:
            while self._turn():
                pass
        finally:
            sys.setswitchinterval(interval)

    def _turn(self) -> bool:
        """Advance the head of every queue and what was left to the thread; sleep if none moved.

        Returns False when all have ended.
        """
        with self._lock:
            heads = [queue[0] for queue in self._queues.values()]
            left, closing = [o for o in self._left if not o.done], self._closing
            self._left = [] if closing else left
            channels = {o.channel for o in self._left}
            self._fresh = False
            if not (heads or channels):
                self._thread = None
        if closing:
            for (
                operation
            ) in left:  # without the lock, since the program's callbacks may start something
                operation.fail(_closed(operation))
        if not (heads or channels):
            return False
        started = [o for o in self._heads() if o.channel in channels] if not self._waiting else []
        moved = self._advance(started)
        for operation in heads:
            if closing:
                operation.fail(_closed(operation))
            if operation.advance():
                self._drop(operation)
                moved = True
        if not moved:
            self._sleep(heads, started)
        return True

    def _sleep(self, heads: list[Operation], started: list[Operation]) -> None:
        watched = [(o, self._drop) for o in heads] + [(o, self._strike) for o in started]

        def ready() -> bool:
            return self._fresh or self._closing or any(o.ready() for o, _ in watched)

        def check() -> None:
            for operation, forget in watched:
                try:
                    operation.check()
                except BaseException as exc:  # noqa: BLE001 - belongs to the one who waits for it
                    operation.fail(exc)
                    forget(operation)
                    self._fresh = True

        self._transport.waiter.until(ready, check)

    def _drop(self, operation: Operation) -> None:
        with self._lock:
            queue = self._queues[operation.channel]
            queue.popleft()
            if not queue:
                del self._queues[operation.channel]


def _closed(operation: Operation) -> StaleError:
    return StaleError(f"the group was closed while {operation.text} was under way")


def _timeout_text(operation: Operation, timeout_s: float | None) -> str:
    return f"{operation.text} has not ended within {timeout_s:g} s and goes on: wait again"


def _raise_error(operation: Operation) -> None:
    """Raise the operation's error; braid's own without the frames in which it was noticed."""
    assert operation.error is not None
    if isinstance(operation.error, BraidError):
        raise operation.error.with_traceback(None)
    raise operation.error
