"""Finds ranks that compute wrongly or slowly, from figures of all ranks.

A flipped bit in a gradient is summed into the weights of all replicas, which stay equal: comparing
them shows nothing. So now and then each replica also computes the micro-batch of the next one, and
the two results are compared before they are used. A replica that computes wrongly differs from both
of its neighbours. The first step of a new rank is always checked, and the result of its first
update: a program may keep state that the new rank has not got. Without `verify` rounding errors do
not count, and only a new rank can be wrong: if old ranks differ from each other, the program draws
random numbers that nothing seeds, and the check shows nothing.

    micro-batch      0         1         2
    computed by    r0, r2    r1, r0    r2, r1       r1 is wrong: micro-batches 1 and 2 differ

On a mesh, each rank is compared with the ranks at its place in the other replicas. A wrong value
spreads: to later stages in forward, to earlier stages in backward, and to all tensor parallel ranks
of a stage. So ranks compare checksums of all values that they send to other stages, and then of
their gradients. The rank with the first difference in the order of computation is wrong:

    two stages         forward 0   forward 1   backward 1   backward 0   gradients
    rank of stage 0    equal                                differs      differs
    rank of stage 1                equal       differs                   differs      is wrong

If several ranks have the first difference, all of them are in doubt, and the step is repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from statistics import median
from typing import NamedTuple
from zlib import crc32

from braid.comm import Group
from braid.elasticity.members import Members
from braid.elasticity.replica import Replica
from braid.elasticity.state_transfer import sums_of_others
from braid.errors import MismatchError
from braid.parallel.gradients.same_batches import TOLERANCE
from braid.parallel.gradients.step_settings import settings_of
from braid.types import first_few

__all__ = [
    "NO_CHECKS",
    "CheckedSteps",
    "ComputedSums",
    "GradientChecks",
    "StepTimes",
    "leave_if_wrong",
    "wrong_newcomers",
    "wrong_ranks",
]

LOG = logging.getLogger(__name__)

MOST_FAILED_CHECKS = 2
SETTINGS = "settings of the optimizer"
SLOW = 2.0  # factor from which on a rank is named that is not replaced
LOOK_STEPS, NUM_LOOKS = 10, 3  # a slow rank is slow in NUM_LOOKS looks at LOOK_STEPS steps each


class StepTimes:
    """Times of this rank's micro-batches, without time spent waiting for other ranks.

    Args:
        factor: See `slow_rank`; 0 to find no ranks to replace.
        replica: Model of this rank.
    """

    def __init__(self, factor: float, replica: Replica) -> None:
        self._replaces = bool(factor)
        self._factor = factor or SLOW * replica.has_times
        self._replica = replica
        self._has_named = False
        self._began_ns = 0
        self.clear()

    def clear(self) -> None:
        """Forget all times, since the ranks have changed."""
        self._busy_ns = self._num_busy = 0
        self._slow: list[int | None] = []

    def go_on(self) -> None:
        """Start the clock: this rank computes from now on."""
        if self._factor:
            self._began_ns = time.monotonic_ns() - self._replica.spent_ns

    def wait(self) -> None:
        """Stop the clock: this rank has computed a micro-batch, and now waits for other ranks."""
        began_ns = self._began_ns
        self.go_on()
        self._busy_ns += self._began_ns - began_ns
        self._num_busy += 1

    def find_slow(self, members: Members, num_steps: int) -> tuple[int | None, str]:
        """Find a rank that was slow in three checks in a row; every tenth step is a check.

        Args:
            members: All ranks; a check is a collective. If the run cannot continue without a rank,
                a slow rank is only named.
            num_steps: Number of steps so far, the same on all ranks.

        Returns:
            The slow rank, or None; and a text that describes how slow it is.
        """
        group = members.group
        if not self._factor or num_steps % LOOK_STEPS or group.size == 1:
            return None, ""
        mine = self._busy_ns / 1e9 / max(1, self._num_busy)  # of a micro-batch
        answers = group.objects.all_gather((mine, self._replica.group.ranks))
        seconds, replicas = zip(*answers, strict=True)
        self._busy_ns = self._num_busy = 0
        self._slow = [*self._slow, slow_rank(seconds, self._factor, replicas)][-NUM_LOOKS:]
        slow = self._slow[-1]
        if slow is None or self._slow != [slow] * NUM_LOOKS:
            return None, ""
        times = times_slower(seconds, slow, replicas[slow])
        text = f"has taken {times:.1f} times as long as its peers for its steps"
        if self._replaces and members.can_lose:
            return slow, text
        if slow == group.rank and not self._has_named:
            advice = "replace it with replace_slow=2.0"
            if self._replaces:
                advice = "allow another process with --restarts, since the run needs this rank"
            LOG.warning("this rank %s: look at its host, or %s", text, advice)
            self._has_named = True
        return None, ""


def leave_if_wrong(
    members: Members, replica: Replica, newcomers: AbstractSet[int], num_steps: int
) -> bool:
    """Leave if this member's first update has given another result than on the other members.

    A collective, after the first update of new members.

    Args:
        members: The members.
        replica: Model of this member.
        newcomers: Members that have made their first update, by the launcher's number.
        num_steps: Number of steps so far.

    Returns:
        Whether any member leaves.
    """
    group = members.group
    state, number_of = replica.state, group.context.health.number
    settings = crc32(repr(settings_of(state.optimizer)).encode())
    sums = {SETTINGS: settings, **sums_of_others(state), **replica.digests()}
    answers = group.objects.all_gather(sums)
    are_new = [number_of(rank) in newcomers for rank in group.ranks]
    old = [theirs for theirs, is_new in zip(answers, are_new, strict=True) if not is_new]
    # values that may differ between hosts are compared only if several old members have one value
    seen = {n: [theirs[n] for theirs in old if n in theirs] for theirs in old for n in theirs}
    expected = {
        name: values[0]
        for name, values in seen.items()
        if len(set(values)) == 1 and (len(values) > 1 or name == SETTINGS)
    }
    wrong = [
        is_new and any(expected.get(name, value) != value for name, value in theirs.items())
        for theirs, is_new in zip(answers, are_new, strict=True)
    ]
    if wrong[group.rank]:
        differing = [name for name, value in sums.items() if expected.get(name, value) != value]
        reason = (
            f"has joined, and its first update gave other values ({first_few(differing, 3)}): "
            "update= or the loop keeps state that a new rank does not get, such as a counter; "
            "pass it as a further object of the training, or compute it from training.num_steps"
        )
        leave = members.offer_to_leave if members.can_lose else members.leave
        leave(num_steps, reason)
    return any(wrong)


class ComputedSums(NamedTuple):
    """Checksums of what a rank has computed in a check.

    Attributes:
        replicas: Ranks at the same place in all replicas, in order; with this rank.
        computed: Checksums for its own micro-batch, by place in the order of computation; floats
            are sketches, in which rounding errors do not count (see `sketch_of`).
        checked: Checksums for the micro-batch of the next replica.
    """

    replicas: Sequence[int]
    computed: Mapping[int, float]
    checked: Mapping[int, float]


def wrong_ranks(
    ranks: Sequence[ComputedSums], newcomers: AbstractSet[int] = frozenset()
) -> tuple[int, ...]:
    """Return the ranks that may have computed wrongly: none, one, or all ranks in doubt.

    Args:
        ranks: Checksums of each rank.
        newcomers: Ranks that are in doubt if they differ from a rank that is no newcomer.

    >>> def by_rank(*sums):  # three replicas of one rank: own micro-batch, and the next one
    ...     return [ComputedSums((0, 1, 2), {0: mine}, {0: theirs}) for mine, theirs in sums]
    >>> wrong_ranks(by_rank((5, 6), (6, 7), (7, 5)))
    ()
    >>> wrong_ranks(by_rank((5, 6), (9, 9), (7, 5)))
    (1,)
    >>> wrong_ranks(by_rank((5, 6), (9, 7), (7, 5)))
    (0, 1)
    >>> wrong_ranks(by_rank((5, 6), (9, 8), (7, 4)), {1, 2})
    (1, 2)
    >>> wrong_ranks(by_rank((5, 6), (9, 8), (7, 5)), {2})  # the first pair has no newcomer
    (1,)
    """
    differences: dict[int, list[tuple[int, set[int]]]] = {}  # by replica: place, pair of ranks
    for rank, mine in enumerate(ranks):
        number = mine.replicas.index(rank)
        following = mine.replicas[(number + 1) % len(mine.replicas)]
        theirs = ranks[following].computed
        places = [p for p in {*mine.checked, *theirs} if _differ(mine.checked, theirs, p)]
        if places:
            differences.setdefault(number, []).append((min(places), {rank, following}))
    doubts = []
    for pairs in differences.values():
        first = min(place for place, _ in pairs)
        doubt = set[int]().union(*(pair for place, pair in pairs if place == first))
        doubts.append(doubt)
    if not doubts:
        return ()
    if all(doubt & newcomers for doubt in doubts):
        doubts = [doubt & newcomers for doubt in doubts]
    common = set.intersection(*doubts)
    return tuple(sorted(common or set.union(*doubts)))


def _differ(one: Mapping[int, float], other: Mapping[int, float], place: int) -> bool:
    here, there = one.get(place), other.get(place)
    if isinstance(here, float) and isinstance(there, float):
        return not abs(here - there) <= TOLERANCE
    return here != there


def wrong_newcomers(ranks: Sequence[ComputedSums], newcomers: AbstractSet[int]) -> tuple[int, ...]:
    """Return the newcomers that differ from old ranks, if all pairs of old ranks agree.

    >>> def by_rank(*sums):  # as for `wrong_ranks`
    ...     return [ComputedSums((0, 1, 2), {0: mine}, {0: theirs}) for mine, theirs in sums]
    >>> wrong_newcomers(by_rank((5, 6), (6, 9), (7, 4)), {2})
    (2,)
    >>> wrong_newcomers(by_rank((5, 8), (6, 9), (7, 4)), {2})  # old ranks differ
    ()
    """
    wrong, num_agreeing = set[int](), 0
    for rank, mine in enumerate(ranks):
        following = mine.replicas[(mine.replicas.index(rank) + 1) % len(mine.replicas)]
        theirs = ranks[following].computed
        differ = any(_differ(mine.checked, theirs, place) for place in {*mine.checked, *theirs})
        new = newcomers & {rank, following}
        if differ and not new:
            return ()
        num_agreeing += not differ and not new
        wrong |= new if differ else set()
    return tuple(sorted(wrong)) if num_agreeing else ()


class CheckedSteps(NamedTuple):
    """The steps in which gradients are checked, while the members stay the same.

    Attributes:
        every: Number of steps between two checks; 0 for none.
        newcomers: Members that have joined a running training; their first step is checked, too.
    """

    every: int = 0
    newcomers: frozenset[int] = frozenset()

    @property
    def are_exact(self) -> bool:
        """Whether all bits are compared, not only numbers with a tolerance for rounding errors."""
        return bool(self.every)

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
        checked: Checksums of what this rank has computed for the next replica's micro-batch, by
            place in the order of computation; None outside of a check.
    """

    def __init__(self, steps: CheckedSteps) -> None:
        self.steps = steps
        self.checked: Mapping[int, float] | None = None
        self._num_failed = 0  # checks of this step after which no rank has left

    def is_next(self, num_steps: int, num_ranks: int, num_shards: int) -> bool:
        """Return whether each rank must now compute the next rank's micro-batch, for a check."""
        return self.checked is None and self.steps.is_due(num_steps, num_ranks, num_shards)

    def end(self) -> None:
        """Record that the checked step is complete."""
        if self.checked is not None:
            self.steps = self.steps.without_newcomers()
        self.checked, self._num_failed = None, 0

    def find_wrong(
        self, group: Group, sums: ComputedSums, step: int, *, can_lose: bool
    ) -> tuple[int, ...] | None:
        """Return the ranks that must leave, or None if all ranks agree; a collective.

        If ranks differ, the caller must repeat the step, also if no rank must leave.

        Args:
            group: All ranks.
            sums: Checksums of this rank.
            step: Number of the step.
            can_lose: Whether the run can continue without a rank.

        Raises:
            MismatchError: The check of this step has failed several times, and no rank has left.
        """
        newcomers = self.steps.newcomers
        answers = [ComputedSums(*answer) for answer in group.objects.all_gather(tuple(sums))]
        exact = self.steps.are_exact
        wrong = wrong_ranks(answers, newcomers) if exact else wrong_newcomers(answers, newcomers)
        if not wrong:
            return None
        if group.rank in newcomers.intersection(wrong):
            LOG.warning(
                "this rank has joined, and computes other gradients than the other ranks in step "
                "%d: the program keeps state that a new rank does not get, such as a counter or "
                "an average; add it to the further objects of the training, or compute it from "
                "num_steps (or this host computes wrongly)",
                step,
            )
        if (can_lose and len(wrong) == 1) or newcomers.issuperset(wrong):
            return wrong[:1]  # two could have the only copies of a part; the other is checked again
        self._num_failed += 1
        number_of = group.context.health.number
        numbers = " and ".join(str(number_of(rank)) for rank in wrong)
        text = (
            f"gradients of {'rank' if len(wrong) == 1 else 'ranks'} {numbers} differ between "
            f"replicas for the same micro-batch of step {step}"
        )
        if self._num_failed > MOST_FAILED_CHECKS:
            msg = (
                f"{text}, {self._num_failed} times: a host of these ranks computes wrongly, or the "
                "model draws random numbers that are not torch's"
            )
            raise MismatchError(msg)
        if not group.rank:
            LOG.warning("%s: the step is repeated; check the hosts if they differ again", text)
        return ()


