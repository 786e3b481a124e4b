"""The calls of units in a forward, and the order in which backward reaches them.

    forward    |--------- 0 ---------| |- 3 -|         call 0 contains calls 1 and 2
                 |- 1 -|    |- 2 -|
    backward   3  0  2  1

Backward reaches a call at its outputs: the last end first, and of calls that end together the outer
one first. The loss of a rank may not depend on a call, and backward leaves the call out there. All
ranks know the whole order, so each can do for such calls what the other ranks do.
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
        begin: Number of calls that had begun before.
        end: Number of calls that had begun when this one ended; -1 before.
        has_graph: Whether backward can reach its outputs.
        is_reached: Whether backward has reached its outputs, or has passed them.
    """

    unit: Called
    begin: int
    end: int = -1
    has_graph: bool = False
    is_reached: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Place in the order of backward."""
        return -self.end, self.begin


@dataclass(eq=False, slots=True)
class ForwardCalls(Generic[Called]):
    """Calls of units in one forward.

    Attributes:
        number: Number of the forward.
        calls: Calls in their order.
    """

    number: int = 0
    calls: list[UnitCall[Called]] = field(default_factory=list)

    def of(self, unit: Called) -> list[UnitCall[Called]]:
        """Return the calls of a unit."""
        return [call for call in self.calls if call.unit is unit]

    def begin(self, unit: Called) -> None:
        """Note that a call begins."""
        self.calls.append(UnitCall(unit, len(self.calls)))

    def finish(self, unit: Called) -> UnitCall[Called] | None:
        """Note that a call ends, and return it; None if it has not begun."""
        for call in reversed(self.calls):
            if call.unit is unit and call.end < 0:
                call.end = len(self.calls)
                return call
        return None

    def before(self, call: UnitCall[Called]) -> UnitCall[Called] | None:
        """Return the call that began before another one."""
        return self.calls[call.begin - 1] if call.begin else None

    def unreached(self, until: UnitCall[Called] | None = None) -> list[UnitCall[Called]]:
        """Return the calls that backward has not reached, in the order of backward.

        Args:
            until: Call before which the result ends.
        """
        missing = [call for call in self.calls if call.has_graph and not call.is_reached]
        if until is not None:
            missing = [call for call in missing if call.place < until.place]
        return sorted(missing, key=lambda call: call.place)

    def reset(self) -> None:
        """Mark all calls as unreached, for another backward."""
        for call in self.calls:
            call.is_reached = False
