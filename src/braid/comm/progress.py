"""One thread that carries out asynchronous collectives, any number at a time.

Operations of one channel are taken in the order in which they were submitted; those of different channels advance
independently, so a late one blocks nobody else. The thread exists only while something is under way; while it runs, the
interpreter's switch interval is lowered (5 ms by default, which a 1 MiB all-reduce would pay several times) and put back
afterwards.
"""

from __future__ import annotations

import sys
import threading
from collections import deque

from braid.comm.channel import Channel
from braid.comm.work import Operation
from braid.transport import MemoryTransport

__all__ = ["Progress"]

SWITCH_INTERVAL_S = 1e-4


class Progress:
    """The progress thread of one rank; a context manager.

    Args:
        transport: Whose waits it takes over.
    """

    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._queues: dict[Channel, deque[Operation]] = {}
        self._thread: threading.Thread | None = None
        self._fresh = False

    def busy(self, channel: Channel) -> bool:
        """Whether operations of `channel` are queued here, so that the next one must be, too."""
        return channel in self._queues

    def submit(self, operation: Operation) -> None:
        """Take over an operation."""
        with self._lock:
            self._queues.setdefault(operation.channel, deque()).append(operation)
            self._fresh = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"braid-comm-{self._transport.rank}", daemon=True
                )
                self._thread.start()
        self._transport.bells.ring_own()

    def close(self) -> None:
        """Wait until everything under way has ended (each operation has its deadline), and join the thread."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_INTERVAL_S))
        try:
            while self._turn():
                pass
        finally:
            sys.setswitchinterval(interval)

    def _turn(self) -> bool:
        """Advance the head of every queue, sleep if none could move; False when nothing is left."""
        with self._lock:
            heads = [queue[0] for queue in self._queues.values()]
            self._fresh = False
            if not heads:
                self._thread = None
                return False
        moved = False
        for operation in heads:
            if operation.advance():
                self._drop(operation)
                moved = True
        if not moved:
            self._sleep(heads)
        return True

    def _sleep(self, heads: list[Operation]) -> None:
        def ready() -> bool:
            return self._fresh or any(operation.ready() for operation in heads)

        def check() -> None:
            for operation in heads:
                try:
                    operation.check()
                except BaseException as exc:  # noqa: BLE001 - belongs to the one who waits for it
                    operation.fail(exc)
                    self._drop(operation)
                    self._fresh = True

        self._transport.waiter.until(ready, check)

    def _drop(self, operation: Operation) -> None:
        with self._lock:
            queue = self._queues[operation.channel]
            queue.popleft()
            if not queue:
                del self._queues[operation.channel]
