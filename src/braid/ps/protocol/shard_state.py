"""The decisions about one shard on one server, as a state machine: events in, instructions out.

A shard lies on a chain of servers. The first, its head, decides; each change goes down the chain as
a record, and its confirmation comes back up. What is confirmed lies on all servers of the chain.

    worker                head                    successor ... tail
      push ───────────────> Keep
      push (another) ─────> Keep, Merge, SendOn ──> Apply, SendOn ──> Apply, Confirm
                            Apply, Accept, AnswerPull <── Confirm <──────┘

    event                   at the head                                elsewhere
    push, pull              keep or park; decide                       Moved: ask the head
    record                  (has none before it)                       Apply; SendOn or Confirm
    confirmed               Apply; Accept pushes, AnswerPull           Confirm
    configure               new chain: send what is unconfirmed again; a new head begins with the
                            records that it has; who left the chain answers Moved to all

Replication comes after aggregation: a clock of all workers is one record. A head changes its values
when a record is confirmed, so no pull shows what could be lost. What has not been accepted is the
worker's, which sends it again; a push that is in a record is never in another one. Messages of an
earlier epoch mean nothing: a head that was replaced cannot confirm anything more.

No tensors, threads, sockets or clocks of the host: values are named by worker and clock.

Sources: M. Li et al., Parameter Server, OSDI 2014, sections 3.4, 4.3 (replication after
aggregation); R. van Renesse, F. Schneider, Chain Replication, OSDI 2004; Q. Ho et al., SSP, 2013.
"""

from __future__ import annotations

from braid.errors import CommError
from braid.ps.consistency import Consistency
from braid.ps.protocol.instructions import (
    Accept,
    AnswerPull,
    Apply,
    Confirm,
    DropPushes,
    Install,
    Instruction,
    Keep,
    Merge,
    Moved,
    Request,
    SendOn,
    View,
)
from braid.ps.protocol.kept_pushes import KeptPushes, TaskKey
from braid.ps.protocol.progress import ConsistencySchedule, Push, ShardProgress, ShardRecord

__all__ = ["ShardState", "TaskKey"]


