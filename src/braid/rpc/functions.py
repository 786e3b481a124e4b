"""Functions that answer later: the reply leaves when the future that they return completes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["MARK", "async_execution", "is_async_execution"]

MARK = "_wrapped_async_rpc_function"  # torch's own decorator sets it, too


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that returns a `torch.futures.Future`: the caller gets the future's value.

    On static and class methods, apply this decorator first. The thread that runs the function is
    free as soon as the function has returned.

    On failure: if the function does not return a future, its call fails with RuntimeError.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, MARK, fn)
    return wrapper


def is_async_execution(function: object) -> bool:
    """Return whether a function is marked by `async_execution` of this module or of torch."""
    return hasattr(function, MARK)
