"""The micro-batches of a step on one rank, in rounds that end with a sum over ranks.

A member computes several micro-batches of a step or none, another member's for a check, and all of
them again after a loss. One object per epoch of members has what a broken step throws away: the
number of the round, gradients, buffers and checksums. It neither updates weights nor changes
members; `training` does.

    3 ranks, 5 micro-batches      check    round 0    round 1
    rank 2 has micro-batch            0          2       none    `add_up` does rounds 0 and 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from braid.comm import Group
from braid.elasticity.gradient_sums import GradientSums, num_rounds, shard_of
from braid.elasticity.replica import Replica
from braid.elasticity.step_buffers import StepBuffers
from braid.elasticity.suspects import CheckedSteps, ComputedSums, GradientChecks

__all__ = ["StepRounds"]

GRADIENTS = 1 << 32  # place of gradients in the order of computation: after all stages
NORMS = GRADIENTS + 1


class StepRounds:
    """Adds up the micro-batches of each step, while the members stay the same.

    Args:
        replica: Model of this member.
        world: All members.
        checks: Steps in which gradients are checked.

    Attributes:
        buffers: Buffers of the model, which each micro-batch gets as before the step.
    """

    def __init__(self, replica: Replica, world: Group, checks: CheckedSteps) -> None:
        self._replica = replica
        self._world = world
        self._group = replica.group
        self._needs_all = replica.needs_all
        self._sums = GradientSums(replica.group, replica.records, replica.memory)
        self._checks = GradientChecks(checks)
        self.buffers = StepBuffers(replica.group, replica.state.model)
        self._number = 0  # of the round
        self._loss = math.nan
        self._is_check = False
        self._computed: dict[int, float] = {}  # checksums of this micro-batch, if it is compared

    @property
    def checks(self) -> CheckedSteps:
        """Steps in which gradients are checked."""
        return self._checks.steps

    @property
    def position(self) -> tuple[int, Mapping[int, float] | None]:
        """Number of the round, and the checksums of a check; (0, None) between steps."""
        return self._number, self._checks.checked

    def shard(self, num_steps: int, num_shards: int) -> int:
        """Return this micro-batch's number; the last one, if only other ranks have one.

        Args:
            num_steps: Number of earlier steps.
            num_shards: Number of micro-batches of the step.
        """
        if self._checks.is_next(num_steps, self._group.size, num_shards):
            return (self._group.rank + 1) % self._group.size
        shard = self._next_shard(num_shards)
        return num_shards - 1 if shard is None else shard

    def begin(self, num_steps: int, num_shards: int) -> None:
        """Begin a micro-batch; see `shard`."""
        self._sums.clear()
        self._loss = math.nan  # until `add_loss`
        self._is_check = self._checks.is_next(num_steps, self._group.size, num_shards)
        self.buffers.begin(is_first=self.position == (0, None))
        self._computed = {}
        is_compared = self._is_check or (not self._number and self._checks.checked is not None)
        notes = is_compared and self.checks.are_exact
        self._replica.note_sent(self._computed if notes else None)

    def add_loss(self, value: float) -> None:
        """Add `value` to the loss of this micro-batch; the loss is NaN if this is never called."""
        self._loss = value if math.isnan(self._loss) else self._loss + value

    def end_check(self) -> bool:
        """Return whether this micro-batch was a check of the next rank; keep its checksums then."""
        if self._is_check:
            self._checks.checked = {**self._computed, **self._gradient_sums()}
        return self._is_check

    def find_wrong(self, step: int, *, can_lose: bool) -> tuple[int, ...] | None:
        """Return the ranks that must leave, or None; see `GradientChecks.find_wrong`."""
        if self._number or self._checks.checked is None:
            return None
        self._replica.note_sent(None)  # an evaluation may follow
        self._computed |= self._gradient_sums()
        sums = ComputedSums(self._group.ranks, self._computed, self._checks.checked)
        return self._checks.find_wrong(self._world, sums, step, can_lose=can_lose)

    def _gradient_sums(self) -> dict[int, float]:
        """Return a checksum of this micro-batch's gradients, or numbers with a tolerance."""
        if self.checks.are_exact:
            return {GRADIENTS: self._sums.checksum()}
        projection, norm = self._sums.sketch()
        return {GRADIENTS: projection, NORMS: norm}

    def add_up(self, sizes: Sequence[int], wants_pause: Callable[[], bool]) -> bool | None:
        """Add the micro-batch to the step, and run the rounds in which this rank has none.

        Args:
            sizes: Numbers of samples of the micro-batches of the step.
            wants_pause: Returns whether this rank wants a pause after the step.

        Returns:
            Whether any rank wants a pause; None if this rank has another micro-batch in the step.
        """
        if not self._number:
            self.buffers.note_first()
        last = num_rounds(len(sizes), self._group.size) - 1
        while True:
            shard = self._next_shard(len(sizes))
            self._sums.add(
                self._number,
                has_shard=shard is not None,
                loss=self._loss,
                weight=sizes[shard or 0] * len(sizes) / sum(sizes),
            )
            pauses = self._sums.reduce(self._number, len(sizes), flag=wants_pause())
            if self._number == last:
                return pauses
            self._number += 1
            if self._needs_all or self._next_shard(len(sizes)) is not None:
                return None

    def set_gradients(self) -> float:
        """Set `.grad` to the mean, share buffers, and return the mean loss; a collective."""
        self.buffers.share()
        self._sums.set_gradients()
        return self._sums.loss

    def end(self) -> None:
        """Record that the step is complete."""
        self._sums.clear()
        self._number = 0
        self._checks.end()

    def restart(self) -> None:
        """Begin the step again, with the buffers from before the step."""
        self._sums.clear()
        self.buffers.restore()
        self._number, self._checks.checked = 0, None

    def _next_shard(self, num_shards: int) -> int | None:
        return shard_of(self._number, self._group.rank, self._group.size, num_shards)
