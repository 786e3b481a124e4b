"""Passes the events of an elastic run's ranks to `MembershipState`, and executes its orders.

The number of a rank is never used again. A place is a host and a local rank there. A rank that
replaces another one has a new number, on the same host and with the same local rank. If a source of
slots names the hosts, a rank takes the first free slot of them.

Ranks with roles are expendable, as servers and workers are: they never report ready, so they have
no epochs, and a rank that replaces another one takes its role.

The start of a process takes some of the processor time with which the other members repeat their
step after a loss. So the process starts after this step, or after `LONGEST_WAIT_NS` if it is long.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

from braid.launch.process.job import ElasticLimits, JobSpec
from braid.launch.supervise.hang_monitor import MemberChanges
from braid.launch.supervise.journal import RunJournal
from braid.launch.supervise.membership_state import (
    Begin,
    Dismiss,
    GiveUp,
    MembershipState,
    Order,
    Pause,
    Replace,
)
from braid.launch.supervise.rank import Rank
from braid.launch.supervise.slots import SlotSource
from braid.runtime.clock import Clock
from braid.runtime.rendezvous import DISMISSED, NewEpoch, PauseTraining, Ready, Resumable, Stop

__all__ = ["MemberDriver"]

LONGEST_WAIT_NS = 2_000_000_000  # of a start: about the time of an import, which it adds to a join
JOIN_NOTICE_NS = 60_000_000_000  # an import takes seconds, a connection far less
ENDING = "a rank has failed, or the run was stopped"


class ElasticRun(Protocol):
    """Interface of an elastic run that `MemberDriver` uses."""

    @property
    def ranks(self) -> Mapping[int, Rank]:
        """Ranks by number, also those that have ended."""

    @property
    def journal(self) -> RunJournal:
        """Journal that shows and logs changes of the members."""

    @property
    def is_running(self) -> bool:
        """Whether nothing has ended the run so far."""

    def start_another(self) -> None:
        """Start one more rank."""

    def dismiss(self, rank: int) -> None:
        """End a rank that the run no longer needs."""

    def interrupt(self) -> None:
        """End the run as after SIGTERM."""


class MemberDriver:
    """Starts, replaces and removes the members of an elastic run.

    Args:
        job: The job.
        limits: Limits of the job.
        run: The run.
        clock: Time source.
        slots: Source of the number of ranks; None if the number is fixed.

    Attributes:
        state: State machine that decides which ranks are members.
        changes: Changes of the members so far, for hang reports.
        resume: Checkpoint with which new processes begin; the last one of the training if empty.
        leaving: Ranks that were asked to leave, which decide among themselves when they do.

    Raises:
        ConfigError: The number of ranks is outside of the limits.
    """

    def __init__(
        self,
        job: JobSpec,
        limits: ElasticLimits,
        run: ElasticRun,
        clock: Clock,
        slots: SlotSource | None,
    ) -> None:
        self.state = MembershipState(limits, job.num_ranks)
        self.changes = MemberChanges()
        self.resume = job.resume
        self.leaving: set[int] = set()
        self._training = 0  # which has saved the last checkpoint
        self._job = job
        self._run = run
        self._clock = clock
        self._slots = slots
        self._places = list(range(job.num_ranks + limits.spares))  # that no process has
        self._lost_roles: list[int] = []  # places that new processes take, in the order of losses
        self._num_spares = limits.spares
        self._leave_together = limits.gains_slots
        self._is_moving = False  # whether members without a slot have not left yet
        self._place_of: dict[int, int] = {}
        self._host_of: dict[int, str] = {}  # in a run with a source of slots
        self._has_roles = bool(job.expendable)
        # ranks with roles that no process can replace
        self._needed = set(range(job.num_ranks)) - job.expendable if job.expendable else set()
        self._missing: tuple[int, ...] = ()  # members for which others wait
        self._missing_ns: int | None = None  # since then; None if they have been named
        self._waiting_ns: list[int] = []  # when to start processes, even if members still recover
        self._joining_ns: dict[int, int] = {}  # when processes were started that are not ready yet

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due; None while there is no such time."""
        due = [] if self._slots is None else [self._slots.deadline_ns]
        if (missing_ns := self._missing_deadline_ns) is not None:
            due.append(missing_ns)
        due += self._waiting_ns[:1]
        due += [start_ns + JOIN_NOTICE_NS for start_ns in self._joining_ns.values()]
        return min(due, default=None)

    def poll(self) -> None:
        """Start processes, check the slots of ranks, and notify the user of late ranks."""
        self._start_waiting()
        self._name_missing()
        self._name_late()
        if self._slots is None:
            return
        has_changed, notice = self._slots.poll()
        if notice:
            self._run.journal.notice(notice)
        if has_changed or (self._is_moving and self.state.has_trained):
            self._update_slots(self._slots.hosts)

    def take_place(self, rank: int) -> tuple[int, str]:
        """Return the place of a rank to be started, on its `host_of`, and its role in the run."""
        if self._slots is not None:
            return self._take_slot(rank, self._slots.hosts)
        if self._has_roles:
            is_first = rank < self._job.num_ranks
            self._place_of[rank] = rank if is_first else self._lost_roles.pop(0)
            return self._place_of[rank], "" if is_first else "newcomer"
        place = self._place_of[rank] = heapq.heappop(self._places)
        replaces = self.state.epoch < 0 and place != rank
        is_founder = rank < self._job.num_ranks or replaces
        return place, "founder" if is_founder else "newcomer"

    def host_of(self, rank: int) -> str:
        """Return the host for a rank with a place; empty if the backend chooses it."""
        return self._host_of.get(rank, "")

    def started(self, rank: int) -> None:
        """Record that the process of a rank was started."""
        place = self._place_of.get(rank, rank)
        if self._has_roles and place != rank:
            self.changes.successors[place] = rank
            num_left = f"restarts left: {self.state.restarts_left}"
            self._run.journal.notice(f"rank {rank} takes the role of rank {place}; {num_left}")
        elif self._job.hang_report_s and not self._has_roles:
            self._joining_ns[rank] = self._clock.now_ns()
        self._execute(self.state.started(rank))

    def received(self, process: Rank, message: Ready | Resumable) -> None:
        """Record that a process waits for the next members, leaves the run, or has a checkpoint."""
        if isinstance(message, Resumable):
            self.state.checkpoint_step, self._training = message.num_steps, message.training
            if message.is_saved:
                self.resume = ""
            return
        self._joining_ns.pop(process.rank, None)
        if not self._run.is_running:
            process.send(Stop(ENDING))
        elif message.is_offer and not self.state.can_lose(process.rank):
            self._run.journal.notice(
                f"{process.name} {message.leaves}, and stays, since the run cannot go on without "
                "it: look at its host, or allow another process with --restarts"
            )
            self._execute(self.state.ready(process.rank, message.epoch, message.num_steps))
        elif message.leaves:
            self._run.journal.notice(f"{process.name} {message.leaves}, and leaves the run")
            self._run.journal.note("left", rank=process.rank, text=message.leaves)
            self._free_place(process.rank)
            if self._slots is not None and process.host not in self._slots.hosts:
                self._update_slots(self._slots.hosts, process.rank)
            if message.is_offer:
                process.send(Stop(DISMISSED))
            self._execute(self.state.lost(process.rank))
            if not self.state.members and not self.state.is_over:
                self._run.interrupt()  # all members were asked to end
        else:
            if message.epoch < 0:
                self._run.journal.note("waiting", rank=process.rank)
            self._execute(self.state.ready(process.rank, message.epoch, message.num_steps))

    def ended(self, rank: int, *, has_finished: bool, was_dismissed: bool) -> None:
        """Record that the process of a rank has ended."""
        self._joining_ns.pop(rank, None)
        if not self._has_roles:
            self._free_place(rank)
        if self._slots is not None and not has_finished and not was_dismissed:
            host = self._run.ranks[rank].host
            self._slots.lost(host)
            if host not in self._slots.hosts:  # a new process would find no slot there
                self._update_slots(self._slots.hosts, rank)
        if has_finished and rank in self._needed:
            self._needed.remove(rank)
            if not self._needed:
                self.state.close()
        orders = self.state.finished(rank) if has_finished else self.state.lost(rank)
        if self._has_roles and Replace() in orders:  # else no process takes this role
            self._lost_roles.append(self._place_of[rank])
        self._execute(orders)

    def _execute(self, orders: Sequence[Order]) -> None:
        ranks = self._run.ranks
        for order in orders:
            if isinstance(order, Begin):
                self._begin(order)
            elif isinstance(order, Pause):
                for rank in order.members:
                    ranks[rank].send(PauseTraining())
            elif isinstance(order, GiveUp):
                for rank in order.members:
                    ranks[rank].send(Stop(order.reason))
            elif isinstance(order, Dismiss):
                for rank in order.ranks:
                    self._run.dismiss(rank)
                    ranks[rank].send(Stop(DISMISSED))  # a training takes the signal for a request
            elif self.state.is_recovering:
                self._waiting_ns.append(self._clock.now_ns() + LONGEST_WAIT_NS)
            elif self._run.is_running:
                self._run.start_another()
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start the processes that wait for members to recover, if they need not wait longer."""
        now_ns = self._clock.now_ns()
        while self._waiting_ns and (not self.state.is_recovering or now_ns >= self._waiting_ns[0]):
            self._waiting_ns.pop(0)
            if self._run.is_running and not self.state.has_finished:
                self._run.start_another()

    def _begin(self, order: Begin) -> None:
        """Notify the members of their epoch, and the user."""
        step = max(0, order.checkpoint_step, *order.num_steps)
        self.changes.epoch_ns = self._clock.now_ns()
        self._run.journal.note("epoch", epoch=order.epoch, members=order.members, num_steps=step)
        if order.epoch:
            members = ", ".join(map(str, order.members))
            text = f"epoch {order.epoch}: ranks {members} go on at step {step}"
            is_loaded = order.checkpoint_step >= 0
            self._run.journal.notice(text + ", with the last checkpoint" * is_loaded)
        can_lose = self.state.can_lose(order.members[0])  # any of them
        for rank in order.members:
            self._run.ranks[rank].send(NewEpoch(*order, self._training, can_lose))

    @property
    def _missing_deadline_ns(self) -> int | None:
        limit_s = self._job.hang_report_s
        if self._missing_ns is None or not limit_s:
            return None
        return self._missing_ns + round(limit_s * 1e9)

    def _name_missing(self) -> None:
        """Name members, once, that let others wait long with their next epoch."""
        missing = self.state.missing
        if missing != self._missing:
            self._missing = missing
            self._missing_ns = self._clock.now_ns() if missing else None
        deadline_ns = self._missing_deadline_ns
        if deadline_ns is None or self._clock.now_ns() < deadline_ns:
            return
        self._missing_ns = None
        for rank in missing:
            inside = self._run.ranks[rank].last_events()
            self._run.journal.notice(
                f"{self._run.ranks[rank].name} is not ready for the next epoch after "
                f"{self._job.hang_report_s:g} s, and the other members wait for it"
                f"{': it was last seen ' * bool(inside)}{inside}"
            )

    def _name_late(self) -> None:
        """Name processes, once, that are not ready to train long after their start."""
        now_ns = self._clock.now_ns()
        for rank, start_ns in list(self._joining_ns.items()):
            if now_ns >= start_ns + JOIN_NOTICE_NS:
                del self._joining_ns[rank]
                process = self._run.ranks[rank]
                inside = process.last_events()
                self._run.journal.notice(
                    f"{process.name} is not ready to train {JOIN_NOTICE_NS / 1e9:g} s after its "
                    "start: does its program still prepare, or can it not reach the launcher?"
                    f"{' It was last seen ' * bool(inside)}{inside}"
                )

    def _update_slots(self, hosts: Mapping[str, int], lost: int = -1) -> None:
        """Change the number of ranks to the slots of all hosts; spares need no slot.

        Members without a slot leave one after another, each after a step of the others: two of them
        could have the only copies of a part of the state. Horovod's members have the whole state.

        Args:
            hosts: Slots of each host.
            lost: Rank that has ended or leaves.
        """
        leaving, num_spares = [], self._num_spares
        for host, ranks in self._ranks_by_host().items():
            for rank in ranks[hosts.get(host, 0) :]:
                is_spare = host in hosts and rank not in self.state.members and num_spares > 0
                num_spares -= is_spare
                leaving += [] if is_spare else [rank]
        later = [rank for rank in leaving if rank in self.state.members and rank != lost]
        waiting = [rank for rank in later if rank not in self.leaving]
        if self._leave_together:
            later = []
        elif waiting and lost < 0 and self.state.has_trained:
            later.remove(waiting[-1])
        self._is_moving = bool(later)
        leaving = [rank for rank in leaving if rank not in later]
        self._execute(self.state.slots(sum(hosts.values()) + len(later), leaving))

    def _take_slot(self, rank: int, hosts: Mapping[str, int]) -> tuple[int, str]:
        """Return the first free slot for a rank, as its local rank, and its role in the run."""
        ranks = self._ranks_by_host()
        # if no host has a free slot any more, the rank leaves again
        num_free = {host: num_slots - len(ranks.get(host, ())) for host, num_slots in hosts.items()}
        host = max(num_free, key=lambda name: min(1, num_free[name]), default="")
        taken = {self._place_of[other] for other in ranks.get(host, ())}
        replaces = self.state.epoch < 0 and len(self.state.alive) < self._job.num_ranks
        self._host_of[rank] = host
        place = self._place_of[rank] = min(set(range(len(taken) + 1)) - taken)
        return place, "founder" if rank < self._job.num_ranks or replaces else "newcomer"

    def _ranks_by_host(self) -> Mapping[str, list[int]]:
        """Return the live ranks of a run with a source of slots by host, the oldest ones first."""
        ranks: dict[str, list[int]] = {}
        for rank in sorted(self.state.alive):
            ranks.setdefault(self._host_of[rank], []).append(rank)
        return ranks

    def _free_place(self, rank: int) -> None:
        """Free the place of a rank that ends, for another process."""
        place = self._place_of.pop(rank, None)
        if place is not None:
            heapq.heappush(self._places, place)
