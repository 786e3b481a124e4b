"""Ways of serving calls: in batches, one at a time, and by many nodes.

    @rpc.batch(max_size=8, max_wait_s=0.01)
    def act(states): ...                 a list of eight callers' arguments; returns eight results

    @rpc.serial
    class Table: ...                     its methods run one at a time, for all callers

    rpc.broadcast(names, reset, (7,))    one call to all, by a tree

Sources: C. Olston et al., TensorFlow-Serving, 2017, for batching by size and time; C. Hewitt et
al., "A universal modular ACTOR formalism", IJCAI 1973.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from braid.errors import ConfigError
from braid.rpc.api import rpc_async
from braid.rpc.current import acting_for, current_agent
from braid.rpc.functions import MARK, is_async_execution
from braid.rpc.names import register
from braid.rpc.outcomes import AnswerFuture, described
from braid.rpc.workers import To

__all__ = ["batch", "broadcast", "serial"]

Type = TypeVar("Type", bound=type)
SERIAL = "_braid_rpc_lock"


def batch(
    max_size: int, max_wait_s: float
) -> Callable[[Callable[..., Sequence[Any]]], Callable[..., Any]]:
    """Answer several calls with one execution of a function or method; a decorator.

    The function gets a list with the one argument of each call, and returns a list of their
    results.

    Args:
        max_size: Maximum number of calls in a batch.
        max_wait_s: Seconds that the first call of a batch waits for others.

    On failure: an exception fails all calls of its batch, as does a list of another length.

    Raises:
        ConfigError: The size is below 1, or the time is negative.
    """
    if max_size < 1 or max_wait_s < 0:
        msg = (
            "batch needs a max_size of at least 1 call and a max_wait_s of at least 0, got "
            f"{max_size} and {max_wait_s}"
        )
        raise ConfigError(msg)

    def decorate(function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        is_method = next(iter(inspect.signature(function).parameters), "") == "self"
        shared = _Batcher(max_size, max_wait_s)
        batchers: weakref.WeakKeyDictionary[Any, _Batcher] = weakref.WeakKeyDictionary()
        guard = threading.Lock()

        @functools.wraps(function)
        def wrapper(*args: Any) -> torch.futures.Future[Any]:
            *owner, item = args
            if not is_method:
                return shared.add(function, item)
            with guard:
                batcher = batchers.setdefault(owner[0], _Batcher(max_size, max_wait_s))
            return batcher.add(functools.partial(function, owner[0]), item)

        setattr(wrapper, MARK, function)
        return wrapper

    return decorate


class _Batcher:
    """Calls that wait to be answered together."""

    def __init__(self, max_size: int, max_wait_s: float) -> None:
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, torch.futures.Future[Any]]] = []
        self._number = 0  # of the batch that is being collected
        self._timer: threading.Timer | None = None  # of that batch

    def add(
        self, function: Callable[[list[Any]], Sequence[Any]], item: Any
    ) -> torch.futures.Future[Any]:
        """Add a call; the one that completes the batch runs the function."""
        future: torch.futures.Future[Any] = AnswerFuture()
        with self._lock:
            self._waiting.append((item, future))
            is_first, is_full = len(self._waiting) == 1, len(self._waiting) == self._max_size
            number = self._number
            full = self._take() if is_full else []
        if full:
            _answer(function, full)
        elif is_first:
            agent = current_agent()

            def on_time() -> None:
                with self._lock:
                    late = self._take() if number == self._number else []
                if late:
                    with acting_for(agent):
                        _answer(function, late)

            timer = threading.Timer(self._max_wait_s, on_time)
            timer.daemon = True
            with self._lock:
                if number == self._number:
                    self._timer = timer
                    timer.start()
        return future

    def _take(self) -> list[tuple[Any, torch.futures.Future[Any]]]:
        waiting, self._waiting = self._waiting, []
        self._number += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return waiting


def _answer(
    function: Callable[[list[Any]], Sequence[Any]],
    calls: Sequence[tuple[Any, torch.futures.Future[Any]]],
) -> None:
    """Run a batch."""
    try:
        results = function([item for item, _ in calls])
        if len(results) != len(calls):
            msg = (
                f"the function must return one result per call for a batch of {len(calls)} "
                f"calls, but returned {len(results)}"
            )
            raise ConfigError(msg)
    except BaseException as exc:  # noqa: BLE001 - the callers must receive any error
        error, _ = described(current_agent().info.name, exc)
        for _, future in calls:
            future.set_exception(error)
        return
    for (_, future), result in zip(calls, results, strict=True):
        future.set_result(result)


def serial(cls: Type) -> Type:
    """Run the methods of an object one at a time when peers call them; a class decorator.

    A method that calls its object through another node deadlocks until its deadline.
    """
    make = cls.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, SERIAL, threading.Lock())
        make(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    return cls


def broadcast(
    to: Sequence[To],
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = -1.0,
) -> list[Any]:
    """Call a function in many nodes; return the results in their order.

    Cost: each node passes the call on to two others at most, so n nodes need log2(n) calls in a
    row.

    Raises:
        Exception: The function's exception in the first node, in the order of `to`, that failed.
    """
    names = [
        node if isinstance(node, str) else current_agent().directory.find(node).name for node in to
    ]
    return _collect(_spread(names, func, args, kwargs or {}, timeout))


def _spread(
    names: Sequence[str],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: float,
) -> list[torch.futures.Future[Any]]:
    half = (len(names) + 1) // 2
    return [
        rpc_async(part[0], _relay, (list(part[1:]), func, tuple(args), dict(kwargs)), {}, timeout)
        for part in (names[:half], names[half:])
        if part
    ]


def _collect(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    return [result for future in futures for result in future.wait()]


@register
def _relay(
    rest: list[str], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Pass a call on, and execute it."""
    futures = _spread(rest, func, args, kwargs, -1.0)
    result = func(*args, **kwargs)
    if is_async_execution(func):
        result = result.wait()
    return [result, *_collect(futures)]
