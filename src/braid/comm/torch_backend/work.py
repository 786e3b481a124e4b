"""torch's Work over braid's Work.

There are two kinds: a synchronous call returns an ended one (`FinishedWork`); all others wrap a
work in progress (`PendingWork`). torch's `_create_work_from_future` cannot be used: its `wait()`
discards the exception.

torch's C++ calls only `wait` and `get_future` of these (its trampoline has no more methods); Python
calls all methods. C++ may keep a work after its Python object is gone, as DDP's `join` does: the
base class would then never return from `wait`. So the group keeps the last works that were dropped
without a wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed.distributed_c10d import Work as TorchWork
from torch.futures import Future

from braid.comm.engines.work import Work, Works
from braid.comm.torch_backend.futures import WorkFuture

__all__ = ["FinishedWork", "PendingWork", "Started", "seconds"]

_SUCCESS = 0  # c10d::WorkResult::SUCCESS
_COMM_ERROR = 2  # c10d::WorkResult::COMM_ERROR


Started = Work | Works  # types that a `PendingWork` wraps


def seconds(timeout: timedelta | None) -> float | None:
    """Return a time-out of torch in seconds; None if it is unset (not positive)."""
    if timeout is None:
        return None
    value = timeout.total_seconds()
    return value if value > 0 else None


class FinishedWork(TorchWork):
    """Collective that has ended without an error.

    Args:
        outputs: Tensors that hold the result, as the value of torch's futures.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[Any]) -> None:
        TorchWork.__init__(self)  # super() costs time in a call of microseconds
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's signature
        """Return True: the collective has ended."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the collective has ended."""

    def block_current_stream(self) -> None:
        """Do nothing: results are in CPU memory."""

    def is_completed(self) -> bool:
        """Return True: the collective has ended."""
        return True

    def is_success(self) -> bool:
        """Return True: the collective has ended without an error."""
        return True

    def exception(self) -> BaseException | None:
        """Return None: the collective has no error."""
        return None

    def result(self) -> list[Any]:
        """Return the tensors that hold the result."""
        return self._outputs

    def get_future(self) -> Future[Any]:
        """Return a completed future of the list of tensors."""
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    def get_future_result(self) -> Future[Any]:
        """Return a future of torch's `WorkResult`, as a number."""
        future: Future[Any] = Future()
        future.set_result(_SUCCESS)
        return future


class WorkOwner(Protocol):
    """Process group that started a work.

    Attributes:
        dropped: Last works that were dropped without a wait.
    """

    dropped: deque[PendingWork]

    def finish_later(self, work: Started, future: WorkFuture, /) -> None:
        """Finish a future when its work has ended, even if no thread waits for it."""
        ...


class PendingWork(TorchWork):
    """Collective that may be in progress.

    Args:
        started: Work of braid.
        outputs: Tensors that will hold the result.
        owner: Process group.
        source: Function that returns the group rank of the sender, for a message.
    """

    def __init__(
        self,
        started: Started,
        outputs: list[Any],
        owner: WorkOwner,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self._started = started
        self._outputs = outputs
        self._owner = owner
        self._source = source
        self._future: WorkFuture | None = None
        self._is_waited = False

    def __del__(self) -> None:
        if not self._is_waited:
            self._owner.dropped.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the tensors hold the result.

        Raises:
            CommTimeout: `timeout` passed; the collective continues.
            CommError: The collective failed.
        """
        self._is_waited = True
        self._started.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self._started.wait()

    def block_current_stream(self) -> None:
        """Wait as `wait` does: results are in CPU memory."""
        self._started.wait()

    def is_completed(self) -> bool:
        """Return whether the collective has ended, with or without an error."""
        return self._started.done()

    def is_success(self) -> bool:
        """Return whether the collective has ended without an error."""
        return self._started.done() and self._started.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective."""
        return self._started.exception()

    def result(self) -> list[Any]:
        """Wait, and return the tensors that hold the result."""
        self._started.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the group rank of the message's sender."""
        if self._source is None:
            msg = "only the work of a recv has a source rank: call this on the work from recv"
            raise RuntimeError(msg)
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the list of tensors; the same at every call."""
        if self._future is None:
            self._future = WorkFuture(self._started.wait, self._outputs)
            if self._is_waited:
                self._future.finish()  # C++ reads the value without another wait
            else:
                self._owner.finish_later(self._started, self._future)
        return self._future

    def get_future_result(self) -> Future[Any]:
        """Return a future of torch's `WorkResult`, as a number."""
        started = self._started

        def outcome(_future: Future[Any]) -> int:
            return _SUCCESS if started.exception() is None else _COMM_ERROR

        return self.get_future().then(outcome)
