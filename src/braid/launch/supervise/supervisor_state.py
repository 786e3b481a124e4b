"""State machine of the launcher: events in, instructions out.

Problem: launchers hang, leave orphans or blame the wrong rank if their decisions are spread over
signal handlers, threads and waits that cannot be tested.

Idea: everything that happens is an event with a time; every reaction is a list of instructions. The
state machine touches no process, signal, socket or clock.

    phase         event                        instructions                     next
    RUNNING       last rank ended              -                                DONE
    RUNNING       a rank failed                send RankLost                    GRACE until +grace
    RUNNING       Ctrl-C, SIGTERM, SIGHUP      send Stop, forward the signal    INTERRUPTED until
                                                                                +interrupt limit
    RUNNING       time limit                   collect stacks, send Stop        STACKS until +0.5 s
    INTERRUPTED   a second signal              SIGKILL to all                   KILLING
    GRACE,STACKS  a signal                     SIGTERM to all                   TERMINATING
    these three   deadline                     SIGTERM, SIGKILL to the stopped  TERMINATING until
                                                                                +2 s
    these three   only stopped ranks are left  SIGKILL to them                  TERMINATING until
                                                                                +2 s
    TERMINATING   deadline, or a signal        SIGKILL to all                   KILLING
    any           last rank ended              -                                DONE
    any           a rank stopped               warn                             same
    any           a rank stopped for too long  send RankLost, SIGKILL it        same
    any           a rank ended                 send RankLost                    same
    RUNNING       an expendable rank died,     send RankLost, warn: the run     same
                  without an error reported    survives it
    any           the run no longer needs      SIGTERM to it                    same
                  a rank
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from braid.launch.process.job import JobSpec
from braid.launch.supervise.membership_state import MembershipState
from braid.runtime.diagnose.verdict import signal_name
from braid.runtime.rendezvous import RankLost, Stop

__all__ = [
    "CollectStacks",
    "Continued",
    "Dismissed",
    "Exited",
    "Instruction",
    "Interrupted",
    "RankFacts",
    "ReportedFailure",
    "RunPhase",
    "SendSignal",
    "SendToRank",
    "Started",
    "Stopped",
    "SupervisorState",
    "Tick",
    "TimeLimits",
    "Warn",
]

STACKS_NS = 500_000_000  # faulthandler needs microseconds; a swapped-out process needs this
STOPPED_S = 30.0  # default of `stopped_ns`
REPLACED_S = 0.5  # default of `replaced_ns`: a longer wait would cost more than a new process
TERMINATE_NS = 2_000_000_000  # a program that handles SIGTERM has had its grace period before


class RunPhase(Enum):
    """Phase of the run."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    STACKS = "stacks"
    GRACE = "grace"
    TERMINATING = "terminating"
    KILLING = "killing"
    DONE = "done"


class TimeLimits(NamedTuple):
    """Time limits of a run, in nanoseconds; `timeout_ns` is None for no limit.

    A stopped rank is killed after `stopped_ns`, or when running members that can spare it have
    waited `replaced_ns` for it, in all of its stops of the last `stopped_ns` together.
    """

    grace_ns: int
    stopped_ns: int
    replaced_ns: int
    interrupt_ns: int
    timeout_ns: int | None = None

    @classmethod
    def of(cls, job: JobSpec) -> TimeLimits:
        """Return the limits of a job."""
        limit_s = job.stopped_limit_s
        return cls(
            grace_ns=round(job.grace_s * 1e9),
            stopped_ns=round((STOPPED_S if limit_s is None else limit_s) * 1e9),
            replaced_ns=round((REPLACED_S if limit_s is None else limit_s) * 1e9),
            interrupt_ns=round(job.interrupt_limit_s * 1e9),
            timeout_ns=None if job.timeout_s is None else round(job.timeout_s * 1e9),
        )


class Started(NamedTuple):
    """Event: a rank's process exists.

    Attributes:
        rank: Number of the rank.
        place: Earlier rank with the same role, which this rank replaces; -1 if none.
    """

    rank: int
    place: int = -1


class Exited(NamedTuple):
    """Event: a rank's process has ended.

    Attributes:
        rank: Number of the rank.
        reason: Clause such as `exited with code 1`, for the remaining ranks.
        ok: Whether the rank ended well.
    """

    rank: int
    reason: str
    ok: bool


class ReportedFailure(NamedTuple):
    """Event: a rank has reported that an exception is about to end it."""

    rank: int
    reason: str


class Stopped(NamedTuple):
    """Event: a signal such as SIGSTOP stopped a rank without ending it."""

    rank: int
    signum: int


