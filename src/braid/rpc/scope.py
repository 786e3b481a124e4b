"""The call that code runs for: its deadline, whether it is cancelled, the calls it has made.

A call inside of a call does not outlast it: deadlines travel, and whoever cancels a call cancels
those that it has made.
"""

from __future__ import annotations

from contextvars import ContextVar

from braid.errors import CommTimeout

__all__ = ["Scope", "current_scope", "deadline_ns", "enter"]


class Scope:
    """A call that runs in this process.

    Args:
        deadline_ns: Time after which nobody waits for it; None for never.
        is_kept: Whether its result stays here, where others than the caller may want it.

    Attributes:
        is_cancelled: Whether the caller has cancelled it, or is lost.
        calls: Numbers of the calls that it has made and that are not answered.
    """

    __slots__ = ("calls", "deadline_ns", "is_cancelled", "is_kept")

    def __init__(self, deadline_ns: int | None, *, is_kept: bool = False) -> None:
        self.deadline_ns = deadline_ns
        self.is_kept = is_kept
        self.is_cancelled = False
        self.calls: set[int] = set()


_SCOPE: ContextVar[Scope | None] = ContextVar("braid-rpc-scope", default=None)


def current_scope() -> Scope | None:
    """Return the call that this code runs for; None outside of one."""
    return _SCOPE.get()


def enter(scope: Scope) -> None:
    """Let code of this context, see `contextvars`, run for a call."""
    _SCOPE.set(scope)


def deadline_ns(name: str, seconds: float, now_ns: int) -> int | None:
    """Return the time at which a call fails: its own, or that of the call which makes it.

    Args:
        name: Name of the function, for the error.
        seconds: Seconds that the call may take; 0 for any.
        now_ns: Time now.

    Raises:
        CommTimeout: The deadline of the call which makes it has passed.
    """
    own = now_ns + round(seconds * 1e9) if seconds else None
    scope = _SCOPE.get()
    outer = None if scope is None else scope.deadline_ns
    if outer is None:
        return own
    if outer <= now_ns:
        late_s = (now_ns - outer) / 1e9
        msg = (
            f"{name} was not called: the deadline of the call that needs it passed {late_s:.3f} s "
            "ago"
        )
        raise CommTimeout(msg)
    return outer if own is None else min(own, outer)
