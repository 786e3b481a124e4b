"""Members of an elastic run: the interface that `loop` and `state` use."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from braid import context
from braid.compat.horovod.common.exceptions import translated
from braid.compat.horovod.common.process_sets import ProcessSet, renew_process_sets
from braid.compat.horovod.session import renew, session, started
from braid.compat.horovod.torch.differentiable import allreduce_
from braid.compat.horovod.torch.reductions import Max
from braid.errors import CommError

__all__ = ["NEVER", "ElasticMembers", "MemberReport", "SessionMembers"]

NEVER = -1  # number of a commit that has not been made
UPDATE = "braid.elastic.update"
JOINING_S = 600.0  # timeout for all members of an epoch to connect


class MemberReport(NamedTuple):
    """Report of a member about its state, which all members exchange at a change of members.

    Attributes:
        num_commits: Number of the commit that the member has saved; -1 without one.
        candidate: Number of the commit that the member's current state becomes if all members have
            reached that commit; -1 without one.
        is_live: Whether the member's current state is valid, since no operation has failed.
        skips_sync: Whether the member's state needs no synchronization.
    """

    num_commits: int
    candidate: int = NEVER
    is_live: bool = False
    skips_sync: bool = False


class ElasticMembers(Protocol):
    """Interface of the members of an elastic training; they are the same within an epoch."""

    @property
    def may_change(self) -> bool:
        """Whether another epoch (period with the same members) can follow, with other members."""

    @property
    def is_newcomer(self) -> bool:
        """Whether this process is new, and the other members have not accepted it."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number that the launcher gave each member, in the order of ranks."""

    def agree_on_update(self) -> bool:
        """Return whether members are about to change; a collective with the same result on all.

        Raises:
            HorovodInternalError: A member was lost.
        """

    def join_next(self, report: MemberReport) -> list[MemberReport]:
        """Join the next epoch (period with the same members); return the reports of its members.

        Raises:
            HorovodInternalError: A member of that epoch was lost: call this again for the next.
            CommError: No epoch follows.
        """


class SessionMembers:
    """Members that are the ranks of the job of `hvd.init()`; see `ElasticMembers`."""

    def __init__(self) -> None:
        current = session()
        self.may_change = bool(current.job.elastic)
        self.numbers = tuple(range(current.group.size))
        self._environment = current.environment
        self._sets: list[ProcessSet] = []
        self._num_resets = 0

    @property
    def is_newcomer(self) -> bool:
        """Whether the other members have not accepted this process yet."""
        return self.may_change and context.membership().is_newcomer

    @property
    def _is_exhausted(self) -> bool:
        limit = self._environment.reset_limit
        return limit is not None and self._num_resets >= limit and not self.is_newcomer

    def agree_on_update(self) -> bool:
        """Return False, as fixed members never change; see `ElasticMembers`."""
        if not self.may_change:
            return False
        # at the limit a new process waits, so that it does not end a run without failures
        pauses = context.membership().pauses and not self._is_exhausted
        return bool(allreduce_(torch.tensor([int(pauses)]), name=UPDATE, op=Max).item())

    def join_next(self, report: MemberReport) -> list[MemberReport]:
        """Join the next epoch, and return all members' reports; see `ElasticMembers.join_next`."""
        if self._is_exhausted:
            limit, health = self._environment.reset_limit, context.membership().context.health
            losses = [loss for loss in health.lost.values() if not loss.departed]
            lost = ", ".join(f"rank {health.number(loss.rank)} {loss.reason}" for loss in losses)
            msg = (
                f"{lost or 'an operation failed'}, and the run ends because the members have "
                f"already changed {self._num_resets} times (reset_limit={limit}): pass a larger "
                "--reset-limit"
            )
            raise CommError(msg)
        if started():  # otherwise the last epoch has ended before its session began
            self._sets = session().added_sets
        limit_s = None if self.is_newcomer else self._environment.elastic_timeout_s
        epoch = renew(report.num_commits, JOINING_S, limit_s)
        self.numbers, self._num_resets = epoch.members, epoch.epoch
        renew_process_sets(self._sets)
        with translated():
            gathered = session().group.objects.all_gather(tuple(report))
        return [MemberReport(*values) for values in gathered]
