"""Spans of calls, for the trace and for reports of runs that stand still.

    rank 0   call(__main__:f, to rank 1) ──────────────────────────────────────────┐
    rank 1         (way)   queue(__main__:f)   serve(__main__:f, for rank 0)   (way back)

They have the number of the call, by which the trace joins them. The launcher reads them while the
program runs: a call that has no answer is a wait for the rank of its callee.

Cost: two microseconds for a call, where there is a launcher of braid, else nothing.
"""

from __future__ import annotations

from braid.runtime.events import Recorder, Span
from braid.types import text_digest

__all__ = ["CallSpans"]

GROUP = text_digest("calls") >> 1
QUEUED_NS = 1_000_000  # shorter times are not worth a span
NUMBERS = (1 << 31) - 1  # of calls, as the trace shows them


class CallSpans:
    """Records the calls of a node.

    Args:
        recorder: Recorder that the launcher reads; None without one.
        node: Number of this node, which is its rank then.
    """

    def __init__(self, recorder: Recorder | None, node: int) -> None:
        self._recorder = recorder
        self._node = node

    def call(self, name: str, to: int, number: int) -> Span | None:
        """Begin the span of a call that this node makes."""
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
        """Begin the span of a call that runs here; another one shows how long it waited for it."""
        recorder = self._recorder
        if recorder is None:
            return None
        waited_ns = recorder.now_ns() - arrived_ns
        if waited_ns >= QUEUED_NS:
            recorder.complete(f"queue({name})", arrived_ns, waited_ns, seq=number & NUMBERS)
        kind = f"serve({name}, for rank {sender})"
        return recorder.span(kind, group=GROUP, channel=sender, seq=number & NUMBERS)
