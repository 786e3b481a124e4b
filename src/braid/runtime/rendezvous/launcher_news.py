"""Messages of the launcher to a rank: lost ranks, requests to stop or pause, and new epochs."""

from __future__ import annotations

import math
import select

from braid.errors import CommTimeout, PeerLostError
from braid.runtime.clock import Clock
from braid.runtime.rendezvous.control import (
    DISMISSED,
    ControlClient,
    NewEpoch,
    PauseTraining,
    RankLost,
    Ready,
    Stop,
)
from braid.runtime.transport import Loss

__all__ = ["NO_EPOCH", "LauncherNews"]

LOOK_S = 1.0  # pause between two checks of whether the launcher is gone
NO_EPOCH = NewEpoch(-1, (), ())


class LauncherNews:
    """Collects the launcher's messages: lost ranks, requests to stop or pause, new epochs.

    Args:
        control: Connection to the launcher.

    Attributes:
        stop_reason: Reason of the launcher's request to stop; empty if there is none.
        pauses: Whether the launcher has asked the members of this epoch to prepare for the next.
        epoch: The last epoch of an elastic run that has begun.
        lost: Losses by the numbers that the launcher gives to ranks.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self.stop_reason = ""
        self.pauses = False
        self.epoch = NO_EPOCH
        self.lost: dict[int, Loss] = {}
        self._news: list[int] = []  # lost ranks that `losses` has not returned yet

    def fileno(self) -> int:
        """Return the descriptor of the connection; see `Witness`."""
        return self._control.fileno()

    def losses(self) -> list[Loss]:
        """Return the losses since the last call, by ranks of the current epoch; see `Witness`."""
        self.poll()
        news, self._news = self._news, []
        if not self.epoch.members:
            return [self.lost[number] for number in news]
        places = {number: place for place, number in enumerate(self.epoch.members)}
        return [
            self.lost[number]._replace(rank=places[number]) for number in news if number in places
        ]

    def poll(self) -> None:
        """Process the messages that have arrived; never blocks."""
        for message in self._control.poll():
            if isinstance(message, RankLost):
                self.lost[message.rank] = Loss(message.rank, message.reason, message.departed)
                self._news.append(message.rank)
            elif isinstance(message, Stop):
                self.stop_reason = message.reason
            elif isinstance(message, NewEpoch):
                self.epoch, self.pauses = message, False
                self._news = list(self.lost)  # members may have died meanwhile
            elif isinstance(message, PauseTraining):
                self.pauses = True

    @property
    def is_gone(self) -> bool:
        """Whether the connection to the launcher has ended."""
        self.poll()
        return not self._control.connected

    def ready(
        self, epoch: int, num_steps: int, leaves: str = "", *, is_offer: bool = False
    ) -> None:
        """Send the launcher `Ready`: this process waits for the epoch after `epoch`, or leaves."""
        self._control.send(Ready(epoch, num_steps, leaves, is_offer))

    def wait(self, epoch: int, clock: Clock, limit_s: float | None = None) -> NewEpoch:
        """Wait for the epoch after `epoch`, and return it.

        Raises:
            SystemExit: The launcher has dismissed this process.
            PeerLostError: The run ends, or the launcher is gone.
            CommTimeout: No epoch has begun within `limit_s`.
        """
        end_ns = math.inf if limit_s is None else clock.after_ns(limit_s)
        while True:
            self.poll()
            if self.epoch.epoch > epoch:
                return self.epoch
            if self.stop_reason == DISMISSED:
                raise SystemExit(0)
            if self.stop_reason or not self._control.connected:
                reason = self.stop_reason or "the launcher is gone"
                msg = f"no new set of ranks follows epoch {epoch} of this run: {reason}"
                raise PeerLostError(msg, rank=min(self.lost, default=-1))
            if clock.now_ns() >= end_ns:
                msg = f"no ranks follow epoch {epoch} within {limit_s:g} s: see the launcher's log"
                raise CommTimeout(msg)
            select.select([self._control.fileno()], [], [], LOOK_S)
