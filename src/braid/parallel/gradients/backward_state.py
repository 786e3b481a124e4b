"""State machine of a module's backward passes, from the first forward to the average. Pure.

A backward is local, nested in another backward, or averages its gradients at its end:

    phase       event     next        action of the reducer
    IDLE        BEGIN     (kind)      waits for the end of the backward
    LOCAL       END       IDLE        ACCUMULATE   counts a backward with unaveraged gradients
    NESTED      END       IDLE        KEEP         the enclosing backward counts
    AVERAGING   END       IDLE        AVERAGE      averages
    LOCAL       ABANDON   IDLE        REPORT_LATER reports the exception with the next average
    NESTED      ABANDON   IDLE        REPORT_LATER
    AVERAGING   ABANDON   IDLE        REPORT       reports now: other ranks are waiting

If a backward ends without a gradient of the module, as in `torch.autograd.grad`, the action is
NOTHING. ABANDON is the next forward after a backward that raised.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from braid.errors import ConfigError

__all__ = ["BackwardEnd", "BackwardPhase", "BackwardState", "ReducerAction"]


class BackwardPhase(enum.Enum):
    """Kind of the running backward, such as one that averages or one that stays local."""

    IDLE = enum.auto()
    LOCAL = enum.auto()
    NESTED = enum.auto()
    AVERAGING = enum.auto()


class BackwardEnd(enum.Enum):
    """Way in which a backward ended."""

    END = enum.auto()
    ABANDON = enum.auto()


class ReducerAction(enum.Enum):
    """Action that a reducer takes at the end of a backward."""

    NOTHING = enum.auto()
    ACCUMULATE = enum.auto()
    KEEP = enum.auto()
    AVERAGE = enum.auto()
    REPORT = enum.auto()
    REPORT_LATER = enum.auto()


ACTIONS = {
    (BackwardPhase.LOCAL, BackwardEnd.END): ReducerAction.ACCUMULATE,
    (BackwardPhase.NESTED, BackwardEnd.END): ReducerAction.KEEP,
    (BackwardPhase.AVERAGING, BackwardEnd.END): ReducerAction.AVERAGE,
    (BackwardPhase.LOCAL, BackwardEnd.ABANDON): ReducerAction.REPORT_LATER,
    (BackwardPhase.NESTED, BackwardEnd.ABANDON): ReducerAction.REPORT_LATER,
    (BackwardPhase.AVERAGING, BackwardEnd.ABANDON): ReducerAction.REPORT,
}


@dataclass(slots=True, eq=False)
class BackwardState:
    """State of the backward passes between two averages.

    Attributes:
        phase: Kind of the running backward, such as one that averages or one that stays local.
        has_gradient: Whether the running backward has computed a gradient.
        num_accumulated: Number of local backwards since the last average.
        averages_next: Whether the next backward averages, regardless of `num_accumulated`.
        failed: Whether a local backward has raised.
        failure: Text of an error that the reducer raised in the running backward, for other ranks.
        num_forwards_without_backward: Number of forward passes that no backward has reached.
        buffers_used: Whether the module has trained since its buffers were last made equal.
        weights: Loss weight of the forwards that the running backward has reached; one element at
            most.
        total_weight: Sum of the weights of accumulated backwards.
        is_weighted: Whether the program has set a loss weight in any of these backwards.
    """

    phase: BackwardPhase = BackwardPhase.IDLE
    has_gradient: bool = False
    num_accumulated: int = 0
    averages_next: bool = False
    failed: bool = False
    failure: str = ""
    num_forwards_without_backward: int = 0
    buffers_used: bool = False
    weights: set[float | None] = field(default_factory=set)
    total_weight: float = 0.0
    is_weighted: bool = False

    @property
    def loss_weight(self) -> float:
        """Weight of this rank in the average."""
        return self.total_weight if self.is_weighted else 1.0

    def begin(self, phase: BackwardPhase) -> None:
        """Begin a backward of the kind `phase`, without gradients and weights so far."""
        self.phase = phase
        self.has_gradient = False
        self.weights.clear()

    def end(self, event: BackwardEnd) -> ReducerAction:
        """End the running backward in the way `event`; return the reducer's next action."""
        action = ACTIONS[self.phase, event]
        self.phase = BackwardPhase.IDLE
        if event is BackwardEnd.END:
            if not self.has_gradient:
                return ReducerAction.NOTHING
            weight = next(iter(self.weights), None)
            if weight is not None:
                self.total_weight += weight
                self.is_weighted = True
        if action in {ReducerAction.ACCUMULATE, ReducerAction.REPORT_LATER}:
            self.num_accumulated += 1
        self.failed |= action is ReducerAction.REPORT_LATER
        return action

    def add_weight(self, weight: float | None) -> None:
        """Record the loss weight of a forward that the running backward has reached.

        Raises:
            ConfigError: The backward has reached a forward of another weight.
        """
        if self.weights and weight not in self.weights:
            (other,) = self.weights
            msg = (
                f"one backward covers forwards with different loss weights, {other} and "
                f"{weight}: call backward once per forward"
            )
            raise ConfigError(msg)
        self.weights.add(weight)

    def drop_accumulated(self) -> None:
        """Restart the count of accumulated backwards."""
        self.num_accumulated = 0
        self.total_weight = 0.0
        self.is_weighted = False

    def averaged(self) -> None:
        """Reset the state after an average."""
        self.drop_accumulated()
        self.has_gradient = self.averages_next = self.failed = False
        self.num_forwards_without_backward = 0
        self.failure = ""
        self.weights.clear()
