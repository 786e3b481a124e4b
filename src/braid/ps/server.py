"""A server: carries out the decisions of its shards' state machines, on tensors and a van.

    to workers     Push, Pull, TableChange ──> ShardState ──> Accepted, Pulled, Elsewhere
    in the chain   Update, RecordsConfirmed, ShardSnapshot, both in and out

A request concerns several shards, which are answered when they are ready (`answers`). A message of
a later epoch is deferred until this server has that directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch

from braid.errors import BraidError, CommError
from braid.ps.answers import Answers
from braid.ps.messages import (
    Drain,
    Failure,
    Installed,
    Loads,
    Pull,
    Push,
    RecordsConfirmed,
    RequestRefused,
    ShardSnapshot,
    TableChange,
    Update,
)
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import (
    NUM_VIRTUAL,
    SCHEDULER,
    Directory,
    server_node,
    worker_node,
)
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
    SendOn,
    View,
)
from braid.ps.protocol.shard_state import ShardState
from braid.ps.shard import TableShard
from braid.ps.storage import State as StoredState
from braid.ps.storage import Tensors
from braid.ps.table import TableSpec
from braid.ps.waits import Awaited
from braid.runtime.message import Delivery, Message, split_node
from braid.runtime.tensor_buffers import as_buffers, from_buffers

__all__ = ["Server"]


class Server:
    """Server of tables: answers the pushes and pulls for the shards that are on this server.

    Args:
        postoffice: Sends and receives the node's messages.
        number: Number of the server.
        rebalance_s: Seconds between load reports to the scheduler; no reports when None.

    Attributes:
        is_drained: Whether the server has left the run after a call of `drain`.
        alone_s: Seconds since this server lost its last link to another node; 0 while it has one.
    """

    def __init__(
        self, postoffice: Postoffice, number: int, rebalance_s: float | None = None
    ) -> None:
        self._postoffice, self._send = postoffice, postoffice.send
        self._number = number
        self._tables: dict[str, TableSpec] = {}
        self._shards: dict[tuple[str, int], TableShard] = {}
        self._answers = Answers(postoffice)
        self._acted: list[TableShard] = []  # in the event that is being handled
        self._deferred: list[Delivery] = []
        self._reported: set[tuple[int, int]] = set()  # installed virtual shards, `since` of each
        self._requests = [0] * NUM_VIRTUAL  # by virtual shard, since the last report
        self._rebalance_s = rebalance_s
        self._loads_ns = postoffice.van.clock.now_ns()
        self._is_draining = False
        self._is_member = False  # of the directory
        self._linked_ns = self._loads_ns  # last time at which another node was connected
        self.alone_s = 0.0
        self.is_drained = False
        postoffice.register(
            dict.fromkeys(
                (Push, Pull, TableChange, Update, RecordsConfirmed, ShardSnapshot), self.handle
            ),
            on_directory=self._configure,
            on_resend=self._resend,
            on_linked=self._linked,
            on_tick=self._tick,
            waiting=self.waiting,
        )

    def add(self, table: TableSpec, states: Sequence[StoredState] | None = None) -> None:
        """Add a table to serve; `states` has a snapshot of each shard, None for first values."""
        self._tables[table.name] = table
        for number in range(table.num_shards):
            state = ShardState(self._number, table.consistency)
            storage = table.make_storage(number)
            if states is not None:
                storage.load(states[number])
            self._shards[table.name, number] = TableShard(
                table.name, number, table.virtual(number), state, storage
            )

    @property
    def shards(self) -> list[TableShard]:
        """All shards, including shards without state on this server."""
        return list(self._shards.values())

    def waiting(self) -> list[str]:
        """Return the pending waits of all shards as lines of text, without duplicates."""
        return sorted({line for shard in self.shards for line in shard.state.waiting()})

    def alone_text(self, seconds: float) -> str:
        """Return the error message of a server that has had no link for `seconds`."""
        loss = self._postoffice.links.losses.get(SCHEDULER)
        return (
            f"server {self._number} has had no link to any other node for {seconds:g} s (the "
            f"scheduler: {loss.reason if loss else 'unknown'}): its host was cut off, or the run "
            "has ended meanwhile"
        )

    def drain(self) -> None:
        """Ask the scheduler to move all shards to other servers; the server repeats the request."""
        self._is_draining = True
        self._send(SCHEDULER, Drain())

    # -- events

    def handle(self, delivery: Delivery) -> None:
        """Handle a message; refuse an invalid one, and continue."""
        message: Any = delivery.message
        epoch = message.since if isinstance(message, ShardSnapshot) else message.epoch
        if epoch > self._postoffice.epoch:
            self._deferred.append(delivery)
            return
        role, worker = split_node(delivery.sender)
        directory = self._postoffice.directory
        if role == "worker" and directory and directory.lives.get(worker) != delivery.incarnation:
            self._refuse(delivery, directory)
            return
        try:
            self._dispatch(delivery)
        except BraidError as exc:
            self._answers.drop((delivery.sender, delivery.id))
            self._send(delivery.sender, RequestRefused(str(exc)), answers=delivery.id)
        self._finish()

    def _refuse(self, delivery: Delivery, directory: Directory) -> None:
        """Refuse a worker process that was removed from the run, and send it the reason.

        Its earlier pushes may still be applied. Later ones are not accepted, so that each accepted
        push is applied, and none is mistaken for a push of the worker's next process.
        """
        _, worker = split_node(delivery.sender)
        reason = "nothing came from it for too long, or it left"
        if worker in directory.lives:
            reason = "another process has taken its place"
        text = f"worker {worker} was removed from the run, which goes on without it: {reason}"
        self._send(delivery.sender, Failure(text, is_removed=True, life=delivery.incarnation))

    def _dispatch(self, delivery: Delivery) -> None:
        message = delivery.message
        match message:
            case Push() | Pull():
                self._ask(delivery, message)
            case TableChange():
                shards = [self._shard(message.table, number) for number in message.shards]
                if message.lr is not None:
                    for shard in shards:
                        shard.storage.check_lr(message.lr)
                request = delivery.sender, delivery.id
                self._answers.add(request, dict.fromkeys(message.shards, ()))
                for shard in shards:
                    instructions = shard.state.change(
                        message.clock,
                        message.consistency,
                        message.lr,
                        request,
                        lr_before=None if message.lr is None else shard.storage.lr,
                    )
                    self._act(shard, instructions)
            case Update():
                shard = self._shard(message.table, message.shard)
                sums = tuple(from_buffers(message.specs, delivery.buffers))
                self._act(shard, shard.follow(message.record, sums, message.epoch))
            case RecordsConfirmed():
                shard = self._shard(message.table, message.shard)
                instructions = shard.state.confirm(message.number, message.epoch)
                self._act(shard, instructions)
            case ShardSnapshot():
                self._install(message, from_buffers(message.specs, delivery.buffers))

    def _ask(self, delivery: Delivery, message: Push | Pull) -> None:
        """Handle a push or a pull: check all shards before any of them changes."""
        role, worker = split_node(delivery.sender)
        if role != "worker":
            msg = f"only workers can push and pull, but {delivery.sender} did"
            raise CommError(msg)
        if len(message.specs) != len(message.shards):
            msg = (
                f"a message has {len(message.shards)} shards, but {len(message.specs)} tensors of "
                "values"
            )
            raise CommError(msg)
        flat = [*chain.from_iterable(message.specs)]
        tensors = iter(from_buffers(flat, delivery.buffers))
        values: dict[int, Tensors] = {}
        for number, specs in zip(message.shards, message.specs, strict=True):
            value = values[number] = tuple(islice(tensors, len(specs)))
            storage = self._shard(message.table, number).storage
            if isinstance(message, Push):
                storage.check(value)
                if message.lr is not None:
                    storage.check_lr(message.lr)
            elif not message.whole and not message.number:
                storage.check_query(value)
        request = delivery.sender, delivery.id
        if isinstance(message, Pull):
            self._answers.add(request, values, whole=message.whole, number=message.number)
        else:
            self._answers.add(request, values)
        for number, value in values.items():
            shard = self._shards[message.table, number]
            self._requests[shard.virtual] += 1
            if isinstance(message, Push):
                instructions = shard.state.push(
                    worker, message.clock, request, message.key, message.lr
                )
                self._act(shard, instructions, value)
            else:
                self._act(shard, shard.state.pull(worker, message.clock, request))
                self._answers.note_parked(request, number)

    def _finish(self) -> None:
        """Send the answers; then step, and record events of pushes with their largest staleness."""
        self._answers.send()
        acted, self._acted = self._acted, []
        lags: dict[tuple[str, tuple[int, int]], int] = {}
        dropped: set[tuple[str, tuple[int, int]]] = set()
        for shard in acted:
            shard.step()
            for push, lag in shard.staleness.items():
                lags[shard.table, push] = max(lag, lags.get((shard.table, push), 0))
            dropped.update([(shard.table, push) for push in shard.dropped])
            shard.staleness.clear()
            shard.dropped.clear()
        for lag in lags.values():
            self._postoffice.events.instant("push", seq=lag)
        for _, (worker, _) in dropped:
            self._postoffice.events.instant("late push", seq=worker)

    def _configure(self, directory: Directory) -> None:
        was_member, self._is_member = self._is_member, self._number in directory.servers
        if was_member and not self._is_member:
            self.is_drained = self._is_draining
            if not self._is_draining:  # the scheduler believed it lost
                self._postoffice.announce()
        for shard in self.shards:
            view = View(
                directory.epoch,
                directory.chains[shard.virtual],
                directory.joining[shard.virtual],
                directory.workers,
            )
            self._act(shard, shard.state.configure(view))
        self._report()
        self._finish()
        deferred, self._deferred = self._deferred, []
        for delivery in deferred:
            self.handle(delivery)

    def _tick(self) -> None:
        now_ns = self._postoffice.van.clock.now_ns()
        office = self._postoffice
        office.waits.hold(self._awaited)
        if office.links.works(SCHEDULER) or office.van.peers:
            self._linked_ns = now_ns
        self.alone_s = (now_ns - self._linked_ns) / 1e9
        if self._rebalance_s is None or now_ns - self._loads_ns < self._rebalance_s * 1e9:
            return
        self._loads_ns = now_ns
        self._send(SCHEDULER, Loads(self._requests))
        self._requests = [0] * NUM_VIRTUAL

    def _awaited(self) -> Awaited:
        """Return the nodes that requests at this server wait for, as `Waits.hold` needs them."""
        nodes: set[str] = set()
        for shard in self.shards:
            state = shard.state
            if state.is_head:
                nodes.update(map(worker_node, state.awaited()))
            if state.log and state.successor is not None:
                nodes.add(server_node(state.successor))
        lines = self.waiting() or ["pushes wait for others"]
        return frozenset(nodes), lines, sum(shard.state.decided.number for shard in self.shards)

    def _resend(self) -> None:
        for shard in self.shards:
            self._act(shard, shard.state.resend())
        self._reported.clear()
        self._report()
        if self._is_draining:
            self._send(SCHEDULER, Drain())

    def _linked(self, node: str) -> None:
        if node == SCHEDULER:
            if self._is_draining:
                self._send(SCHEDULER, Drain())
            self._reported.clear()
            self._report()
        for shard in self.shards:
            neighbours = {shard.state.successor, shard.state.predecessor}
            if node in {server_node(number) for number in neighbours if number is not None}:
                self._act(shard, shard.state.resend())

    # -- instructions

    def _act(
        self, shard: TableShard, instructions: Sequence[Instruction], value: Tensors = ()
    ) -> None:
        """Carry out a shard's decisions; `value` is the value of a push, which `Keep` stores."""
        state = shard.state
        self._acted.append(shard)
        for instruction in instructions:
            match instruction:
                case Keep(worker, clock):
                    shard.kept[worker, clock] = value
                case DropPushes(pushes):
                    for push in pushes:
                        shard.kept.pop(push, None)
                case Merge() | Apply():
                    shard.due.append(instruction)
                case SendOn(number):
                    shard.step()
                    specs, buffers = as_buffers(shard.sums[number])
                    update = Update(
                        state.view.epoch, shard.table, shard.number, state.log[number], specs
                    )
                    self._send_to(state.successor, update, buffers)
                case Confirm(number):
                    confirmed = RecordsConfirmed(
                        state.view.epoch, shard.table, shard.number, number
                    )
                    self._send_to(state.predecessor, confirmed)
                case Install(server):
                    snapshot, buffers = shard.snapshot(server)
                    self._send_to(server, snapshot, buffers)
                case Accept() | AnswerPull() | Moved():
                    self._answers.resolve(shard, instruction)

    def _install(self, message: ShardSnapshot, tensors: Sequence[torch.Tensor]) -> None:
        shard = self._shard(message.table, message.shard)
        joins_since = shard.state.view.joining.get(self._number)
        if not shard.state.is_installed and joins_since == message.since:
            self._act(shard, shard.install(message, tensors))
            self._report()

    def _report(self) -> None:
        """Report virtual shards to the scheduler once all of their shards are installed here."""
        directory = self._postoffice.directory
        if directory is None:
            return
        for virtual, joining in enumerate(directory.joining):
            since = joining.get(self._number)
            if since is None or (virtual, since) in self._reported:
                continue
            virtual_shards = [shard for shard in self.shards if shard.virtual == virtual]
            if all(shard.state.is_installed for shard in virtual_shards):
                self._reported.add((virtual, since))
                self._send(SCHEDULER, Installed(virtual, self._number, since))

    def _shard(self, table: str, number: int) -> TableShard:
        if table not in self._tables:
            known = ", ".join(sorted(self._tables)) or "none"
            msg = (
                f"the server does not have the table {table!r}, only {known}: declare the same "
                "tables on all nodes"
            )
            raise CommError(msg)
        shard = self._shards.get((table, number))
        if shard is None:
            count = self._tables[table].num_shards
            msg = (
                f"table {table!r} has {count} shards here, but the request is for {number}: "
                "declare the same tables on all nodes"
            )
            raise CommError(f"{msg}: use the same model on workers and servers")
        return shard

    def _send_to(
        self, server: int | None, message: Message, buffers: Sequence[memoryview] = ()
    ) -> None:
        if server is not None:
            self._send(server_node(server), message, buffers)