class ShardState:
    """State of one shard on one server.

    Args:
        server: Number of the server.
        consistency: When pushes are applied, and pulls answered, at first.

    Attributes:
        applied: Progress of the values.
        decided: Progress that a head has decided on, confirmed or not.
        confirmed: Number of the last record that the whole chain has.
        log: Records that wait to be confirmed.
        is_installed: Whether the server has the shard's state.
    """

    def __init__(self, server: int, consistency: Consistency) -> None:
        self._server = server
        self.view = View(-1, (), {}, {})
        self.applied = ShardProgress(ConsistencySchedule.always(consistency))
        self.decided = self.applied.copy()
        self.confirmed = 0
        self.log: dict[int, ShardRecord] = {}
        self.is_installed = False
        self._early: dict[int, ShardRecord] = {}  # records that came before their predecessor
        self._kept = KeptPushes()
        self._accepts: list[tuple[int, Request]] = []  # number of a record, who waits for it
        self._parked: dict[Request, tuple[int, int]] = {}  # worker and clock of pulls
        self._since = -1  # epoch since which this server joins, or has joined
        self._sent_to: tuple[int, int] | None = None  # whom the state was sent to, and its `since`

    # -- what the place in the chain means

    @property
    def is_head(self) -> bool:
        """Whether this server decides."""
        return self.view.chain[:1] == (self._server,) and self.is_installed

    @property
    def successor(self) -> int | None:
        """The next server of the chain."""
        return self._neighbour(1)

    @property
    def predecessor(self) -> int | None:
        """The server before this one in the chain."""
        return self._neighbour(-1)

    def _neighbour(self, step: int) -> int | None:
        chain = self.view.chain
        if self._server not in chain:
            return None
        place = chain.index(self._server) + step
        return chain[place] if 0 <= place < len(chain) else None

    # -- events

    def configure(self, view: View) -> list[Instruction]:
        """Continue as a later epoch says; nothing happens for an earlier one."""
        if view.epoch <= self.view.epoch:
            return []
        was_head, is_first = self.is_head, self.view.epoch < 0
        self.view = view
        self._early.clear()  # of another head, perhaps; the predecessor sends its log again
        if self._server not in view.chain:
            return self._discard()
        since = view.joining.get(self._server)
        if since is not None and since != self._since:
            self._since, self.is_installed = since, False
            self.log.clear()
            self._early.clear()
        elif is_first:
            self.is_installed = True
        if not self.is_installed:
            return self._redirect()  # it may have been the head in an epoch before those it missed
        done: list[Instruction] = []
        if self.is_head and not was_head:
            self.decided = self.applied.copy()
        done += self._install_successor()
        if self.successor is None:
            done += self._confirm(max(self.decided.number, self.applied.number))
        else:
            done += [SendOn(number) for number in self.log]
        if not self.is_head:
            return [*done, *self._redirect()]
        return [*done, *self._decide(), *self._freed()]

    def push(
        self,
        worker: int,
        clock: int,
        request: Request,
        key: TaskKey | None = None,
        lr: float | None = None,
    ) -> list[Instruction]:
        """Decide on a push; one of a task that another worker has sent before is dropped.

        Raises:
            CommError: The worker is not of this table, or the clock is over without a quorum.
        """
        if not self.is_head:
            return [Moved(request)]
        self._check(worker)
        if clock < self.decided.clocks.get(worker, 0):
            return self._accept_from(self.decided.number, request)
        rule = self.decided.rules.at(clock)
        if clock < self.decided.completed and rule.by_clock and rule.quorum is None:
            msg = (
                f"clock {clock} of worker {worker} is over: the others are at clock "
                f"{self.decided.completed}, so a worker that joins must begin later"
            )
            raise CommError(msg)
        if not self._kept.add((worker, clock), request, key, lr):
            return []
        self._admit(worker)
        return [Keep(worker, clock), *self._decide(), *self._freed()]

    def pull(self, worker: int, clock: int, request: Request) -> list[Instruction]:
        """Decide on a pull of the values before a worker's clock.

        Raises:
            CommError: The worker is not of this table.
        """
        if not self.is_head:
            return [Moved(request)]
        self._check(worker)
        self._parked[request] = worker, clock
        return self._freed()

    def change(
        self,
        clock: int,
        consistency: Consistency | None,
        lr: float | None,
        request: Request,
        *,
        lr_before: float | None = None,
    ) -> list[Instruction]:
        """Let another consistency or learning rate hold from a clock on.

        Slower workers may push for clocks before it: those have `lr_before`, if it never changed.

        Raises:
            CommError: The clock is over.
        """
        if not self.is_head:
            return [Moved(request)]
        rules, rates = self.decided.rules, self.decided.rates
        if consistency == rules.at(clock) and clock in rules.begins:
            consistency = None
        if lr == rates.get(clock):
            lr = None
        if consistency is None and lr is None:  # another worker has said so
            return self._accept_from(self.decided.number, request)
        latest = max([self.decided.completed, *(c for _, c in self._kept.requests)], default=0)
        if clock < latest:
            msg = (
                f"settings cannot change at clock {clock}: clock {latest} has begun; choose a "
                "later one, the same on all workers"
            )
            raise CommError(msg)
        lr_before = None if lr is None or rates else lr_before
        record = self._record(clock=clock, consistency=consistency, lr=lr, lr_before=lr_before)
        return [*self._begin(record), *self._accept_from(record.number, request), *self._freed()]

    def follows(self, epoch: int) -> bool:
        """Whether records of this epoch come from this server's predecessor."""
        return epoch == self.view.epoch and self.predecessor is not None and not self.is_head

    def record(self, record: ShardRecord, epoch: int) -> list[Instruction]:
        """Take a record of the predecessor, whose sum the driver keeps under its number."""
        if not self.follows(epoch):
            return []
        if record.number <= self.applied.number and self.is_installed:
            return [Confirm(self.confirmed)] if record.number <= self.confirmed else []
        self._early[record.number] = record
        return self._follow()

    def install(self, progress: ShardProgress, since: int) -> list[Instruction]:
        """Begin with the state of the predecessor."""
        if self.is_installed or since != self.view.joining.get(self._server):
            return []
        self.applied, self.decided = progress.copy(), progress.copy()
        self.is_installed = True
        self._early = {n: each for n, each in self._early.items() if n > progress.number}
        self.confirmed = 0
        done = self._install_successor()
        if self.successor is None:
            done += self._confirm(progress.number)
        return [*done, *self._follow()]

    def confirm(self, number: int, epoch: int) -> list[Instruction]:
        """Learn that the successor, and all after it, have the records up to this one."""
        if epoch != self.view.epoch or number <= self.confirmed or not self.is_installed:
            return []
        return [*self._confirm(number), *(self._freed() if self.is_head else [])]

    def resend(self) -> list[Instruction]:
        """Send what is unconfirmed again, on links that lose messages."""
        done: list[Instruction] = []
        if not self.is_installed:
            return done
        if self.successor is not None:
            self._sent_to = None
            done += self._install_successor()
            done += [SendOn(number) for number in self.log]
        if self.predecessor is not None:
            done.append(Confirm(self.confirmed))
        return done

    def clock(self, worker: int) -> int:
        """Return the next clock of a worker, of which all records so far are confirmed.

        Clocks that a quorum has completed without it are over for it, too.
        """
        clock = self.applied.clocks.get(worker, self.view.members.get(worker, 0))
        while clock < self.applied.completed and self._is_over(clock):
            clock += 1
        return clock

    def waiting(self) -> list[str]:
        """Return who waits for whom, as text."""
        lines, pushed = [], self._pushed()
        for worker, clock in self._parked.values():
            reached = clock - self.applied.rules.at(clock).staleness
            missing = [
                f"{other} (at clock {at})"
                for other, at in pushed.items()
                if at < reached or (other == worker and at < clock)
            ]
            if missing:
                names = ", ".join(missing)
                lines.append(f"worker {worker} waits at clock {clock} for the pushes of {names}")
        return lines

    def awaited(self) -> set[int]:
        """Return the workers for whose pushes requests wait here."""
        pushed = self._pushed()
        needed = [
            clock - self.applied.rules.at(clock).staleness for _, clock in self._parked.values()
        ]
        completed = self.decided.completed
        if self.decided.rules.at(completed).by_clock:
            needed += [clock + 1 for _, clock in self._kept.eligible if clock == completed]
        return {worker for worker, clock in pushed.items() if clock < max(needed, default=0)}

    # -- inside

    def _pushed(self) -> dict[int, int]:
        """Return the clock of each worker after its pushes that are kept."""
        return self._kept.clocks_after(self.applied.clocks_of(self.view.members))

    def _install_successor(self) -> list[Instruction]:
        """Send the state to a successor that joins, once."""
        successor = self.successor
        since = None if successor is None else self.view.joining.get(successor)
        if successor is None or since is None or self._sent_to == (successor, since):
            return []
        self._sent_to = successor, since
        return [Install(successor)]

    def _discard(self) -> list[Instruction]:
        """Leave the chain: nothing here counts any more."""
        done = self._redirect()
        self.is_installed = False
        self._since, self._sent_to = -1, None
        self.log.clear()
        self._early.clear()
        return done

    def _redirect(self) -> list[Instruction]:
        """Send all who wait here to the head."""
        kept, self._kept = self._kept.requests, KeptPushes()
        requests = [*kept.values(), *self._parked]
        requests += [request for _, request in self._accepts]
        self._parked.clear()
        self._accepts.clear()
        done: list[Instruction] = [Moved(request) for request in requests]
        return [*done, DropPushes(tuple(kept))] if kept else done

    def _admit(self, worker: int) -> None:
        """Let the worker's next pushes count, as far as there is no gap."""
        clock = self.decided.clocks.get(worker, self.view.members.get(worker, 0))
        known = {c for w, c in self._kept.eligible if w == worker}
        clock = max([clock, *(c + 1 for c in known)])
        while (worker, clock) in self._kept.requests or self._is_over(clock):
            if (worker, clock) in self._kept.requests:
                self._kept.eligible.append((worker, clock))
            clock += 1

    def _is_over(self, clock: int) -> bool:
        """Whether a quorum has completed a clock, so that a worker may leave it out."""
        rule = self.decided.rules.at(clock)
        return clock < self.decided.completed and rule.quorum is not None and rule.late == "drop"

    def _decide(self) -> list[Instruction]:
        """Make records of the pushes that need not wait any more."""
        done: list[Instruction] = []
        while (record := self._next_record()) is not None:
            done += self._begin(record)
        return done

    def _next_record(self) -> ShardRecord | None:
        completed = self.decided.completed
        rules = self.decided.rules
        for worker, clock in self._kept.eligible:
            rule = rules.at(clock)
            is_alone = not rule.by_clock or clock < completed
            if is_alone and self._kept.repeated([(worker, clock)], self.decided):
                return self._record(dropped=((worker, clock),))
            if clock < completed and rule.by_clock:
                if rule.late == "drop":
                    return self._record(dropped=((worker, clock),))
                scale = _scale(rule, self._needed(rule, clock))
                return self._record(pushes=((worker, clock),), scale=scale)
            if not rule.by_clock and completed >= rules.begin(clock):
                scale = _scale(rule, len(self.view.members))
                return self._record(pushes=((worker, clock),), scale=scale)
        rule = rules.at(completed)
        if rule.by_clock:
            workers = sorted(worker for worker, clock in self._kept.eligible if clock == completed)
            needed = self._needed(rule, completed)
            if not needed and self.view.members:  # all who are here began later
                return self._record(completed=min(self.view.members.values()))
            if len(set(workers) & self.view.members.keys()) >= needed > 0:
                arrived = [(worker, completed) for worker in workers]
                dropped = self._kept.repeated(arrived, self.decided)
                pushes = tuple(push for push in arrived if push not in dropped)
                scale = _scale(rule, max(1, len(pushes)))
                return self._record(
                    pushes=pushes, dropped=dropped, scale=scale, completed=completed + 1
                )
        elif self.decided.slowest(self.view.members) > completed:
            return self._record()
        return None

    def _record(
        self,
        *,
        pushes: tuple[Push, ...] = (),
        dropped: tuple[Push, ...] = (),
        scale: float = 1.0,
        completed: int | None = None,
        clock: int = 0,
        consistency: Consistency | None = None,
        lr: float | None = None,
        lr_before: float | None = None,
    ) -> ShardRecord:
        if completed is None:
            completed = self.decided.completed
            if not self.decided.rules.at(completed).by_clock:
                completed = max(completed, self.decided.slowest(self.view.members, pushes))
        keys = self._kept.keys(pushes)
        return ShardRecord(
            number=self.decided.number + 1,
            pushes=pushes,
            scale=scale,
            dropped=dropped,
            completed=completed,
            clock=clock,
            consistency=consistency,
            lr=lr,
            lr_before=lr_before,
            updates=tuple((key.task, key.number) for key in keys),
            oldest_task=max((key.oldest for key in keys), default=0),
            step_lr=self._kept.lr(pushes),
        )

    def _begin(self, record: ShardRecord) -> list[Instruction]:
        """Decide on a record: it happens once the chain has it."""
        self.decided.advance(record)
        self.log[record.number] = record
        requests = self._kept.take((*record.pushes, *record.dropped))
        self._accepts += [(record.number, request) for request in requests]
        done: list[Instruction] = [Merge(record)]
        if record.dropped:
            done.append(DropPushes(record.dropped))
        if self.successor is not None:
            return [*done, SendOn(record.number)]
        return [*done, *self._confirm(record.number)]

    def _follow(self) -> list[Instruction]:
        """Apply the records of the predecessor, as far as there is no gap."""
        done: list[Instruction] = []
        while self.is_installed and self.applied.number + 1 in self._early:
            record = self._early.pop(self.applied.number + 1)
            self.applied.advance(record)
            self.log[record.number] = record
            done.append(Apply(record))
            if self.successor is not None:
                done.append(SendOn(record.number))
        if self.is_installed and self.successor is None and self.applied.number > self.confirmed:
            done += self._confirm(self.applied.number)
        return done

    def _confirm(self, number: int) -> list[Instruction]:
        """Let all records up to this one be confirmed."""
        done: list[Instruction] = []
        for record in [each for n, each in self.log.items() if n <= number]:
            del self.log[record.number]
            if record.number > self.applied.number:  # at the head
                self.applied.advance(record)
                done.append(Apply(record))
        self.confirmed = max(self.confirmed, number)
        if self.predecessor is not None:
            done.append(Confirm(self.confirmed))
        ready = [request for n, request in self._accepts if n <= self.confirmed]
        self._accepts = [each for each in self._accepts if each[0] > self.confirmed]
        return [*done, *(Accept(request) for request in ready)]

    def _accept_from(self, number: int, request: Request) -> list[Instruction]:
        """Accept a request once a record is confirmed."""
        if number <= self.confirmed:
            return [Accept(request)]
        self._accepts.append((number, request))
        return []

    def _freed(self) -> list[Instruction]:
        """Return the answers to pulls that need not wait any more."""
        if self.applied.number > self.confirmed:
            return []  # a new head shows nothing that its successors may lack
        freed = [r for r, (worker, clock) in self._parked.items() if self._shows(worker, clock)]
        for request in freed:
            del self._parked[request]
        return [AnswerPull(request) for request in freed]

    def _shows(self, worker: int, clock: int) -> bool:
        """Whether the values are new enough for a pull."""
        rule = self.applied.rules.at(clock)
        if self.applied.completed < clock - rule.staleness:
            return False
        clocks = self.applied.clocks_of(self.view.members)
        return rule.by_clock or clocks.get(worker, clock) >= clock

    def _needed(self, rule: Consistency, clock: int) -> int:
        """Return the number of live workers whose push completes a clock."""
        count = sum(start <= clock for start in self.view.members.values())
        return count if rule.quorum is None else min(rule.quorum, count)

    def _check(self, worker: int) -> None:
        if worker not in self.view.members:
            known = ", ".join(map(str, self.view.members)) or "none"
            msg = f"worker {worker} is not of this table, whose workers are {known}"
            raise CommError(msg)


def _scale(rule: Consistency, count: int) -> float:
    return 1.0 / count if rule.aggregate == "mean" else 1.0
