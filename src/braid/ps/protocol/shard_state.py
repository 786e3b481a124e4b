"""The decisions about one shard on one server, as a state machine: events in, instructions out.

A shard is stored on a chain of servers. The first one, the head, decides. Each change goes down the
chain as a record, and its confirmation back up: all servers of the chain have confirmed records.

    worker                head                    successor ... tail
      push ───────────────> Keep
      push (another) ─────> Keep, Merge, SendOn ──> Apply, SendOn ──> Apply, Confirm
                            Apply, Accept, AnswerPull <── Confirm <──────┘

    event                   at the head                                on other servers
    push, pull              keep or park; decide                       Moved: ask the head
    record                  (has no predecessor)                       Apply; SendOn or Confirm
    confirmed               Apply; Accept pushes, AnswerPull           Confirm
    configure               new chain: send unconfirmed records again; a new head begins with its
                            own records; a server outside the chain answers Moved to all

Replication comes after aggregation (`aggregation`): a clock of all workers is one record. A head
applies a record once it is confirmed, so no pull returns values that could be lost. Workers send
pushes again until they are accepted; a push is never in two records. Messages of an earlier epoch
are ignored: a head that was replaced cannot confirm records.

No tensors, threads, sockets or system clocks: values are named by worker and clock.

Sources: M. Li et al., Parameter Server, OSDI 2014, sections 3.4, 4.3 (replication after
aggregation); R. van Renesse, F. Schneider, Chain Replication, OSDI 2004; Q. Ho et al., SSP, 2013.
"""

from __future__ import annotations

import msgspec

from braid.errors import CommError
from braid.ps.consistency import Consistency
from braid.ps.protocol.aggregation import new_record, next_record
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
from braid.ps.protocol.progress import ConsistencySchedule, ShardProgress, ShardRecord

__all__ = ["ShardState", "TaskKey"]


