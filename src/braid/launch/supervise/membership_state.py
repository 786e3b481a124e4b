"""State machine of the members of an elastic run: events in, orders out.

Problem: when a rank dies or comes, all others must go on with the same members from the same step.
If each decided for itself, there would be two groups that wait for each other, or two histories.

Idea: training is a sequence of *epochs*, each with fixed members. The launcher alone begins an
epoch: it knows of each death from the kernel, so no vote is needed. It does so when all living
members of the last epoch have reported that they are *ready*: at the end of a step, or after a loss
has interrupted a step. Processes that have joined meanwhile also report ready and become members.

    event           while                             orders
    Ready           not all that live are ready       -
    Ready           all that live are ready           Begin: epoch + 1, the ready ones as members
    Ready           it is a newcomer, and there is    Pause: members get ready after their step
                    room for it
    Lost            restarts are left                 Replace: start another process
    Lost            the others are ready              Begin
    Ready           no living process has the state   GiveUp: the run is over; or Begin, if a
                                                      checkpoint was saved
    Finished        it was the last member            Dismiss: processes that wait may end
    Slots           there are more than processes     Replace
    Slots           there are fewer than members      Pause, then Dismiss: the newest ones of
                    on a host                         the host

Safety, whatever the order of events, also when they are delayed or doubled:

* One history: an epoch begins once, with one list of members, and after every member of the epoch
  before it is ready, lost or finished. So a minority never goes on by itself.
* No step is lost: some member of an epoch has the newest state of all members of the epoch before
  it that are not lost. If none of them has the state, the run is over, or the members begin with
  the last checkpoint of the training. It is not over while a member has the state, unless
  `can_lose` was false for a loss.
* A process that was lost or dismissed is never a member again. All others stay members, unless
  they lose their slot. Then the newest ones go, or those on a host with fewer slots, and wait for a
  slot or are dismissed.
* There are between `min_ranks` and `max_ranks` members, unless some have finished; two while the
  state moves from one slot to another. Slots that a run loses do not make it smaller than
  `min_ranks`: members without a slot stay until others come.
* If no member with the state has a slot, one without a slot stays for an epoch more, with those
  that come, also beside a single slot. So the state moves from hosts that go away to hosts that
  come.
* Once a member has finished, no process becomes a member or replaces a lost one. Once all members
  have finished, the processes that wait are dismissed.
* When all events have arrived, all members are in the last epoch, and other processes without a
  slot are dismissed.

Ranks with roles, such as servers and workers, never report ready: there is no epoch, and a loss
gives a Replace, until the ranks that no process can replace have finished.

Source: membership by epochs as in Birman and Joseph, "Exploiting virtual synchrony in distributed
systems" (1987), with a central manager; the launcher is the manager.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from braid.launch.process.job import ElasticLimits

__all__ = ["Begin", "Dismiss", "GiveUp", "MembershipState", "Order", "Pause", "Replace"]

NO_EPOCH = -1


class Begin(NamedTuple):
    """Instruction: begin an epoch, in which these are the members.

    Attributes:
        epoch: Number of the epoch, from 0.
        members: Ranks, in the order of the group.
        num_steps: Number of training steps in each member's state; -1 for a member without state.
        checkpoint_step: Number of steps in the checkpoint with which all members begin, as no
            process has the state; -1 if some have it.
    """

    epoch: int
    members: tuple[int, ...]
    num_steps: tuple[int, ...]
    checkpoint_step: int = -1


class Pause(NamedTuple):
    """Instruction: ask members to stop after their step, so that the members can change."""

    members: tuple[int, ...]


class Replace(NamedTuple):
    """Instruction: start another process, at the latest when `is_recovering` ends."""


class Dismiss(NamedTuple):
    """Instruction: notify waiting processes that the run does not need them."""

    ranks: tuple[int, ...]


class GiveUp(NamedTuple):
    """Instruction: end the run, since the training state is lost or too few ranks are left."""

    members: tuple[int, ...]
    reason: str


Order: TypeAlias = Begin | Pause | Replace | Dismiss | GiveUp


class MembershipState:
    """Decides which ranks are members of an elastic run; see the module.

    Args:
        limits: Numbers of ranks, and of restarts.
        num_ranks: Number of members to begin with.

    Raises:
        ConfigError: The number is outside of the limits.

    Attributes:
        epoch: Number of the present epoch; -1 before the first one.
        members: Members of the present epoch, without ranks that were lost or have finished.
        has_trained: Whether members have finished a step in the present epoch, so that each of them
            has received its part of the state, and the copies of other parts.
        has_finished: Whether a member has done its work, so that no more processes are started.
        checkpoint_step: Number of steps in the last checkpoint of the training; -1 without one.
    """

    def __init__(self, limits: ElasticLimits, num_ranks: int) -> None:
        self.epoch = NO_EPOCH
        self.members: tuple[int, ...] = ()
        self.has_trained = self.has_finished = False
        self.checkpoint_step = -1
        self._limits = limits.with_ranks(num_ranks)
        self._num_ranks = num_ranks
        self._alive: set[int] = set()
        self._leaving: set[int] = set()  # processes that have no slot any more
        self._ready: dict[int, int] = {}  # rank -> steps that its state has seen
        self._is_ending = False
        self._counts_steps = False  # whether `trained` has been called
        self._is_recovering = False
        self._last_lost = -1
        self._most_steps = -1  # that any member has reported
        self._restarts_left = limits.restarts
        self._num_to_start = num_ranks + limits.spares
        self._num_wanted = self._num_to_start  # processes
        self._num_places = num_ranks  # of members: spares wait until one is lost

    @property
    def is_over(self) -> bool:
        """Whether all members have finished, so that no more are needed."""
        return self.has_finished and not self.members

    @property
    def restarts_left(self) -> int:
        """Number of processes that may still be started to replace lost processes."""
        return self._restarts_left

    @property
    def can_replace(self) -> bool:
        """Whether a process would be started to replace a lost process."""
        return self._restarts_left > 0 and not self.has_finished

    @property
    def is_recovering(self) -> bool:
        """Whether members go on after a loss, and none of them has finished a step since.

        The start of a process takes processor time from them, so a `Replace` should wait.
        """
        return self._is_recovering and len(self.members) >= self._limits.min_ranks

    @property
    def alive(self) -> Collection[int]:
        """Processes that the run has started, and neither lost nor dismissed."""
        return self._alive

    @property
    def missing(self) -> tuple[int, ...]:
        """Members that are not ready for a change of members, while other members wait for it."""
        if not self._ready.keys() & set(self.members):
            return ()
        return tuple(member for member in self.members if member not in self._ready)

    def is_outside(self, rank: int) -> bool:
        """Return whether a process is not a member, while other processes train."""
        return self.epoch != NO_EPOCH and rank not in self.members

    def can_lose(self, rank: int) -> bool:
        """Return whether the run can go on without a rank that is about to be lost."""
        if self.has_finished and self.members != (rank,):
            return True
        others = self._alive - {rank}
        has_state = self.epoch == NO_EPOCH or others.intersection(self.members)
        to_come = self._num_to_start + self._restarts_left
        is_enough = len(others) + to_come >= self._limits.min_ranks
        if not (others and has_state):
            return is_enough and self.checkpoint_step >= 0 and not self.has_finished
        return is_enough or self._limits.gains_slots

    def can_spare(self, rank: int) -> bool:
        """Return whether the other members lose no step if they lose this member now."""
        return self.has_trained and rank in self.members and self.can_lose(rank)

    def trained(self, rank: int) -> None:
        """Record that a process has finished a training step."""
        self.has_trained |= rank in self.members
        self._counts_steps = True
        self._is_recovering &= self._is_ending or rank not in self.members

    def started(self, rank: int) -> list[Order]:
        """Record that a process was started; return the orders that follow."""
        self._alive.add(rank)
        self._num_to_start -= 1
        return [Dismiss((rank,))] if self.is_over else []

    def ready(self, rank: int, epoch: int, num_steps: int) -> list[Order]:
        """Record that a process waits for the next change of members; return the orders.

        Args:
            rank: The process.
            epoch: Epoch that the process is a member of; -1 if none.
            num_steps: Number of training steps in the process's state; -1 without state.
        """
        expected = self.epoch if rank in self.members else NO_EPOCH
        if rank not in self._alive or epoch != expected:
            return []  # sent before this epoch began, or by a process that has died
        self._ready[rank] = num_steps
        self._most_steps = max(self._most_steps, num_steps)
        return self._next()

    def lost(self, rank: int) -> list[Order]:
        """Record that the run goes on without a process that died or leaves; return the orders."""
        if rank not in self._alive:
            return []
        if rank in self.members:
            self._is_ending = True  # the others get ready by themselves
            self._is_recovering |= self._counts_steps
            self._last_lost = rank
        self._remove(rank)
        has_state = self.epoch == NO_EPOCH or bool(self.members) or self.has_finished
        if not has_state and self.checkpoint_step < 0:
            return self._end_for_good()
        orders: list[Order] = []
        num_wanted = max(self._num_wanted, self._limits.min_ranks)
        needed = self._num_staying < num_wanted
        if needed and self.can_replace:
            self._restarts_left -= 1
            self._num_to_start += 1
            orders.append(Replace())
        num_left = len(self._alive) + self._num_to_start
        is_final = not self.has_finished and not self._limits.gains_slots
        if num_left < self._limits.min_ranks and is_final:
            return self._end_for_good()
        return orders + self._next()

    def _end_for_good(self) -> list[Order]:
        members = f"{len(self.members)} of at least {self._limits.min_ranks} members are left"
        reason = f"rank {self._last_lost} was lost, and {members}"
        return [GiveUp(tuple(sorted(self._alive)), reason)] if self._alive else []

    def slots(self, num_slots: int, leaving: Collection[int] = ()) -> list[Order]:
        """Record the slots of the run; return the orders that follow.

        Args:
            num_slots: Number of members, without spares, that may run.
            leaving: Processes that have no slot any more, because their host has fewer.
        """
        limits = self._limits
        self._leaving = self._alive.intersection(leaving)
        num_slots = min(num_slots, limits.max_ranks)
        self._num_wanted = num_slots + limits.spares
        self._num_places = max(num_slots, limits.min_ranks)
        if self.has_finished:
            return []
        missing = max(0, self._num_wanted - self._num_staying)
        self._num_to_start += missing
        return [Replace()] * missing + self._next()

    def finished(self, rank: int) -> list[Order]:
        """Record that a process has ended with exit code 0; return the orders that follow.

        A member has then done its work.
        """
        was_member = rank in self.members
        self._remove(rank)
        self.has_finished |= was_member
        if self.is_over and was_member:
            return [Dismiss(tuple(sorted(self._alive)))]
        return self._next()

    def close(self) -> None:
        """Record that the work is done, so that no more processes are started."""
        self.has_finished = True

    @property
    def _num_staying(self) -> int:
        return len(self._alive - self._leaving) + self._num_to_start

    def _remove(self, rank: int) -> None:
        self._alive.discard(rank)
        self._leaving.discard(rank)
        self._ready.pop(rank, None)
        self.members = tuple(member for member in self.members if member != rank)

    def _next(self) -> list[Order]:
        newcomers = sorted(self._ready.keys() - set(self.members))
        if self.epoch == NO_EPOCH:
            return self._first(newcomers)
        ready = (*self.members, *newcomers)
        members = self._choice(ready)
        if any(member not in self._ready for member in self.members):
            return self._pause(members, newcomers)
        if self.has_finished or (not self.members and self.checkpoint_step < 0):
            return [self._begin(self.members)] if self.members else []
        has_state = any(self._ready[member] >= 0 for member in self.members)
        if not has_state and (self._most_steps >= 0 or not self.members):
            return self._begin_from_checkpoint(members, ready)
        if len(members) < self._limits.min_ranks:
            return self._wait_for_newcomers()
        return self._begin_with(members, ready)

    def _pause(self, members: tuple[int, ...], newcomers: Sequence[int]) -> list[Order]:
        """Pause the members that train if the next epoch is to have other members."""
        if self._is_ending or self.has_finished:
            return []
        if members == self.members:
            return self._dismiss(newcomers)
        self._is_ending = True
        return [Pause(self.members)]

    def _begin_from_checkpoint(self, members: tuple[int, ...], ready: Sequence[int]) -> list[Order]:
        """Begin with the last checkpoint when all processes that are to come are ready."""
        if self.checkpoint_step < 0:
            reason = f"rank {self._last_lost} was lost, the last one with the state of the training"
            return [GiveUp(self.members, reason)]
        is_complete = len(ready) == len(self._alive) and not self._num_to_start
        least = self._limits.min_ranks if is_complete else self._num_places
        if len(members) < least:
            return self._wait_for_newcomers()
        self._most_steps = -1
        self._ready = dict.fromkeys(self._ready, -1)  # also of one that had no slot, and is behind
        return self._begin_with(members, ready)

    def _wait_for_newcomers(self) -> list[Order]:
        self._is_recovering = False  # the members only wait, so processes start now
        return []

    def _begin_with(self, members: tuple[int, ...], ready: Sequence[int]) -> list[Order]:
        """Begin an epoch, and dismiss other processes that have no slot."""
        begin = self._begin(members)
        return [begin, *self._dismiss([r for r in ready if r not in members]), *self._next()]

    def _choice(self, ready: Sequence[int]) -> tuple[int, ...]:
        """Return the members of the next epoch, of the present ones and processes that are ready.

        Those without a slot are members only if there are too few others, or if none of the others
        has the newest state.
        """
        newest = max((self._ready.get(member, -1) for member in self.members), default=-1)
        holders = [m for m in self.members if self._ready.get(m, newest) == newest]
        leaving = self._leaving.intersection(ready)
        slots = sorted(ready, key=lambda r: (r in leaving, r in leaving and r not in holders))
        count = max(len(ready) - len(leaving), self._limits.min_ranks)
        chosen = slots[: min(count, self._num_places)]
        if holders and not set(holders).intersection(chosen):
            chosen = [*chosen[: max(self._num_places - 1, 1)], holders[0]]
        return tuple(rank for rank in ready if rank in chosen)

    def _dismiss(self, waiting: Sequence[int]) -> list[Order]:
        """Dismiss processes that wait: those that have no slot any more, then the newest ones."""
        num_wanted = max(self._num_wanted, self._num_places)
        leaving = [rank for rank in waiting if rank in self._leaving]
        staying = [rank for rank in waiting if rank not in self._leaving]
        excess = min(len(staying), max(0, len(self._alive - self._leaving) - num_wanted))
        ranks = (*staying[len(staying) - excess :], *leaving)
        for rank in ranks:
            self._remove(rank)
        return [Dismiss(ranks)] if ranks else []

    def _first(self, ready: list[int]) -> list[Order]:
        """Begin the first epoch with all ranks; with fewer when no more will come."""
        founders = {rank for rank in self._alive if rank < self._num_ranks}
        if self._num_to_start or not founders.issubset(ready):
            return []
        members = tuple(ready[: self._num_ranks])
        is_complete = len(members) == self._num_ranks or len(ready) == len(self._alive)
        if not is_complete or len(members) < self._limits.min_ranks:
            return []
        return [self._begin(members), *self._next()]

    def _begin(self, members: tuple[int, ...]) -> Begin:
        self.epoch += 1
        self.members = members
        self._is_ending = False
        self.has_trained = False
        num_steps = tuple(self._ready.pop(member) for member in members)
        checkpoint_step = self.checkpoint_step if max(num_steps) < 0 else -1
        return Begin(self.epoch, members, num_steps, checkpoint_step)