def times_slower(seconds: Sequence[float], rank: int, peers: Sequence[int]) -> float:
    """Return the seconds of a rank, divided by the median of its peers; 0 without peers."""
    others = [seconds[peer] for peer in peers if peer != rank]
    typical = median(others) if others else 0.0
    return seconds[rank] / typical if typical else 0.0


def slow_rank(
    seconds: Sequence[float], factor: float, replicas: Sequence[Sequence[int]]
) -> int | None:
    """Return the rank with steps `factor` times as long as the steps of its peers, or None.

    Args:
        seconds: Seconds that each rank has computed.
        factor: Least ratio of the slowest rank's seconds to the median of its peers.
        replicas: By rank, the ranks at the same place in all replicas, which do equal work.

    >>> slow_rank([1.0, 1.1, 3.0], 2.0, [(0, 1, 2)] * 3), slow_rank([1.0, 1.9], 2.0, [(0, 1)] * 2)
    (2, None)
    >>> slow_rank([1.0, 5.0, 2.5, 5.0], 2.0, [(0, 2), (1, 3)] * 2)  # of stages 0, 1, 0, 1
    2
    """
    ratios = [times_slower(seconds, rank, peers) for rank, peers in enumerate(replicas)]
    slowest = max(ratios)
    return ratios.index(slowest) if slowest > factor else None
