"""Results and errors of functions that ran for a peer.

Problem: an error that is raised keeps the frames that it has passed, and their variables. If one of
them is the future that keeps the error, both leak: the future is a C++ object, so the garbage
collector cannot see the cycle.

Idea: a future keeps an error without frames, and each wait raises a copy.

Programs define classes of errors, and their methods may raise, exit or hang. So another thread
formats the text of an error, and errors are created and copied without calling their constructor.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, ClassMethodDescriptorType
from typing import Any

import msgspec
import torch

from braid import errors
from braid.runtime.torch_internals import Future, set_unwrap_function

__all__ = [
    "AnswerFuture",
    "CallOutcome",
    "Later",
    "RpcError",
    "awaited",
    "described",
    "error_like",
    "is_described",
    "outcome",
]

MAX_TEXT = 64 << 10  # characters
MAX_PART = 4 << 10
TEXT_S = 1.0  # for an error to make its text


class RpcError(errors.ConfigError, RuntimeError):
    """A call, a reference or a context cannot be used in this way.

    A ConfigError of braid. It is also a RuntimeError, which torch raises in these cases.
    """


class AnswerFuture(torch.futures.Future[Any]):
    """A future that raises a copy of its error in each wait; see the module's docstring.

    Attributes:
        on_cancel: Function that cancels the call; None if the future does not belong to a call.
    """

    on_cancel: Callable[[], bool] | None = None

    def cancel(self) -> bool:
        """Cancel the call; return whether it had no answer yet.

        The future fails with `concurrent.futures.CancelledError`. A call that has not begun does
        not begin; in a running call `rpc.is_cancelled()` returns True, and its calls are cancelled.
        """
        on_cancel, self.on_cancel = self.on_cancel, None
        return on_cancel is not None and on_cancel()

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Complete the future with a result, or with an error."""
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)

    def set_exception(self, result: Any) -> None:
        """Complete the future with an error."""
        kept = BaseException.with_traceback(result, None)

        def raise_copy(error: BaseException) -> None:
            raise _copy_of(error)

        set_unwrap_function(self)(raise_copy)
        self.set_result(kept)


class CallOutcome(msgspec.Struct, eq=False):
    """The end of a call for which a thread waits.

    Attributes:
        value: Result.
        error: Error if the call failed.
        is_here: Whether the call has ended.
    """

    value: Any = None
    error: BaseException | None = None
    is_here: bool = False

    def finish(self, value: Any, error: BaseException | None) -> None:
        """Record the value or the error, and mark the outcome as complete."""
        self.value, self.error, self.is_here = value, error, True


@dataclass(slots=True)
class Later:
    """Marks a result that a future will contain; the call is answered when the future completes."""

    future: Any


def awaited(future: Any) -> Later:
    """Return the `Later` for the future that a function marked by `async_execution` returned.

    Raises:
        RuntimeError: The function did not return a future; the message is torch's.
    """
    if not isinstance(future, Future):
        msg = (
            "Functions decorated with @rpc.async_function must return a "
            f"torch.futures.Future object, got {type(future).__name__}"
        )
        raise RuntimeError(msg)
    return Later(future)


def outcome(future: Any) -> tuple[Any, BaseException | None]:
    """Return the result and the error of a future that is done; one of them is None."""
    try:
        return future.value(), None
    except BaseException as exc:  # noqa: BLE001 - the caller must receive any error
        return None, exc


def described(node: str, error: BaseException) -> tuple[BaseException, str]:
    """Return an error of the same type, and its text with the traceback of this node; never raises.

    The error itself loses its traceback.
    """
    text = _text_of(node, error)
    _TRACEBACK.__set__(error, None)
    return error_like(type(error), text), text


def is_described(node: str, error: BaseException) -> bool:
    """Return whether an error was made by `described` on the node of this name."""
    args = _ARGS.__get__(error)
    return len(args) == 1 and type(args[0]) is str and args[0].startswith(f"On {node}:")


