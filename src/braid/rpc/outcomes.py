"""Results and errors of functions that ran for a peer.

Problem: an error that is raised keeps the frames that it has passed, and their variables. If one of
them is the future that keeps the error, neither ever dies: the future is of C++, where the garbage
collector cannot see the cycle.

Idea: a future keeps an error without frames, and each wait raises a copy.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

__all__ = ["AnswerFuture", "Later", "Outcome", "awaited", "described", "error_like", "outcome"]


class AnswerFuture(torch.futures.Future[Any]):
    """A future each of whose waits raises a copy of its error; see above.

    Attributes:
        on_cancel: Function that cancels the call; None for a future of no call.
    """

    on_cancel: Callable[[], bool] | None = None

    def cancel(self) -> bool:
        """Cancel the call; return whether it had no answer yet.

        The future fails with `concurrent.futures.CancelledError`. A call that has not begun does
        not begin; one that runs learns it by `rpc.is_cancelled()`, and its own calls are cancelled.
        """
        on_cancel, self.on_cancel = self.on_cancel, None
        return on_cancel is not None and on_cancel()

    def set_exception(self, result: Any) -> None:
        """Complete the future with an error."""
        kept = result.with_traceback(None)

        def raise_copy(error: BaseException) -> None:
            raise _copy_of(error)

        self._set_unwrap_func(raise_copy)
        self.set_result(kept)


class Outcome(msgspec.Struct, eq=False):
    """The end of a call for which a thread waits.

    Attributes:
        value: Result.
        error: Error, if it failed.
        is_here: Whether it has ended.
    """

    value: Any = None
    error: BaseException | None = None
    is_here: bool = False

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Record the end."""
        self.value, self.error, self.is_here = value, error, True


@dataclass(slots=True)
class Later:
    """The result of a call, once a future has it."""

    future: torch._C.Future[Any]


def awaited(future: Any) -> Later:
    """Return the later result of a function that is marked with `async_execution`.

    Raises:
        RuntimeError: It returned something else than a future, as torch says it.
    """
    if not isinstance(future, torch._C.Future):  # noqa: SLF001 - `then` makes it
        msg = (
            "Functions decorated with @rpc.async_function must return a "
            f"torch.futures.Future object, got {type(future).__name__}"
        )
        raise RuntimeError(msg)
    return Later(future)


def outcome(future: torch._C.Future[Any]) -> tuple[Any, BaseException | None]:
    """Return the result and the error of a future that is done; one of them is None."""
    try:
        return future.value(), None
    except BaseException as exc:  # noqa: BLE001 - whatever it is, the caller must learn it
        return None, exc


def described(node: str, error: BaseException) -> BaseException:
    """Return an error of the same type whose text has the traceback of this node.

    The error itself loses its traceback.
    """
    if str(error).startswith(f"On {node}:"):
        return error.with_traceback(None)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error.__traceback__ = None
    return error_like(type(error), f"On {node}:\n{error!r}\n{trace}")


def error_like(kind: type[BaseException], text: str) -> BaseException:
    """Return an error of a type with a text; a RuntimeError if it cannot be made of a text."""
    try:
        return kind(text)
    except Exception:  # noqa: BLE001 - such as types with other arguments
        return RuntimeError(text)


def _copy_of(error: BaseException) -> BaseException:
    """Return a copy of an error; the error itself if it cannot be copied."""
    try:
        other = copy.copy(error)
    except Exception:  # noqa: BLE001 - such as types with other arguments
        return error
    return other if type(other) is type(error) else error
