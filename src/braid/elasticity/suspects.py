"""Finds ranks that compute wrongly or slowly, from figures of all ranks.

A flipped bit in a gradient is summed into the weights of all replicas, which stay equal: comparing
them shows nothing. So now and then each rank also computes the micro-batch of the next one, and the
two results are compared before they are used. A rank that computes wrongly differs from both of its
neighbours. The first step of a new rank is checked, too: a program may keep state that the new rank
has not got.

    micro-batch      0         1         2
    computed by    r0, r2    r1, r0    r2, r1       r1 is wrong: micro-batches 1 and 2 differ
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from statistics import median
from typing import NamedTuple

import torch

from braid.comm import Group
from braid.errors import MismatchError

__all__ = [
    "NO_CHECKS",
    "CheckedSteps",
    "GradientChecks",
    "StepTimes",
    "slow_rank",
    "wrong_ranks",
]

LOG = logging.getLogger(__name__)

MOST_FAILED_CHECKS = 2
SLOW = 2.0  # factor from which on a rank is named that is not replaced
LOOK_STEPS, NUM_LOOKS = 10, 3  # a slow rank is slow in NUM_LOOKS looks at LOOK_STEPS steps each


class StepTimes:
    """Times of this rank's micro-batches, without time spent waiting for other ranks.

    Args:
        factor: See `slow_rank`; 0 to find no ranks to replace.
        names_slow: Whether a slow rank that is not replaced is named once; ranks of a mesh are not
            alike.
    """

    def __init__(self, factor: float, *, names_slow: bool) -> None:
        self._replaces = bool(factor)
        self._factor = factor or (SLOW if names_slow else 0.0)
        self._has_named = False
        self._began_ns = 0
        self.clear()

    def clear(self) -> None:
        """Forget all times, since the ranks have changed."""
        self._busy_ns = self._num_busy = 0
        self._slow: list[int | None] = []

    def go_on(self) -> None:
        """Start the clock: this rank computes from now on."""
        self._began_ns = time.monotonic_ns()

    def wait(self) -> None:
        """Stop the clock: this rank has computed a micro-batch, and now waits for other ranks."""
        began_ns, self._began_ns = self._began_ns, time.monotonic_ns()
        self._busy_ns += self._began_ns - began_ns
        self._num_busy += 1

    def find_slow(self, group: Group, num_steps: int) -> tuple[int | None, str]:
        """Find a rank that was slow in three checks in a row; every tenth step is a check.

        Args:
            group: All ranks; a check is a collective.
            num_steps: Number of steps so far, the same on all ranks.

        Returns:
            The slow rank, or None; and a text that describes how slow it is.
        """
        if not self._factor or num_steps % LOOK_STEPS or group.size == 1:
            return None, ""
        mine = self._busy_ns / 1e9 / max(1, self._num_busy)  # of a micro-batch
        seconds = group.all_gather(torch.tensor([mine])).tolist()
        self._busy_ns = self._num_busy = 0
        self._slow = [*self._slow, slow_rank(seconds, self._factor)][-NUM_LOOKS:]
        slow = self._slow[-1]
        if slow is None or self._slow != [slow] * NUM_LOOKS:
            return None, ""
        times = seconds[slow] / median(s for rank, s in enumerate(seconds) if rank != slow)
        text = f"has taken {times:.1f} times as long as its peers for its steps"
        if self._replaces:
            return slow, text
        if slow == group.rank and not self._has_named:
            LOG.warning("this rank %s: look at its host, or replace it with replace_slow=2.0", text)
            self._has_named = True
        return None, ""


def wrong_ranks(
    computed: Sequence[int], checked: Sequence[int], newcomers: AbstractSet[int] = frozenset()
) -> tuple[int, ...]:
    """Return the ranks that may have computed wrongly: none, one, or all ranks in doubt.

    Args:
        computed: Checksum of each rank's result for its own micro-batch.
        checked: Checksum of each rank's result for the micro-batch of the next rank.
        newcomers: Ranks that are in doubt if they differ from a rank that is no newcomer.

    >>> wrong_ranks([5, 6, 7], [6, 7, 5])
    ()
    >>> wrong_ranks([5, 9, 7], [6, 9, 5])
    (1,)
    >>> wrong_ranks([5, 9, 7], [6, 7, 5])
    (0, 1)
    >>> wrong_ranks([5, 9, 7], [6, 8, 4], {1, 2})
    (1, 2)
    """
    size = len(computed)
    pairs = [
        {rank, (rank + 1) % size}
        for rank in range(size)
        if checked[rank] != computed[(rank + 1) % size]
    ]
    pairs = [pair & newcomers or pair for pair in pairs]
    if not pairs:
        return ()
    common = set.intersection(*pairs)
    return tuple(sorted(common or set.union(*pairs)))


class CheckedSteps(NamedTuple):
    """The steps in which gradients are checked, while the members stay the same.

    Attributes:
        every: Number of steps between two checks; 0 for none.
        newcomers: Members that have joined a running training; their first step is checked, too.
    """

    every: int = 0
    newcomers: frozenset[int] = frozenset()

    def is_due(self, num_steps: int, num_ranks: int, num_shards: int) -> bool:
        """Return whether a step is checked; all ranks must have micro-batches.

        Args:
            num_steps: Number of earlier steps.
            num_ranks: Number of ranks.
            num_shards: Number of micro-batches of the step.
        """
        is_due = bool(self.newcomers) or (bool(self.every) and num_steps % self.every == 0)
        return is_due and 1 < num_ranks <= num_shards

    def without_newcomers(self) -> CheckedSteps:
        """Return the steps to check after a check."""
        return self._replace(newcomers=frozenset())


NO_CHECKS = CheckedSteps()


class GradientChecks:
    """Compares each rank's gradients with another rank's result for the same micro-batch.

    Args:
        steps: The steps to check.

    Attributes:
        checksum: Checksum of this rank's gradients for the next rank's micro-batch; None outside of
            a check.
    """

    def __init__(self, steps: CheckedSteps) -> None:
        self.steps = steps
        self.checksum: int | None = None
        self._num_failed = 0  # checks of this step that left the wrong rank unknown

    def is_next(self, num_steps: int, num_ranks: int, num_shards: int) -> bool:
        """Return whether each rank must now compute the next rank's micro-batch, for a check."""
        return self.checksum is None and self.steps.is_due(num_steps, num_ranks, num_shards)

    def end(self) -> None:
        """Record that the checked step is complete."""
        if self.checksum is not None:
            self.steps = self.steps.without_newcomers()
        self.checksum, self._num_failed = None, 0

    def find_wrong(self, group: Group, checksum: int, step: int) -> tuple[int, ...]:
        """Return the ranks that may have computed wrongly; a collective.

        If there are several, the caller must repeat the step.

        Args:
            group: The members.
            checksum: Checksum of the gradients of this rank's own micro-batch.
            step: Number of the step.

        Raises:
            MismatchError: The check of this step has failed several times.
        """
        mine = torch.tensor([[checksum, self.checksum or 0]])
        newcomers = self.steps.newcomers
        computed, checked = group.all_gather(mine).t().tolist()
        wrong = wrong_ranks(computed, checked, newcomers)
        if group.rank in newcomers.intersection(wrong):
            LOG.warning(
                "this rank has joined, and computes other gradients than the other ranks in step "
                "%d: the program keeps state that a new rank does not get, such as a counter or "
                "an average; pass it to braid.elastic as a further object, or compute it from "
                "num_steps (or this host computes wrongly)",
                step,
            )
        if len(wrong) < 2 or newcomers.issuperset(wrong):
            return wrong
        self._num_failed += 1
        number_of = group.context.health.number
        names = " and ".join(str(number_of(group.ranks[rank])) for rank in wrong)
        LOG.warning(
            "ranks %s computed different gradients for a micro-batch of step %d, so the step is "
            "computed again: check their hosts if this message repeats",
            names,
            step,
        )
        if self._num_failed > MOST_FAILED_CHECKS:
            msg = (
                f"ranks {names} compute different gradients for the same micro-batch of step "
                f"{step}, {self._num_failed} times: one of their hosts computes wrongly, or the "
                "model draws random numbers that are not torch's"
            )
            raise MismatchError(msg)
        return wrong


def slow_rank(seconds: Sequence[float], factor: float) -> int | None:
    """Return the rank with steps `factor` times as long as the steps of its peers, or None.

    Args:
        seconds: Seconds that each rank has computed.
        factor: Least ratio of the slowest rank's seconds to the median of the other ranks.

    >>> slow_rank([1.0, 1.1, 3.0], 2.0), slow_rank([1.0, 1.9], 2.0)
    (2, None)
    """
    rank = max(range(len(seconds)), key=lambda r: seconds[r])
    others = [value for r, value in enumerate(seconds) if r != rank]
    return rank if others and seconds[rank] > factor * median(others) else None
