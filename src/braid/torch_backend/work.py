"""braid's Work with the face of torch's.

Two kinds: what a synchronous call returns has ended (`FinishedWork`); anything else wraps something
that is under way (`PendingWork`). torch's own `_create_work_from_future` will not do: its `wait()`
swallows the exception.

torch's C++ sees only `wait` and `get_future` of these (its trampoline forwards no more); Python
sees all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Work as TorchWork
from torch.futures import Future

from braid.comm.engines.work import Work, Works
from braid.torch_backend.futures import WorkFuture

__all__ = ["FinishedWork", "PendingWork", "Started", "seconds"]

_SUCCESS = 0  # c10d::WorkResult::SUCCESS
_COMM_ERROR = 2  # c10d::WorkResult::COMM_ERROR


Started = Work | Works  # what a `PendingWork` stands for


def seconds(timeout: timedelta | None) -> float | None:
    """Seconds of a time-out of torch; unset is negative there, none is zero."""
    if timeout is None:
        return None
    value = timeout.total_seconds()
    return value if value > 0 else None


class FinishedWork(TorchWork):
    """A collective that has ended well.

    Args:
        outputs: The tensors that hold the result, as torch's futures want them.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[Any]) -> None:
        TorchWork.__init__(self)  # super() is felt in a call that takes microseconds
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's signature
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Nothing to do: results are in CPU memory."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> list[Any]:
        """The tensors that hold the result."""
        return self._outputs

    def get_future(self) -> Future[Any]:
        """A future that has been set."""
        future: Future[Any] = Future()
        future.set_result(self._outputs)
        return future

    def get_future_result(self) -> Future[Any]:
        """A future of torch's `WorkResult`, as a number."""
        future: Future[Any] = Future()
        future.set_result(_SUCCESS)
        return future


class PendingWork(TorchWork):
    """A collective that may be under way.

    Args:
        started: What it stands for.
        outputs: The tensors that will hold the result.
        finish_later: Sees to it that a future of `started` is set, whoever waits.
        source: Group rank that a message came from, once it has come.
    """

    def __init__(
        self,
        started: Started,
        outputs: list[Any],
        finish_later: Callable[[Started, WorkFuture], None],
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self._started = started
        self._outputs = outputs
        self._finish_later = finish_later
        self._source = source
        self._future: WorkFuture | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the tensors hold the result.

        Raises:
            CommTimeout: `timeout` passed; the collective goes on.
            CommError: What stopped it.
        """
        self._started.wait(seconds(timeout))
        return True

    def synchronize(self) -> None:
        """Same as `wait`."""
        self._started.wait()

    def block_current_stream(self) -> None:
        """Same as `wait`: results are in CPU memory."""
        self._started.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._started.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._started.done() and self._started.exception() is None

    def exception(self) -> BaseException | None:
        """What stopped it."""
        return self._started.exception()

    def result(self) -> list[Any]:
        """The tensors that hold the result; waits for it."""
        self._started.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Group rank that the message came from."""
        if self._source is None:
            msg = "only the work of a recv knows its source: ask the work that recv has returned"
            raise RuntimeError(msg)
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the list of tensors; the same at every call."""
        if self._future is None:
            self._future = WorkFuture(self._started.wait, self._outputs)
            self._finish_later(self._started, self._future)
        return self._future

    def get_future_result(self) -> Future[Any]:
        """A future of torch's `WorkResult`, as a number."""
        started = self._started

        def outcome(_future: Future[Any]) -> int:
            return _SUCCESS if started.exception() is None else _COMM_ERROR

        return self.get_future().then(outcome)
