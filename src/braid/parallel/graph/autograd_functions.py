"""Function modes that also intercept the calls of autograd.Functions.

Problem: torch's function modes see the operations in the forward of an autograd.Function, but not
its backward, which a graph of these operations would lack. torch has no hook on `Function.apply`.

Idea: `apply` is replaced while any model is captured. The replacement looks for a mode among the
modes of the calling thread, so other threads and other captures are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from braid.runtime.torch_internals import function_modes

__all__ = ["FunctionMode", "functions_seen"]


class FunctionMode(TorchFunctionMode):
    """Base class of torch function modes that also intercept calls of autograd.Functions.

    In a context `functions_seen`, each such call in this thread runs the method `call_function`
    instead. Internal calls of torch.utils.checkpoint are not intercepted.
    """

    sees_functions: Any = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def call_function(self, kind: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """Handle a call of `kind.apply(*args, **kwargs)`, and return its result."""
        raise NotImplementedError


class _FunctionsSeen:
    """Context that replaces `apply` of autograd.Function while any capture runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_captures = 0
        self._original = vars(torch.autograd.Function)["apply"]

    def __enter__(self) -> None:
        with self._lock:
            self._num_captures += 1
            if self._num_captures == 1:
                self._original = vars(torch.autograd.Function)["apply"]
                torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_captures -= 1
            if self._num_captures == 0:
                torch.autograd.Function.apply = self._original  # type: ignore[method-assign]

    def original(self, cls: type[torch.autograd.Function]) -> Callable[..., Any]:
        """Return torch's own `apply` of an autograd.Function."""
        apply: Callable[..., Any] = self._original.__get__(None, cls)
        return apply


functions_seen = _FunctionsSeen()


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    stack = function_modes()
    mode = next((mode for mode in reversed(stack) if isinstance(mode, FunctionMode)), None)
    is_of_checkpoint = cls.__module__ == CheckpointFunction.__module__
    if mode is None or not mode.sees_functions or is_of_checkpoint:
        return functions_seen.original(cls)(*args, **kwargs)
    return mode.call_function(cls, args, kwargs)