class Continued(NamedTuple):
    """Event: a stopped rank runs again."""

    rank: int


class Interrupted(NamedTuple):
    """Event: the launcher has received a signal."""

    signum: int


class Dismissed(NamedTuple):
    """Event: the run no longer needs a rank that waits to join it."""

    rank: int


class Tick(NamedTuple):
    """Event: time has passed."""


class SendSignal(NamedTuple):
    """Instruction: send the signal `signum` to the processes of `ranks`."""

    ranks: tuple[int, ...]
    signum: int


class SendToRank(NamedTuple):
    """Instruction: send `message` to every living rank that has a control connection."""

    message: RankLost | Stop


class Warn(NamedTuple):
    """Instruction: notify the user that `rank` was stopped by `signum`, or goes on (`signum` 0).

    If `reason` is not empty, the rank has ended for this reason, and the run goes on without it.
    A stopped rank is killed after `limit_s` seconds.
    """

    rank: int
    signum: int
    reason: str = ""
    limit_s: float = 0.0


class CollectStacks(NamedTuple):
    """Instruction: request stacks from every living rank that has joined the job."""


Event: TypeAlias = (
    Started | Exited | ReportedFailure | Stopped | Continued | Interrupted | Dismissed | Tick
)
Instruction: TypeAlias = SendSignal | SendToRank | Warn | CollectStacks


