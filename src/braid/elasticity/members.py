"""The ranks of an elastic training, epoch by epoch.

The training knows its launcher by this face only; tests have another one, on threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, Protocol, TypeAlias, TypeVar

from braid import context
from braid.comm import Group
from braid.elasticity.weight_digest import NUM_STEPS
from braid.errors import CommError, CommTimeout, PeerLostError
from braid.runtime.rendezvous import Resumable

__all__ = [
    "JobMembers",
    "Members",
    "leave_if_asked",
    "leavers_of",
    "notices",
    "on_trial",
    "require_change",
]

T = TypeVar("T")
Weights: TypeAlias = Callable[[int], Mapping[str, float]]

LOG = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1


class Members(Protocol):
    """The ranks of a training; an epoch is a period in which they do not change.

    Attributes:
        leaves: Whether this process has been asked to end after its step.
        number: Number of the training in this process, counted from 1.
    """

    leaves: bool
    number: int

    @property
    def group(self) -> Group:
        """Group of the current members."""

    @property
    def may_change(self) -> bool:
        """Whether another epoch (period with the same members) can follow, with other members."""

    @property
    def can_lose(self) -> bool:
        """Whether the training could continue without one member when this epoch began."""

    @property
    def has_lost_launcher(self) -> bool:
        """Whether members cannot change any more, since the launcher has ended."""

    @property
    def is_last_epoch(self) -> bool:
        """Whether the members have agreed on this epoch without the launcher, to save and end."""

    @property
    def checkpoint_step(self) -> int:
        """Number of steps in the checkpoint with which all members begin; -1 if some have state."""

    @property
    def is_newcomer(self) -> bool:
        """Whether this process is new and has not been admitted by the other members."""

    @property
    def pauses(self) -> bool:
        """Whether members have been asked to call `next_epoch` after their step."""

    def finished_step(self, num_steps: int, weights: Weights | None) -> None:
        """Report that this process has finished a step, for `braid status` and `braid chaos`.

        Args:
            num_steps: Number of steps so far.
            weights: Returns a digest of this process's share of the weights after these steps; None
                if the weights depend on the number of ranks.
        """

    def can_resume(self, num_steps: int, *, is_saved: bool) -> None:
        """Report, on the first member, a checkpoint with which new processes could begin.

        Args:
            num_steps: Number of steps in the checkpoint.
            is_saved: Whether this training has saved it; otherwise it has begun with it.
        """

    def leave(self, num_steps: int, reason: str) -> NoReturn:
        """End this process; the other members continue without it in the next epoch.

        Args:
            num_steps: See `next_epoch`.
            reason: Rest of a sentence for the user, such as "was asked to end".

        Raises:
            SystemExit: Always.
        """

    def offer_to_leave(self, num_steps: int, reason: str) -> None:
        """Ask the launcher to continue without this process; all members then call `next_epoch`.

        If the run can still continue without it, `next_epoch` ends this process with SystemExit.

        Args:
            num_steps: See `next_epoch`.
            reason: See `leave`.
        """

    def next_epoch(self, num_steps: int, directory: str = "") -> list[int]:
        """Join the next epoch (period with the same members); every member calls it.

        Args:
            num_steps: Number of steps that this process's state includes; -1 without state.
            directory: Directory of checkpoints that all members see, in which they agree on a last
                epoch if the launcher has ended; empty for none.

        Returns:
            `num_steps` of each member of the next epoch.

        Raises:
            SystemExit: The run continues without this process.
        """


def require_change(members: Members, error: CommError) -> None:
    """Raise `error`, unless a member was lost and the remaining members can continue."""
    has_lost = isinstance(error, PeerLostError) or type(error) is CommError  # it left the group
    if not (has_lost and members.may_change):
        raise error
    link: BaseException | None = error
    while link is not None:  # frames hold graphs, whose hooks may hold the error: for good
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


@contextmanager
def notices(members: Members) -> Iterator[None]:
    """In the block, treat SIGTERM and the end of the launcher as requests to leave after the step.

    Outside of the block, the kernel kills this process when its launcher ends (`exec_shim`). In it,
    the kernel sends SIGTERM, and the launcher's reaper ends a process that takes too long.
    """
    if not members.may_change or threading.current_thread() is not threading.main_thread():
        yield
        return

    parent = os.getppid()

    def on_signal(*_: object) -> None:
        members.leaves = True
        if os.getppid() != parent:
            _write_to_log()

    before = signal.signal(signal.SIGTERM, on_signal)
    _set_death_signal(signal.SIGTERM)
    try:
        yield
    finally:
        _set_death_signal(signal.SIGKILL)
        signal.signal(signal.SIGTERM, before)


def leave_if_asked(
    members: Members, part_names: Sequence[str], num_steps: int, *, leaves: bool
) -> None:
    """End this process if it was asked to end, and its peers have its part; a collective.

    If another member that leaves now has the only copy of the part, this process stays for one more
    epoch, in which a new copy is made.

    Args:
        members: The members.
        part_names: Names of the parts of the state that this process has.
        num_steps: See `Members.next_epoch`.
        leaves: Whether this process has been asked to end; a signal may change `members.leaves`.

    Raises:
        SystemExit: This process leaves.
    """
    group = members.group
    facts = group.objects.all_gather((leaves, part_names))
    is_last = not members.may_change or all(asked for asked, _ in facts)
    if leaves and (is_last or group.rank in leavers_of(facts)):
        members.leave(num_steps, "was asked to end")


def leavers_of(facts: Sequence[tuple[bool, Sequence[str]]]) -> set[int]:
    """Return the members that can leave together, so that the other members have all parts.

    Args:
        facts: By member: whether it was asked to end, and the names of its parts.

    >>> sorted(leavers_of([(True, ["a", "c"]), (True, ["b", "a"]), (False, ["c", "b"])]))
    [0]
    """
    staying = dict(enumerate(set(names) for _, names in facts))
    every = set().union(*staying.values())
    for rank, (leaves, _) in enumerate(facts):
        rest = [names for other, names in staying.items() if other != rank]
        if leaves and every == set().union(*rest):
            del staying[rank]
    return set(range(len(facts))) - staying.keys()


def on_trial(members: Members, join: Callable[[], T]) -> T:
    """Call `join` for a new process; if it fails, only the new process ends.

    If all members are new, as no process has the state, the error ends the run.
    """
    try:
        return join()
    except (PeerLostError, CommTimeout):
        raise
    except Exception:
        if members.checkpoint_step >= 0:
            raise
        with suppress(SystemExit):
            members.leave(-1, "cannot take part")
        raise


def _set_death_signal(signum: int) -> None:
    """Choose the signal that this process gets when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def _write_to_log() -> None:
    """Write output to the log of this rank from now on: the pipes have lost their reader."""
    environment = context.membership().environment
    log = Path(environment.log_dir) / f"rank{environment.rank}.log"
    fd = os.open(log if log.exists() else os.devnull, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


class JobMembers:
    """Members that are the ranks of the job of `braid.init()`."""

    leaves = False

    def __init__(self) -> None:
        member = context.membership()
        member.num_trainings += 1
        self.number = member.num_trainings
        self.takes_faults = member.environment.takes_faults

    @property
    def group(self) -> Group:
        """Group of the members in the current epoch; see `Members.group`."""
        return context.world()

    @property
    def may_change(self) -> bool:
        """Whether another epoch can follow; see `Members.may_change`."""
        return bool(context.membership().environment.elastic)

    @property
    def can_lose(self) -> bool:
        """Whether the launcher can continue without a member; see `Members.can_lose`."""
        return context.membership().can_lose

    @property
    def has_lost_launcher(self) -> bool:
        """Whether the launcher has ended; see `Members.has_lost_launcher`."""
        return context.membership().has_lost_launcher

    @property
    def is_last_epoch(self) -> bool:
        """Whether the members save and end; see `Members.is_last_epoch`."""
        return context.membership().num_agreements > 0

    @property
    def checkpoint_step(self) -> int:
        """Steps of the checkpoint with which all begin; see `Members.checkpoint_step`."""
        return context.membership().checkpoint_step

    @property
    def is_newcomer(self) -> bool:
        """Whether the other members have not accepted this process yet."""
        return context.membership().is_newcomer

    @property
    def pauses(self) -> bool:
        """Whether members must call `next_epoch` after their step; see `Members.pauses`."""
        return context.membership().pauses

    def finished_step(self, num_steps: int, weights: Weights | None) -> None:
        """Report that this process has finished a step; see `Members.finished_step`."""
        digest: dict[str, float] = {}
        if self.takes_faults and weights is not None and num_steps % NUM_STEPS == 0:
            epoch = context.membership().epoch  # a step may be done again
            digest = {"weights_training": self.number, "weights_epoch": epoch, **weights(num_steps)}
        context.log_step(num_steps, members=self.group.size, **digest)

    def can_resume(self, num_steps: int, *, is_saved: bool) -> None:
        """Report a checkpoint; see `Members.can_resume`."""
        control = context.membership().control
        if control is not None and not self.group.rank:
            control.send(Resumable(self.number, num_steps, is_saved))

    def leave(self, num_steps: int, reason: str) -> NoReturn:
        """End this process; the other members continue without it; see `Members.leave`."""
        member = context.membership()
        if member.has_lost_launcher:
            LOG.warning("the launcher is gone: this rank ends after step %d", num_steps)
            raise SystemExit(128 + signal.SIGTERM)
        if member.stop_reason:  # the whole run ends
            raise SystemExit(128 + signal.SIGTERM)
        member.leave_epochs(num_steps, reason)
        raise SystemExit(0)

    def offer_to_leave(self, num_steps: int, reason: str) -> None:
        """Ask the launcher to continue without this process; see `Members.offer_to_leave`."""
        context.membership().leave_epochs(num_steps, reason, is_offer=True)

    def next_epoch(self, num_steps: int, directory: str = "") -> list[int]:
        """Join the next epoch (period with the same members); see `Members.next_epoch`."""
        _, epoch = context.next_epoch(num_steps, directory=directory)
        return list(epoch.num_steps)
