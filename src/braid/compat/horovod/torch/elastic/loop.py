"""`hvd.elastic.run`: a training function that continues when ranks die or join.

    sync --> func ---------------------------------------------------> result
      ^        |  HorovodInternalError: a rank was lost    HostsUpdatedInterrupt: a rank joins
      |        v                                           |
      |     join the next epoch  <-------------------------+
      |        |  all members exchange reports
      +-- the last commit that all members have; the current state if no operation has failed

In Horovod each member decides alone: an interrupted member keeps its current state, and a member
with a failed operation restores its commit. Then some members can wait in `sync` for members that
skip it. Here each member decides after it has received the reports of all members.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from braid.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from braid.compat.horovod.torch.elastic.members import (
    NEVER,
    ElasticMembers,
    MemberReport,
    SessionMembers,
)
from braid.compat.horovod.torch.elastic.state import State
from braid.errors import CommError

__all__ = ["adopt", "run", "train_with"]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function so that it is elastic.

    The function is called again after each change of the members, with the state of the last commit
    if a rank was lost. It must continue from the position in the state. Ranks change only under
    `horovodrun --min-np` or `braid run --min-ranks`; otherwise errors of the function are raised.

    Args:
        func: Function of a state and further arguments.

    Raises:
        HorovodInternalError: An operation failed and the members cannot change; or it failed twice
            with the same members, without a commit in between.
        CommError: Too few ranks remain, or the members have changed too often.
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return train_with(SessionMembers(), state, lambda: func(state, *args, **kwargs))

    return wrapper


def train_with(members: ElasticMembers, state: State, func: Callable[[], R]) -> R:
    """Call a training function until it returns; see `run`.

    Args:
        members: Ranks of the training.
        state: State of the training.
        func: Training function without arguments.
    """
    state.members = members
    try:
        return _Training(members, state).run(func)
    finally:
        state.members = None


class _Training:
    """One call of an elastic function on this rank."""

    def __init__(self, members: ElasticMembers, state: State) -> None:
        self._members = members
        self._state = state
        self._has_begun = False
        self._failed_with: tuple[int, ...] = ()  # members of the last epoch with a failure

    def run(self, func: Callable[[], R]) -> R:
        members, state = self._members, self._state
        needs_sync = self._join(MemberReport(NEVER)) if members.is_newcomer else True
        while True:
            try:
                if needs_sync:
                    state.sync()
                self._has_begun = True
                return func()
            except (HorovodInternalError, CommError):
                if not members.may_change or self._fails_again():
                    raise
                self._failed_with = members.numbers
                report = MemberReport(state.num_commits, state.candidate)
            except HostsUpdatedInterrupt as update:
                report = MemberReport(state.num_commits, NEVER, True, update.skip_sync)
            needs_sync = self._join(report)

    def _fails_again(self) -> bool:
        """Return whether the same members have failed before, without a commit in between."""
        again = self._failed_with == self._members.numbers and not self._state.has_committed
        self._failed_with, self._state.has_committed = self._members.numbers, False
        return again

    def _join(self, report: MemberReport) -> bool:
        """Join the next epoch that begins without a loss; return whether to synchronize."""
        state = self._state
        while True:
            with contextlib.suppress(HorovodInternalError):  # a further loss
                reports = self._members.join_next(report)
                needs_sync = adopt(state, report, reports)
                report = MemberReport(state.num_commits)  # if a function fails
                if self._has_begun:
                    state.on_reset()
                return needs_sync


def adopt(state: State, report: MemberReport, reports: Sequence[MemberReport]) -> bool:
    """Restore the state from which all members continue; return whether they must call `sync`.

    Args:
        state: State of this member.
        report: Report of this member.
        reports: Reports of all members, in the order of ranks.

    Raises:
        CommError: All members with the state of the last commit are lost.
    """
    first = reports[0]
    target = max(other.num_commits for other in reports)
    if target < state.base:  # only members in `sync` remain, which may have all of the state
        target = first.candidate
    if target < state.base or target not in {first.num_commits, first.candidate}:
        msg = (
            f"the state after commit {state.base} is lost, because all ranks with this state "
            "have ended: start again from a checkpoint"
        )
        raise CommError(msg)
    state.base = target
    keeps = all(other.is_live for other in reports if other.num_commits != NEVER)
    if report.candidate == target != NEVER:
        state.save()
        state.num_commits = target
    elif not (keeps and report.is_live):
        state.restore()
    state.candidate = NEVER
    return not all(other.is_live and other.skips_sync for other in reports)