@dataclass(slots=True)
class RankFacts:
    """State of a rank's process, as the supervisor knows it.

    Attributes:
        alive: Whether the process has not ended.
        stopped_ns: Time since which the process is stopped; None while it runs.
        stop_signal: Signal that stopped the process last.
        paused_ns: Longest time for which the process was stopped before it went on.
        continued_ns: Time at which the process last went on.
        awaited_since_ns: Time since which running members that can spare the stopped rank wait for
            it; None if none do.
        awaited_ns: Time for which they have waited for it in earlier stops.
        declared_dead: Whether the rank was killed because it was stopped for too long.
        signalled: Whether the launcher sent the process a signal that ends it.
        failed_ns: Time at which the rank reported its failure, before any signal; else None.
        loss_sent: Whether the remaining ranks were informed of the loss.
        survived: Whether the rank died, and the run went on without it.
        dismissed: Whether the run no longer needs the rank.
        place: Number of the first rank with the same role.
    """

    place: int
    alive: bool = True
    stopped_ns: int | None = None
    stop_signal: int = int(signal.SIGSTOP)
    paused_ns: int = 0
    continued_ns: int = 0
    awaited_since_ns: int | None = None
    awaited_ns: int = 0
    declared_dead: bool = False
    signalled: bool = False
    failed_ns: int | None = None
    loss_sent: bool = False
    survived: bool = False
    dismissed: bool = False

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, and the launcher has not killed it for that."""
        return self.alive and self.stopped_ns is not None and not self.declared_dead

    def stops_ns(self, now_ns: int) -> int:
        """Return how long the stop, and earlier stops that count with it, have lasted."""
        return now_ns - (self.stopped_ns or now_ns) + self.awaited_ns


class SupervisorState:
    """Decides when a run is over, and how it ends.

    Args:
        num_ranks: Number of ranks to start.
        limits: Time limits.
        start_ns: Current time.
        expendable: Ranks without which the others can go on, when a signal ends them.
        needed: Sets of expendable ranks; the run does not survive the last one of a set, unless
            another process takes its place.
        members: State of the members of an elastic run, which decides which deaths the run
            survives; used if no rank is expendable.

    Attributes:
        phase: Phase of the run.
        ranks: Facts about the started ranks.
        stopped_by: `timeout` or `interrupted` if that came before any failure; else empty.
        signum: Number of the signal that interrupted the run; 0 if none.
        fault_ns: Time of the failure, interrupt or time-out that ended the run; None if there was
            none.
    """

    def __init__(
        self,
        num_ranks: int,
        limits: TimeLimits,
        start_ns: int,
        expendable: frozenset[int] = frozenset(),
        needed: Sequence[frozenset[int]] = (),
        members: MembershipState | None = None,
    ) -> None:
        self.phase = RunPhase.RUNNING
        self.ranks: dict[int, RankFacts] = {}
        self.stopped_by = ""
        self.signum = 0
        self.fault_ns: int | None = None
        self._to_start = num_ranks
        self._expendable = expendable
        self._needed = needed
        self._members = members
        self._limits = limits
        self._deadline_ns: int | None = None
        if limits.timeout_ns is not None:
            self._deadline_ns = start_ns + limits.timeout_ns

    @property
    def starting(self) -> bool:
        """Whether the next rank should be started."""
        return self._to_start > 0 and self.phase is RunPhase.RUNNING

    def start_another(self) -> None:
        """Start one more rank."""
        self._to_start += 1

    @property
    def deadline_ns(self) -> int | None:
        """Time at which a `Tick` is due; None if no deadline is set."""
        due = [ns for f in self.ranks.values() if (ns := self._stop_deadline_ns(f)) is not None]
        if self._deadline_ns is not None:
            due.append(self._deadline_ns)
        return min(due, default=None)

    def handle(self, event: Event, now_ns: int) -> list[Instruction]:
        """Process an event and all deadlines up to `now_ns`; return the instructions."""
        out: list[Instruction] = []
        if isinstance(event, Started):
            self.ranks[event.rank] = RankFacts(event.rank if event.place < 0 else event.place)
            self._to_start -= 1
        elif isinstance(event, Exited):
            out += self._exited(event, now_ns)
        elif isinstance(event, ReportedFailure):
            out += self._failed(event, now_ns)
        elif isinstance(event, Stopped):
            facts = self.ranks[event.rank]
            facts.stopped_ns, facts.stop_signal = now_ns, event.signum
            if now_ns - facts.continued_ns > self._limits.stopped_ns:
                facts.awaited_ns = 0
            self._note_waits(now_ns)
            limit_s = ((self._stop_deadline_ns(facts) or now_ns) - now_ns) / 1e9
            out.append(Warn(event.rank, event.signum, limit_s=limit_s))
        elif isinstance(event, Continued):
            facts = self.ranks[event.rank]
            if facts.stopped_ns is not None and not facts.declared_dead:
                facts.paused_ns = max(facts.paused_ns, now_ns - facts.stopped_ns)
                facts.stopped_ns, facts.continued_ns = None, now_ns
                out.append(Warn(event.rank, 0))
        elif isinstance(event, Interrupted):
            out += self._interrupted(event.signum, now_ns)
        elif isinstance(event, Dismissed):
            self.ranks[event.rank].dismissed = True
            out += self._signal([event.rank], signal.SIGTERM)
        self._note_waits(now_ns)
        out += self._due(now_ns)
        is_replaced = isinstance(event, Exited) and self.ranks[event.rank].survived
        if self.phase is not RunPhase.DONE and not (self._alive() or self.starting or is_replaced):
            self.phase, self._deadline_ns = RunPhase.DONE, None
        return out

    def _exited(self, event: Exited, now_ns: int) -> list[Instruction]:
        facts = self.ranks[event.rank]
        facts.alive = False
        loss = self._send_loss(event.rank, event.reason, on_purpose=event.ok)
        if event.ok or facts.dismissed:
            return loss
        if self._survives(event.rank):
            return [*loss, Warn(event.rank, 0, event.reason)]
        self._fault(now_ns)
        return loss

    def _survives(self, rank: int) -> bool:
        """Record and return whether the run goes on after the death of `rank`."""
        facts = self.ranks[rank]
        if self._members is not None and not self._expendable:
            spared = self._members.can_lose(rank)
        else:
            is_last = any(self._is_last(facts.place, part) for part in self._needed)
            is_replaced = self._members is not None and self._members.can_replace
            spared = self.is_expendable(rank) and (is_replaced or not is_last)
        spared &= facts.failed_ns is None
        facts.survived = facts.survived or (spared and self.phase is RunPhase.RUNNING)
        return facts.survived

    def is_expendable(self, rank: int) -> bool:
        """Return whether the other ranks can go on without this rank."""
        return self.ranks[rank].place in self._expendable

    def _is_last(self, place: int, part: frozenset[int]) -> bool:
        """Return whether no rank of a set remains without that of `place`: all others have died."""
        latest = {facts.place: facts for facts in self.ranks.values()}
        others = part - {place}
        dead = {other for other in others if other in latest and latest[other].survived}
        return place in part and dead == others

    def _failed(self, event: ReportedFailure, now_ns: int) -> list[Instruction]:
        facts = self.ranks[event.rank]
        if facts.signalled or facts.failed_ns is not None:
            return []
        if self._members is not None and self._members.is_outside(event.rank):
            return []  # the members continue; the rank counts as lost

        facts.failed_ns = now_ns
        self._fault(now_ns)
        return self._send_loss(event.rank, event.reason)

    def _fault(self, now_ns: int) -> None:
        if self.phase is RunPhase.RUNNING:
            self.fault_ns = now_ns
            self.phase, self._deadline_ns = RunPhase.GRACE, now_ns + self._limits.grace_ns

    def _interrupted(self, signum: int, now_ns: int) -> list[Instruction]:
        if self.phase is not RunPhase.RUNNING:
            harder = self.phase in {RunPhase.GRACE, RunPhase.STACKS}
            return self._terminate(now_ns) if harder else self._kill()
        self.stopped_by, self.signum, self.fault_ns = "interrupted", signum, now_ns
        self.phase, self._deadline_ns = RunPhase.INTERRUPTED, now_ns + self._limits.interrupt_ns
        return [SendToRank(Stop(signal_name(signum))), *self._signal(self._alive(), signum)]

    def _due(self, now_ns: int) -> list[Instruction]:
        out: list[Instruction] = []
        for rank in self._alive():
            facts = self.ranks[rank]
            end_ns = self._stop_deadline_ns(facts)
            if end_ns is not None and now_ns >= end_ns:
                facts.declared_dead = True
                self._survives(rank)  # what follows before the process is reaped is a later fault
                lasted_s = facts.stops_ns(now_ns) / 1e9
                reason = f"was stopped by {signal_name(facts.stop_signal)} for {lasted_s:.3g} s"
                out += self._send_loss(rank, reason)
                out += self._signal([rank], signal.SIGKILL)
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            out += self._deadline_passed(now_ns)
        elif self.phase in {RunPhase.GRACE, RunPhase.INTERRUPTED} and self._only_stopped_left():
            out += self._terminate(now_ns)
        return out

    def _note_waits(self, now_ns: int) -> None:
        """Record for which stopped ranks running members wait that can spare them."""
        members = self._members
        stopped = [rank for rank, facts in self.ranks.items() if facts.is_stopped]
        some_run = (
            members is not None
            and self.phase is RunPhase.RUNNING
            and not self._expendable
            and any(self.ranks[m].alive and m not in stopped for m in members.members)
        )
        for rank, facts in self.ranks.items():
            if rank in stopped and some_run and members is not None and members.can_spare(rank):
                if facts.awaited_since_ns is None:
                    facts.awaited_since_ns = now_ns
            elif facts.awaited_since_ns is not None:
                facts.awaited_ns += now_ns - facts.awaited_since_ns
                facts.awaited_since_ns = None

    def _stop_deadline_ns(self, facts: RankFacts) -> int | None:
        """Return the time at which a stopped rank counts as lost; None if it is not stopped."""
        if facts.stopped_ns is None or not facts.is_stopped:
            return None
        deadline_ns = facts.stopped_ns + self._limits.stopped_ns
        if facts.awaited_since_ns is None:
            return deadline_ns
        left_ns = max(0, self._limits.replaced_ns - facts.awaited_ns)
        return min(deadline_ns, facts.awaited_since_ns + left_ns)

    def _deadline_passed(self, now_ns: int) -> list[Instruction]:
        if self.phase is RunPhase.RUNNING:
            self.stopped_by, self.fault_ns = "timeout", now_ns
            self.phase, self._deadline_ns = RunPhase.STACKS, now_ns + STACKS_NS
            return [CollectStacks(), SendToRank(Stop("the run's time limit"))]
        return self._kill() if self.phase is RunPhase.TERMINATING else self._terminate(now_ns)

    def _terminate(self, now_ns: int) -> list[Instruction]:
        self.phase, self._deadline_ns = RunPhase.TERMINATING, now_ns + TERMINATE_NS
        alive = self._alive()
        stopped = [rank for rank in alive if self.ranks[rank].stopped_ns is not None]
        running = [rank for rank in alive if rank not in stopped]
        return [*self._signal(running, signal.SIGTERM), *self._signal(stopped, signal.SIGKILL)]

    def _kill(self) -> list[Instruction]:
        self.phase, self._deadline_ns = RunPhase.KILLING, None
        return self._signal(self._alive(), signal.SIGKILL)

    def _alive(self) -> list[int]:
        return [rank for rank, facts in self.ranks.items() if facts.alive]

    def _only_stopped_left(self) -> bool:
        alive = self._alive()
        return bool(alive) and all(self.ranks[rank].stopped_ns is not None for rank in alive)

    def _signal(self, ranks: list[int], signum: int) -> list[Instruction]:
        for rank in ranks:
            self.ranks[rank].signalled = True
        return [SendSignal(tuple(ranks), int(signum))] if ranks else []

    def _send_loss(self, rank: int, reason: str, *, on_purpose: bool = False) -> list[Instruction]:
        if self.ranks[rank].loss_sent:
            return []
        self.ranks[rank].loss_sent = True
        return [SendToRank(RankLost(rank, reason, on_purpose))]
