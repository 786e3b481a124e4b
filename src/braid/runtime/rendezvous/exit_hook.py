"""Notices when `sys.exit` ends this process, and its exit code, before the interpreter shuts down.

Problem: an uncaught exception reaches `sys.excepthook`, but `SystemExit` reaches no hook. Threads
that still run and functions registered with `atexit` may take longer than a launcher waits; it then
kills the process and never learns the exit code. An `atexit` function does not know the code.

Idea: `sys.exit` raises a subclass of `SystemExit` with a `__del__` method. If the program catches
the exception, the object is deleted while a Python frame runs. If the exception ends the process,
the interpreter deletes it after the last frame, before it joins threads and runs `atexit`
functions.

`raise SystemExit(3)` is not noticed. Threads raise the ordinary class, since `threading` ignores
that exact type only.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["ExitHook"]

BUILTINS = ("exit", "quit")  # of the module `site`; missing with `python -S`


class ExitHook:
    """Calls a function when `sys.exit`, `exit` or `quit` ends the process.

    Args:
        on_exit: Called once in the main thread, after its last frame, with the exit status and the
            exception that the program was handling when it called `sys.exit` (None without one).
    """

    def __init__(self, on_exit: Callable[[int, BaseException | None], None]) -> None:
        self._on_exit: Callable[[int, BaseException | None], None] | None = on_exit
        self._main_thread = threading.main_thread().ident
        self._exit = sys.exit
        self._builtins = {
            name: getattr(builtins, name) for name in BUILTINS if hasattr(builtins, name)
        }
        self._own_exit = self._raise  # each access makes a new bound method
        self._kind = _reporting_exit(self._at_the_top)
        sys.exit = self._own_exit
        for name in self._builtins:
            setattr(builtins, name, self._own_exit)

    def close(self) -> None:
        """Restore the original exit functions, unless other code has replaced them. Idempotent."""
        self._on_exit = None
        if sys.exit is self._own_exit:
            sys.exit = self._exit
        for name, original in self._builtins.items():
            if getattr(builtins, name, None) is self._own_exit:
                setattr(builtins, name, original)

    def _raise(self, code: Any = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(code); see `sys.exit`."""
        if threading.get_ident() != self._main_thread:
            raise SystemExit(code)
        raise self._kind(code)

    def _at_the_top(self, code: Any, handled: BaseException | None) -> None:
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None and threading.get_ident() == self._main_thread:
            on_exit(exit_status(code), handled)


def exit_status(code: object) -> int:
    """Return the status with which a process ends that calls `sys.exit(code)`.

    >>> exit_status(None), exit_status(3), exit_status(-1), exit_status("no such file")
    (0, 3, 255, 1)
    """
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _reporting_exit(
    at_the_top: Callable[[Any, BaseException | None], None],
) -> type[SystemExit]:
    """Return a subclass of `SystemExit` that calls `at_the_top` if no code has caught it."""

    def on_end(self: SystemExit) -> None:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is None:
            at_the_top(self.code, self.__context__)

    def reduce(self: SystemExit) -> tuple[type[SystemExit], tuple[Any, ...]]:
        return SystemExit, self.args

    names = {"__module__": "builtins", "__del__": on_end, "__reduce__": reduce}
    return type("SystemExit", (SystemExit,), names)
