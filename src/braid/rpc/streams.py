"""Streams: results of a generator function that arrive while the function still runs.

    for line in rpc.stream("reader", lines_of, (path,)):
        ...

    caller                                  callee
      ── run lines_of ────────────────────>  for each in lines_of(path):
      <── put(0, ...), put(1, ...), ... ───      at most `window` that are not answered
      ── answers, as the loop takes them ──>

So a slow reader slows the function down, and memory is bounded. If a loop ends early, the function
ends at its next result once Python collects the stream or its reader calls `shutdown`. An exception
of the function is raised after the results before it.

Cost: one message there and one back per result; up to `window` results overlap.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from braid.errors import CommTimeout, ConfigError
from braid.rpc.api import rpc_async
from braid.rpc.current import current_agent
from braid.rpc.functions import async_execution
from braid.rpc.names import register
from braid.rpc.references import RRef
from braid.rpc.workers import To
from braid.runtime.closing import Closing

__all__ = ["OpenStreams", "Stream", "stream"]

Future = torch.futures.Future


@register
class _Inbox:
    """Results that have come and are not taken, at the caller."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: dict[int, tuple[Any, Future[bool]]] = {}
        self._next = 0
        self._end: tuple[int, BaseException | None] | None = None  # number of results, error
        self._is_closed = False

    @async_execution
    def put(self, number: int, value: Any) -> Future[bool]:
        """Add a result; the future completes when the loop takes it, with whether to go on."""
        answer: Future[bool] = Future()
        with self._changed:
            if not self._is_closed:
                self._results[number] = (value, answer)
                self._changed.notify_all()
                return answer
        answer.set_result(False)
        return answer

    def end(self, count: int, error: BaseException | None) -> None:
        """Record that the function has ended after `count` results."""
        with self._changed:
            self._end = (count, error)
            self._changed.notify_all()

    def take(self, timeout_s: float | None, name: str) -> Any:
        """Return the next result; wait for it."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._next not in self._results:
                if self._is_closed:
                    raise StopIteration
                if self._end is not None and self._next >= self._end[0]:
                    self._is_closed = True
                    if self._end[1] is not None:
                        raise self._end[1]
                    raise StopIteration
                remaining_s = None if until is None else until - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    msg = (
                        f"result {self._next} of {name} did not come within {timeout_s:g} s: raise "
                        "the timeout"
                    )
                    raise CommTimeout(msg)
                self._changed.wait(remaining_s)
            value, answer = self._results.pop(self._next)
            self._next += 1
        answer.set_result(True)
        return value

    def close(self) -> None:
        """Close the receiving end: refuse further results."""
        with self._changed:
            self._is_closed = True
            waiting = [answer for _, answer in self._results.values()]
            self._results.clear()
            self._changed.notify_all()
        for answer in waiting:
            answer.set_result(False)


class Stream(Closing, Iterator[Any]):
    """Iterator over the results of a remote generator; as a context manager, it ends the call.

    Made by `stream`.
    """

    def __init__(self, inbox: _Inbox, name: str, timeout_s: float | None) -> None:
        self._reader = threading.get_ident()
        self._inbox = inbox
        self._name = name
        self._timeout_s = timeout_s
        self._finalizer = weakref.finalize(self, inbox.close)

    def __next__(self) -> Any:
        """Return the next result; wait for it."""
        self._reader = threading.get_ident()
        return self._inbox.take(self._timeout_s, self._name)

    def close(self) -> None:
        """End the function at its next result. Idempotent."""
        self._finalizer()

    def close_for(self, thread: int) -> None:
        """End the function if `thread` was the last thread that read results."""
        if self._reader == thread:
            self.close()


class OpenStreams(weakref.WeakSet[Stream]):
    """Streams of a node that Python has not collected."""


def stream(
    to: To,
    func: Callable[..., Iterable[Any]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = -1.0,
    window: int = 8,
) -> Stream:
    """Call a generator function in another node; return an iterator over its results.

    The function takes a thread of the node, see `RpcOptions(num_worker_threads=)`, until the last
    result is taken or the stream is closed.

    Args:
        to: Name or number of the node, or its WorkerInfo.
        func: A generator function, or one that returns an iterable.
        args: Arguments.
        kwargs: Keyword arguments.
        timeout: Seconds to wait for each result; the node's default when -1, unlimited when 0.
        window: Maximum number of results in flight.

    Raises:
        ConfigError: The window is below 1, or the node does not exist.

    On failure: the iterator raises the function's exception after the results before it;
    `PeerLostError` when the node is lost, `CommTimeout` when no result comes in time.
    """
    if window < 1:
        msg = f"the window of a stream must be at least 1 result, got {window}"
        raise ConfigError(msg)
    agent = current_agent()
    seconds = agent.options.rpc_timeout if timeout < 0 else timeout
    inbox = _Inbox()
    values = (RRef(inbox), func, list(args or ()), dict(kwargs or {}), window)
    call = rpc_async(to, _run, values, timeout=0)

    def on_end(future: Future[int]) -> None:
        try:
            count, error = future.value(), None
        except Exception as exc:  # noqa: BLE001 - raised by the iterator
            count, error = 0, exc
        inbox.end(count, error)

    call.add_done_callback(on_end)
    made = Stream(inbox, getattr(func, "__qualname__", str(func)), seconds or None)
    agent.part(OpenStreams).add(made)
    return made


@register
def _run(
    inbox: RRef,
    func: Callable[..., Iterable[Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    window: int,
) -> int:
    """Run the function of a stream; return the number of its results."""
    unanswered: deque[Future[bool]] = deque()
    results = iter(func(*args, **kwargs))
    count = 0
    try:
        for value in results:
            unanswered.append(inbox.rpc_async(0).put(count, value))
            count += 1
            if len(unanswered) == window and not unanswered.popleft().wait():
                break
        else:
            torch.futures.wait_all(list(unanswered))  # one may have failed to arrive
    except Exception:
        torch.futures.collect_all(list(unanswered)).wait()  # the loop takes what came before it
        raise
    finally:
        if (close := getattr(results, "close", None)) is not None:
            close()  # of a generator that is not at its end
    return count
