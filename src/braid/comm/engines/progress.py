"""Progress of operations: steps are taken by threads that wait, or by the progress thread.

A started operation needs this rank's steps even while the rank waits for another operation. If rank
0 waited for bucket A and rank 1 for bucket B, and each advanced only one bucket, neither would end
(MPI calls this the progress rule). So a thread that waits takes the steps of every started
operation as they become possible.

`StepsBy.THREAD` passes an operation to the progress thread. Operations of one channel run in the
order in which they were started. Operations of different channels advance independently, so a late
one does not block another. If threads of the program run earlier operations on a channel, the
progress thread takes the steps of that channel only while no thread waits. The progress thread
exists only while operations are in progress. While it runs, the interpreter's switch interval is
lowered (a 1 MiB all-reduce would wait for the default of 5 ms several times) and restored
afterwards.
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
from braid.runtime.transport import MemoryTransport

__all__ = ["Progress"]

SWITCH_INTERVAL_S = 1e-4
CLOSE_GRACE_S = 5.0
LOOK_S = 0.05  # between two checks of a thread that waits for the progress thread


class Progress:
    """Scheduler of all operations of one rank; a context manager that owns the progress thread.

    Attributes:
        ordering: Lock that is held while an operation enters or leaves a channel.
        thread: Progress thread; None while no operation needs it.

    Args:
        transport: This rank's end of the transport.
    """

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._now_ns = transport.clock.now_ns
        self._lock = threading.Lock()
        self.ordering = threading.Lock()
        self._started: list[Operation] = []  # in order, with and without waiting threads
        self._num_started = 0  # number of operations that did not end in `start`
        self._queues: dict[Channel, deque[Operation]] = {}
        self._handed_over: list[Operation] = []  # for the progress thread while no thread waits
        self.thread: threading.Thread | None = None
        self._fresh = False
        self._closing = False
        self._waiting: set[int] = set()  # threads in `wait`

    def execute(self, operation: Operation) -> None:
        """Run a new operation in this thread, after the operations queued on its channel."""
        if self._transport.forked or self.thread is not None:
            self.check_caller(operation.text)
        with self.ordering:
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
        """Queue a new operation on its channel, and take steps as `steps_by` permits.

        Args:
            operation: Operation that has taken no step.
            steps_by: Thread that takes the steps.
            opens: Whether to take the first step in any case. Set it if that step only publishes
                the address of a tensor, and no other operation is ahead on the channel.
        """
        if self._transport.forked:
            self.refuse_fork()
        if operation.pages.size == 1:  # waits for no rank, and uses the caller's CUDA stream
            steps_by = StepsBy.CALLER
        with self.ordering:
            by_thread = steps_by is StepsBy.THREAD and not self._is_started(operation.channel)
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
        if steps_by is StepsBy.THREAD:  # together with the operations ahead of it
            with self._lock:
                self._handed_over.append(operation)
            self._wake()

    def _is_started(self, channel: Channel) -> bool:
        """Return whether an operation on `channel` that was started earlier has not ended."""
        started = self._started
        return bool(started) and any(o.channel is channel and not o.done for o in tuple(started))

    @property
    def idle(self) -> bool:
        """Whether no operation of this rank is in progress, and no thread takes steps."""
        return not (self._started or self._queues or self.thread)

    def is_free(self, channel: Channel) -> bool:
        """Return whether no operation is in progress on `channel`; needs the lock `ordering`."""
        return channel not in self._queues and not (self._started and self._is_started(channel))

    def advance_started(self) -> bool:
        """Advance the first started operation of each channel; return whether any advanced."""
        return self._advance(self._heads())

    def _advance(self, heads: list[Operation]) -> bool:
        """Advance the operations that are ready and not in use by another thread.

        Returns:
            Whether there were any.
        """
        moved = False
        for operation in heads:
            if operation.ready():
                moved = True
                if operation.advance():
                    self._strike(operation)
                    self._transport.bells.ring_own()  # another thread may wait for the next one
                elif operation.ready():  # a thread that found it in use may sleep now
                    self._transport.bells.ring_own()
        return moved

    def poll(self, operation: Operation) -> None:
        """Take possible steps, until `operation` has ended or no operation can advance."""
        if not operation.done and self._transport.forked:
            self.refuse_fork()
        if self._waiting - {threading.get_ident()}:
            return  # a waiting thread takes all steps, and two threads hinder each other
        while not operation.done and self.advance_started():
            pass

    def _heads(self) -> list[Operation]:
        """Return the first started operation of each channel, and remove ended operations."""
        heads: dict[Channel, Operation] = {}
        for operation in tuple(self._started):
            if not operation.done:
                heads.setdefault(operation.channel, operation)
            else:
                self._strike(operation)
        return list(heads.values())

    def _strike(self, operation: Operation) -> None:
        """Remove an operation that has ended from the started ones."""
        with self.ordering:
            if operation in self._started:
                self._started.remove(operation)

    def _behind(self, operation: Operation) -> bool:
        """Return whether an unfinished operation is ahead of this one on its channel."""
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
        """Wait for an operation, and take the steps of all started operations meanwhile.

        Args:
            operation: Started operation. If the progress thread runs it, this waits for the thread.
            timeout_s: Seconds for this wait; the operation's deadline still applies.

        Raises:
            CommTimeout: `timeout_s` passed; the operation continues.
            CommError: The operation failed.
        """
        if not operation.done and (self._transport.forked or self.thread is not None):
            self.check_caller(operation.text)
        if operation.submitted is not None:
            self._join(operation, timeout_s)
        else:
            self._take_steps(operation, timeout_s)

    def _take_steps(self, operation: Operation, timeout_s: float | None) -> None:
        """Take all steps of `operation`, and of operations ahead of it on its channel."""
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
        except BaseException as exc:  # noqa: BLE001 - peers must be notified of interrupts
            operation.fail(exc)
        finally:
            self._waiting.discard(thread)
            if self._handed_over and not self._waiting:
                self._wake()
            operation.statistics.spent_ns += self._now_ns() - start_ns
        if operation.done:
            self._strike(operation)
        if operation.error is not None:
            _raise_error(operation)
        if not operation.done:
            raise CommTimeout(_timeout_text(operation, timeout_s))

    def _wait(self, operation: Operation, late: Callable[[], bool] | None) -> None:
        """Block until a step is possible; add the time to the operation's record."""
        start_ns = self._now_ns()
        ready = self._watcher(operation, late)
        try:
            waited_ns = self._transport.waiter.until(ready, operation.check)
        except BaseException:
            operation.note_wait(self._now_ns() - start_ns)
            raise
        operation.note_wait(waited_ns)

    def busy(self, channel: Channel) -> bool:
        """Return whether operations of `channel` are queued, so that the next one must queue."""
        return channel in self._queues

    def _join(self, operation: Operation, timeout_s: float | None) -> None:
        """Wait for the progress thread to end `operation`, and advance started ones meanwhile."""
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
        """Raise StaleError in a forked child: its steps would be taken for the parent's steps."""
        if self._transport.forked:
            msg = (
                "this process was forked after the group was made: use the group, its works and "
                "its requests in the parent process only"
            )
            raise StaleError(msg)

    def check_caller(self, text: str) -> None:
        """Raise StaleError in a forked child and in the progress thread, which cannot wait.

        Args:
            text: Name of what the caller waits for, for the message.
        """
        if self._transport.forked:
            self.refuse_fork()
        thread = self.thread
        if thread is not None and thread.ident == threading.get_ident():
            msg = (
                f"a callback waits for {text}, which would block the thread that completes it: "
                "start it with async_op=True, and wait in another thread"
            )
            raise StaleError(msg)

    def _submit(self, operation: Operation) -> None:
        """Queue an operation for the progress thread; its end sets `operation.submitted`."""
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
        """Wake the progress thread to check its queues; start the thread if there is none."""
        with self._lock:
            self._fresh = True
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._run, name=f"braid-comm-{self._transport.rank}", daemon=True
                )
                self.thread.start()
        self._transport.bells.ring_own()

    def abandon(self, pages: ControlPages | None = None) -> None:
        """Fail the operations in progress of a group that is being closed.

        Args:
            pages: Control pages of the group; None for all groups.
        """
        with self._lock:
            queued = [o for queue in self._queues.values() for o in queue]
        for operation in (*self._started, *queued):
            if pages in {None, operation.pages} and not operation.done:
                operation.fail(_closed(operation))
        for operation in tuple(self._started):
            if pages in {None, operation.pages}:
                self._strike(operation)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """End the progress thread.

        Args:
            grace_s: Seconds for the operations in progress. After that, they fail with StaleError.
        """
        thread = self.thread
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
        """Return a function that returns whether `timeout_s` seconds from now have passed."""
        now_ns = self._now_ns
        end_ns = now_ns() + round(timeout_s * 1e9)
        return lambda: now_ns() >= end_ns

    def _watcher(self, operation: Operation, late: Callable[[], bool] | None) -> Callable[[], bool]:
        """Return the condition that ends a wait: `operation` can advance, or another has started.

        Most waits are for one counter while no other operation has been started. Such a wait reads
        the counter's memory directly, so that each check costs a single call.
        """
        seen = self._num_started  # first: an operation that starts from now on must end the wait
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
        """Return the condition that some operation can advance, or that the wait is late.

        Args:
            operation: Operation that the caller waits for.
            late: Function that returns whether the wait's deadline has passed; None without one.
            is_ready: Condition to use instead of `operation.ready`, for an operation that the
                progress thread runs.
        """
        seen = self._num_started
        looks = [o.ready for o in self._heads() if o is not operation]
        if is_ready is not None or not self._behind(operation):
            looks.append(is_ready or operation.ready)
        looks += [late] if late is not None else []
        return lambda: self._num_started != seen or any(look() for look in looks)

    def _run(self) -> None:
        """Run turns until all operations have ended: the body of the progress thread."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_INTERVAL_S))
        try:
            while self._turn():
                pass
        finally:
            sys.setswitchinterval(interval)

    def _turn(self) -> bool:
        """Advance the queued operations, and the started ones left to the progress thread.

        The thread sleeps if none of them advanced. Returns False when all have ended.
        """
        with self._lock:
            heads = [queue[0] for queue in self._queues.values()]
            handed_over = [o for o in self._handed_over if not o.done]
            closing = self._closing
            self._handed_over = [] if closing else handed_over
            channels = {o.channel for o in self._handed_over}
            self._fresh = False
            if not (heads or channels):
                self.thread = None
        if closing:
            for operation in handed_over:  # without the lock: callbacks may start operations
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
        """Sleep until an operation of the progress thread can advance, or the thread is woken."""
        watched = [(o, self._drop) for o in heads] + [(o, self._strike) for o in started]

        def ready() -> bool:
            return self._fresh or self._closing or any(o.ready() for o, _ in watched)

        def check() -> None:
            for operation, forget in watched:
                try:
                    operation.check()
                except BaseException as exc:  # noqa: BLE001 - the waiting thread raises it
                    operation.fail(exc)
                    forget(operation)
                    self._fresh = True

        self._transport.waiter.until(ready, check)

    def _drop(self, operation: Operation) -> None:
        """Remove an operation that has ended from its queue."""
        with self._lock:
            queue = self._queues[operation.channel]
            queue.popleft()
            if not queue:
                del self._queues[operation.channel]


def _closed(operation: Operation) -> StaleError:
    return StaleError(f"the group was closed while {operation.text} was in progress")


def _timeout_text(operation: Operation, timeout_s: float | None) -> str:
    return (
        f"{operation.text} has not ended within {timeout_s:g} s and still runs: call wait() again"
    )


def _raise_error(operation: Operation) -> None:
    """Raise the operation's error; braid's errors without the frames of the thread that failed."""
    assert operation.error is not None
    if isinstance(operation.error, BraidError):
        raise operation.error.with_traceback(None)
    raise operation.error