def error_like(kind: type[BaseException], text: str) -> BaseException:
    """Return an error of a type with a text; never raises, and runs no code of a program's type.

    The constructor of such a type is not called, since it may need other arguments, or do anything:
    so attributes that it sets are missing. The error is a RuntimeError if the type cannot be made
    without its code, and for SystemExit, KeyboardInterrupt and others that are not an Exception:
    they would end the caller.
    """
    try:
        error = _made(kind, text)
        _ARGS.__set__(error, (text,))
    except Exception:  # noqa: BLE001 - such as types of groups of exceptions
        return RuntimeError(text)
    return error


def _made(kind: type[BaseException], text: str) -> BaseException:
    if not issubclass(kind, Exception) or type(kind) is not type:
        return RuntimeError(text)
    if getattr(errors, kind.__name__, None) is kind:  # ours, with attributes that have defaults
        ours: BaseException = kind(text)
        return ours
    is_safe = isinstance(_static(kind, "__init_subclass__"), ClassMethodDescriptorType)
    if not is_safe or not isinstance(_static(kind, "__new__"), BuiltinFunctionType):
        return RuntimeError(text)
    # UnicodeDecodeError, for example, makes its text of five arguments
    if not all(_is_own_text(_static(kind, name)) for name in ("__str__", "__repr__")):
        namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **_TEXT}
        kind = type(kind.__name__, (kind,), namespace)
    error: BaseException = kind.__new__(kind, text)
    return error


def _is_own_text(method: object) -> bool:
    return any(method is known for known in _OWN_TEXTS)


# descriptors of `BaseException`, which subclasses of a program cannot override
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_ARGS: Any = BaseException.__dict__["args"]
_OWN_TEXTS = [
    *(kind.__dict__["__str__"] for kind in (BaseException, OSError, KeyError, ImportError)),
    BaseException.__dict__["__repr__"],
]
_TEXT = {
    "__str__": lambda self: self.args[0],
    "__repr__": lambda self: f"{type(self).__name__}({self.args[0]!r})",
}
_PLAIN_VALUES = (str, int, float, bool, bytes, type(None))


def _static(kind: type, name: str) -> Any:
    """Return an attribute of a class without running its descriptor's code."""
    return next(vars(base)[name] for base in kind.__mro__ if name in vars(base))


def _text_of(node: str, error: BaseException) -> str:
    """Return the text of an error with its traceback, even if its methods raise or hang."""
    if is_described(node, error):
        return str(_ARGS.__get__(error)[0])
    trace = _TRACEBACK.__get__(error)
    texts: list[str] = []

    def write() -> None:
        with contextlib.suppress(BaseException):
            lines = traceback.format_exception(type(error), error, trace)
            texts.append("\n".join([f"On {node}:", *map(_shortened, (repr(error), *lines))]))

    if _is_plain(error):
        write()
    else:  # it may hang
        writer = threading.Thread(target=write, name="braid-rpc-text", daemon=True)
        writer.start()
        writer.join(TEXT_S)
    if not texts:
        name = type.__repr__(type(error))
        lines = [f"{name} (its text cannot be formatted)", *traceback.format_tb(trace)]
        texts = ["\n".join([f"On {node}:", *lines])]
    return _shortened(texts[0], MAX_TEXT).encode(errors="backslashreplace").decode()


def _shortened(text: str, limit: int = MAX_PART) -> str:
    """Return a text without its final newline, and without its middle if it is too long."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"
    return text.removesuffix("\n")


def _is_builtin(kind: type) -> bool:
    return type(kind) is type and getattr(builtins, kind.__name__, None) is kind


def _is_plain(error: BaseException) -> bool:
    """Return whether the text of an error can be formatted without running a program's code."""
    return (
        _is_builtin(type(error))
        and all(type(value) in _PLAIN_VALUES for value in error.args)
        and error.__cause__ is error.__context__ is None
        and not hasattr(error, "__notes__")
    )


def _copy_of(error: BaseException) -> BaseException:
    """Return a copy of an error without calling its constructor; the error itself if impossible."""
    kind = type(error)
    try:
        if _is_builtin(kind):
            other: BaseException = copy.copy(error)
            return other
        if not isinstance(_static(kind, "__new__"), BuiltinFunctionType):
            return error
        other = kind.__new__(kind, *error.args)
        _ARGS.__set__(other, error.args)
        vars(other).update(vars(error))
    except Exception:  # noqa: BLE001 - such as a type of groups of exceptions
        return error
    return other
