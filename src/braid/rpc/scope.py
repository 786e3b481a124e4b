"""The call that code runs for: its deadline, its cancellation, the calls it makes, and its spans.

A call inside of a call does not outlast it: deadlines travel, and cancelling a call cancels the
calls that it has made. Spans show both in the trace and in reports of runs that stand still:

    rank 0   call(__main__:f, to rank 1) ──────────────────────────────────────────┐
    rank 1         (way)   queue(__main__:f)   serve(__main__:f, for rank 0)   (way back)

They have the number of the call, by which the trace joins them. The launcher reads them while the
program runs: a call that has no answer is a wait for the rank of its callee.

Cost: two microseconds of spans for a call under a launcher of braid, else nothing.
"""

from __future__ import annotations

from contextvars import ContextVar

from braid.errors import CommTimeout
from braid.runtime.events import Recorder, Span
from braid.types import text_digest

__all__ = ["CallSpans", "Scope", "current_scope", "deadline_ns", "enter"]

GROUP = text_digest("calls") >> 1
QUEUED_NS = 1_000_000  # shorter times are not worth a span
NUMBERS = (1 << 31) - 1  # of calls, as the trace shows them


class Scope:
    """A remote call that runs in this process, with its deadline and the calls that it makes.

    Args:
        deadline_ns: Time after which the caller no longer waits; None for no deadline.
        is_kept: Whether the result stays in this process as the value of a remote reference.

    Attributes:
        is_cancelled: Whether the caller has cancelled this call, or is lost.
        calls: Numbers of the calls that this call has made and that are not answered.
    """

    __slots__ = ("calls", "deadline_ns", "is_cancelled", "is_kept")

    def __init__(self, deadline_ns: int | None, *, is_kept: bool = False) -> None:
        self.deadline_ns = deadline_ns
        self.is_kept = is_kept
        self.is_cancelled = False
        self.calls: set[int] = set()


_SCOPE: ContextVar[Scope | None] = ContextVar("braid-rpc-scope", default=None)


def current_scope() -> Scope | None:
    """Return the call of a peer that this code runs for; None outside of such calls."""
    return _SCOPE.get()


def enter(scope: Scope) -> None:
    """Set the call for which code of this `contextvars` context runs."""
    _SCOPE.set(scope)


def deadline_ns(name: str, seconds: float, now_ns: int) -> int | None:
    """Return the deadline of a call, bounded by the deadline of the enclosing call.

    Args:
        name: Name of the function, for the error.
        seconds: Seconds that the call may take; 0 for no limit.
        now_ns: Time now.

    Raises:
        CommTimeout: The deadline of the enclosing call has passed.
    """
    limit = now_ns + round(seconds * 1e9) if seconds else None
    scope = _SCOPE.get()
    outer = None if scope is None else scope.deadline_ns
    if outer is None:
        return limit
    if outer <= now_ns:
        late_s = (now_ns - outer) / 1e9
        msg = f"{name} was not called: the deadline of the enclosing call passed {late_s:.3f} s ago"
        raise CommTimeout(msg)
    return outer if limit is None else min(limit, outer)


class CallSpans:
    """Records the calls of a node.

    Args:
        recorder: Recorder that the launcher reads; None without one.
        node: Number of this node, equal to its rank under a launcher.
    """

    def __init__(self, recorder: Recorder | None, node: int) -> None:
        self._recorder = recorder
        self._node = node

    def call(self, name: str, to: int, number: int) -> Span | None:
        """Begin the time span of this node's call of function `name`; None without a recorder."""
        recorder = self._recorder
        if recorder is None:
            return None
        return recorder.span(
            f"call({name}, to rank {to})",
            group=GROUP,
            channel=self._node,
            seq=number & NUMBERS,
            site=recorder.site(),
        )

    def serve(self, name: str, sender: int, number: int, arrived_ns: int) -> Span | None:
        """Begin the time span of a peer's call that runs here; record also how long it waited."""
        recorder = self._recorder
        if recorder is None:
            return None
        waited_ns = recorder.now_ns() - arrived_ns
        if waited_ns >= QUEUED_NS:
            recorder.complete(f"queue({name})", arrived_ns, waited_ns, seq=number & NUMBERS)
        kind = f"serve({name}, for rank {sender})"
        return recorder.span(kind, group=GROUP, channel=sender, seq=number & NUMBERS)
