"""Calls of units in a forward, and the order in which backward reaches them.

    forward    |--------- 0 ---------| |- 3 -|         call 0 contains calls 1 and 2
                 |- 1 -|    |- 2 -|
    backward   3  0  2  1

Backward reaches a call at its outputs: the call that ended last comes first; of calls that end
together, the outer one. If the loss of a rank does not depend on a call, its backward skips the
call. All ranks know the whole order, so a rank can take the same steps for skipped calls as the
other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["ForwardCalls", "UnitCall"]

Called = TypeVar("Called")


@dataclass(eq=False, slots=True)
class UnitCall(Generic[Called]):
    """One call of a unit.

    Attributes:
        unit: The unit.
        begin: Number of calls that began before this one.
        end: Number of calls that had begun when this call ended; -1 while it runs.
        has_graph: Whether backward can reach the call's outputs.
        is_reached: Whether backward has reached or passed the call's outputs.
    """

    unit: Called
    begin: int
    end: int = -1
    has_graph: bool = False
    is_reached: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Sort key: calls in this order are calls in the order of backward."""
        return -self.end, self.begin


@dataclass(eq=False, slots=True)
class ForwardCalls(Generic[Called]):
    """Record of the calls of units in one forward of the model.

    Attributes:
        number: Number of the forward.
        calls: Calls in order.
    """

    number: int = 0
    calls: list[UnitCall[Called]] = field(default_factory=list)

    def of(self, unit: Called) -> list[UnitCall[Called]]:
        """Return the calls of a unit."""
        return [call for call in self.calls if call.unit is unit]

    def begin(self, unit: Called) -> None:
        """Record the begin of a call."""
        self.calls.append(UnitCall(unit, len(self.calls)))

    def finish(self, unit: Called) -> UnitCall[Called] | None:
        """Record the end of a call, and return it; None if no call of the unit is running."""
        for call in reversed(self.calls):
            if call.unit is unit and call.end < 0:
                call.end = len(self.calls)
                return call
        return None

    def before(self, call: UnitCall[Called]) -> UnitCall[Called] | None:
        """Return the call that began before `call`; None for the first."""
        return self.calls[call.begin - 1] if call.begin else None

    def unreached(self, until: UnitCall[Called] | None = None) -> list[UnitCall[Called]]:
        """Return the calls that backward has not reached, in the order of backward.

        Args:
            until: Call at which the result ends, exclusive.
        """
        missing = [call for call in self.calls if call.has_graph and not call.is_reached]
        if until is not None:
            missing = [call for call in missing if call.place < until.place]
        return sorted(missing, key=lambda call: call.place)

    def reset(self) -> None:
        """Mark all calls as unreached, for another backward."""
        for call in self.calls:
            call.is_reached = False