class ShardState:
    """State machine of one shard (a part of a table) on one server.

    Args:
        server: Number of the server.
        consistency: Initial consistency: when pushes are applied, and pulls answered.

    Attributes:
        applied: Progress of the applied records (changes of the shard).
        decided: Progress of all records that the deciding server has made, confirmed or not.
        confirmed: Number of the last record that all servers with a copy have.
        log: Records that are not confirmed yet.
        predecessor: Server with the previous copy; None for the first one.
        successor: Server with the next copy; None for the last one.
        is_installed: Whether the server has the shard's state.
    """

    def __init__(self, server: int, consistency: Consistency) -> None:
        self._server = server
        self.view = View(-1, (), {}, {})
        self.applied = ShardProgress(ConsistencySchedule.always(consistency))
        self.decided = self.applied.copy()
        self.confirmed = 0
        self.log: dict[int, ShardRecord] = {}
        self.predecessor: int | None = None
        self.successor: int | None = None
        self.is_installed = False
        self._early: dict[int, ShardRecord] = {}  # records that arrived before an earlier record
        self._kept = KeptPushes()
        self._accepts: list[tuple[int, Request]] = []  # number of a record, request to accept
        self._parked: dict[Request, tuple[int, int]] = {}  # worker and clock of pulls
        self._since = -1  # epoch in which this server joined, or began to join
        self._sent_to: tuple[int, int] | None = None  # server with the state, and its `since`

    # -- place in the chain

    @property
    def is_head(self) -> bool:
        """Whether this server is the head, which decides."""
        return self.view.chain[:1] == (self._server,) and self.is_installed

    # -- events

    def configure(self, view: View) -> list[Instruction]:
        """Continue with the servers that a later directory names; ignore an earlier `view`."""
        if view.epoch <= self.view.epoch:
            return []
        was_head, is_first = self.is_head, self.view.epoch < 0
        self.view, chain = view, view.chain
        place = chain.index(self._server) if self._server in chain else len(chain)
        self.predecessor = chain[place - 1] if 0 < place < len(chain) else None
        self.successor = chain[place + 1] if place + 1 < len(chain) else None
        self._early.clear()  # perhaps from another head; the predecessor sends its log again
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
            return self._redirect()  # it may have been the head before it missed some epochs
        instructions: list[Instruction] = []
        if self.is_head and not was_head:
            self.decided = self.applied.copy()
        instructions += self._install_successor()
        if self.successor is None:
            instructions += self._confirm(max(self.decided.number, self.applied.number))
        else:
            instructions += [SendOn(number) for number in self.log]
        if not self.is_head:
            return [*instructions, *self._redirect()]
        return [*instructions, *self._decide(), *self._freed()]

    def push(
        self,
        worker: int,
        clock: int,
        request: Request,
        key: TaskKey | None = None,
        lr: float | None = None,
    ) -> list[Instruction]:
        """Decide on a push; drop a task's push that another worker has sent before.

        Raises:
            CommError: The sender is not a worker of the run, the clock is over, or another worker
                has pushed for it with another learning rate.
        """
        if not self.is_head:
            return [Moved(request)]
        self._check(worker)
        if clock < self.decided.clocks.get(worker, 0):
            return self._accept_from(self.decided.number, request)
        rule = self.decided.rules.at(clock)
        if clock < self.decided.completed and rule.by_clock and rule.quorum is None:
            msg = (
                f"worker {worker} pushed for clock {clock}, which is complete: the other workers "
                f"are at clock {self.decided.completed}, so begin this worker at a later clock"
            )
            raise CommError(msg)
        if rule.by_clock and (other := self._kept.other_rate(clock, lr)):
            msg = (
                f"worker {worker} pushed for clock {clock} with learning rate {lr}, but worker "
                f"{other[0]} with {other[1]}, and one step takes both pushes: step schedulers with "
                "the same numbers on all workers"
            )
            raise CommError(msg)
        if not self._kept.add((worker, clock), request, key, lr):
            return []
        self._kept.admit(worker, self.decided, self.view.members.get(worker, 0))
        return [Keep(worker, clock), *self._decide(), *self._freed()]

    def pull(self, worker: int, clock: int, request: Request) -> list[Instruction]:
        """Decide on a pull of the values before a worker's clock.

        Raises:
            CommError: The sender is not a worker of the run.
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
        """Change the consistency or learning rate from `clock` on.

        Slower workers still push earlier clocks: `lr_before` is their rate if it never changed.

        Raises:
            CommError: The clock has begun already.
        """
        if not self.is_head:
            return [Moved(request)]
        rules, rates = self.decided.rules, self.decided.rates
        if consistency == rules.at(clock) and clock in rules.begins:
            consistency = None
        if lr == rates.get(clock):
            lr = None
        if consistency is None and lr is None:  # another worker has requested the same
            return self._accept_from(self.decided.number, request)
        latest = max([self.decided.completed, *(c for _, c in self._kept.requests)], default=0)
        if clock < latest:
            msg = (
                f"settings cannot change at clock {clock}, because clock {latest} has begun; "
                "choose a later one, the same on all workers"
            )
            raise CommError(msg)
        lr_before = None if lr is None or rates else lr_before
        record = new_record(self._kept, self.decided, self.view.members)
        record = msgspec.structs.replace(
            record, clock=clock, consistency=consistency, lr=lr, lr_before=lr_before
        )
        return [*self._begin(record), *self._accept_from(record.number, request), *self._freed()]

    def follows(self, epoch: int) -> bool:
        """Return whether records (changes) of this epoch come from the previous server."""
        return epoch == self.view.epoch and self.predecessor is not None and not self.is_head

    def record(self, record: ShardRecord, epoch: int) -> list[Instruction]:
        """Handle a record (a change) of the previous server; the caller stores its sum."""
        if not self.follows(epoch):
            return []
        if record.number <= self.applied.number and self.is_installed:
            return [Confirm(self.confirmed)] if record.number <= self.confirmed else []
        self._early[record.number] = record
        return self._follow()

    def install(self, progress: ShardProgress, since: int) -> list[Instruction]:
        """Begin with the state of the previous server; this one was added in epoch `since`."""
        if self.is_installed or since != self.view.joining.get(self._server):
            return []
        self.applied, self.decided = progress.copy(), progress.copy()
        self.is_installed = True
        self._early = {n: record for n, record in self._early.items() if n > progress.number}
        self.confirmed = 0
        instructions = self._install_successor()
        if self.successor is None:
            instructions += self._confirm(progress.number)
        return [*instructions, *self._follow()]

    def confirm(self, number: int, epoch: int) -> list[Instruction]:
        """Record that all servers after this one have the records (changes) up to `number`."""
        if epoch != self.view.epoch or number <= self.confirmed or not self.is_installed:
            return []
        return [*self._confirm(number), *(self._freed() if self.is_head else [])]

    def resend(self) -> list[Instruction]:
        """Send unconfirmed records (changes) again, on links that lose messages."""
        instructions: list[Instruction] = []
        if not self.is_installed:
            return instructions
        if self.successor is not None:
            self._sent_to = None
            instructions += self._install_successor()
            instructions += [SendOn(number) for number in self.log]
        if self.predecessor is not None:
            instructions.append(Confirm(self.confirmed))
        return instructions

    def clock(self, worker: int) -> int:
        """Return the next clock of a worker, by the applied records.

        Clocks that enough other workers (a quorum) have completed are skipped.
        """
        clock = self.applied.clocks.get(worker, self.view.members.get(worker, 0))
        while clock < self.applied.completed and self.decided.is_over(clock):
            clock += 1
        return clock

    def waiting(self) -> list[str]:
        """Return the pending waits of pulls as lines of text."""
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
                lines.append(f"worker {worker} waits at clock {clock} for pushes from {names}")
        return lines

    def awaited(self) -> set[int]:
        """Return the workers with pushes that waiting requests of this shard need."""
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
        """Return the number of each worker's first step whose push has not arrived."""
        return self._kept.clocks_after(self.applied.clocks_of(self.view.members))

    def _install_successor(self) -> list[Instruction]:
        """Send the state once to a successor that joins the chain."""
        successor = self.successor
        since = None if successor is None else self.view.joining.get(successor)
        if successor is None or since is None or self._sent_to == (successor, since):
            return []
        self._sent_to = successor, since
        return [Install(successor)]

    def _discard(self) -> list[Instruction]:
        """Leave the chain, and discard the state."""
        instructions = self._redirect()
        self.is_installed = False
        self._since, self._sent_to = -1, None
        self.log.clear()
        self._early.clear()
        return instructions

    def _redirect(self) -> list[Instruction]:
        """Answer all pending requests with `Moved`, and drop the kept pushes."""
        kept, self._kept = self._kept.requests, KeptPushes()
        requests = [*kept.values(), *self._parked]
        requests += [request for _, request in self._accepts]
        self._parked.clear()
        self._accepts.clear()
        instructions: list[Instruction] = [Moved(request) for request in requests]
        return [*instructions, DropPushes(tuple(kept))] if kept else instructions

    def _decide(self) -> list[Instruction]:
        """Make records of the pushes that are complete under the consistency."""
        instructions: list[Instruction] = []
        members = self.view.members
        while (record := next_record(self._kept, self.decided, members)) is not None:
            instructions += self._begin(record)
        return instructions

    def _begin(self, record: ShardRecord) -> list[Instruction]:
        """Decide on a record and send it down the chain; it is applied once confirmed."""
        self.decided.advance(record)
        self.log[record.number] = record
        requests = self._kept.take((*record.pushes, *record.dropped))
        self._accepts += [(record.number, request) for request in requests]
        instructions: list[Instruction] = [Merge(record)]
        if record.dropped:
            instructions.append(DropPushes(record.dropped))
        if self.successor is not None:
            return [*instructions, SendOn(record.number)]
        return [*instructions, *self._confirm(record.number)]

    def _follow(self) -> list[Instruction]:
        """Apply the received records of the predecessor, up to the first missing one."""
        instructions: list[Instruction] = []
        while self.is_installed and self.applied.number + 1 in self._early:
            record = self._early.pop(self.applied.number + 1)
            self.applied.advance(record)
            self.log[record.number] = record
            instructions.append(Apply(record))
            if self.successor is not None:
                instructions.append(SendOn(record.number))
        if self.is_installed and self.successor is None and self.applied.number > self.confirmed:
            instructions += self._confirm(self.applied.number)
        return instructions

    def _confirm(self, number: int) -> list[Instruction]:
        """Mark all records up to `number` as confirmed; accept the requests that wait for them."""
        instructions: list[Instruction] = []
        for record in [logged for n, logged in self.log.items() if n <= number]:
            del self.log[record.number]
            if record.number > self.applied.number:  # at the head
                self.applied.advance(record)
                instructions.append(Apply(record))
        self.confirmed = max(self.confirmed, number)
        if self.predecessor is not None:
            instructions.append(Confirm(self.confirmed))
        instructions += [Accept(request) for n, request in self._accepts if n <= self.confirmed]
        self._accepts = [accept for accept in self._accepts if accept[0] > self.confirmed]
        return instructions

    def _accept_from(self, number: int, request: Request) -> list[Instruction]:
        """Accept a request, now or once the record `number` is confirmed."""
        if number <= self.confirmed:
            return [Accept(request)]
        self._accepts.append((number, request))
        return []

    def _freed(self) -> list[Instruction]:
        """Return answers for pulls that are now fresh enough."""
        if not self._parked or self.applied.number > self.confirmed:
            return []  # a new head must not return values that its successors may lack
        freed = [r for r, (worker, clock) in self._parked.items() if self._shows(worker, clock)]
        for request in freed:
            del self._parked[request]
        return [AnswerPull(request) for request in freed]

    def _shows(self, worker: int, clock: int) -> bool:
        """Return whether the values are new enough for a pull."""
        rule = self.applied.rules.at(clock)
        if self.applied.completed < clock - rule.staleness:
            return False
        clocks = self.applied.clocks_of(self.view.members)
        return rule.by_clock or clocks.get(worker, clock) >= clock

    def _check(self, worker: int) -> None:
        if worker not in self.view.members:
            known = ", ".join(map(str, self.view.members)) or "none"
            msg = f"worker {worker} does not train this table, only workers {known} do"
            raise CommError(msg)
