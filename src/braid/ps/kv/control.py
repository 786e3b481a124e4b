"""Barriers and departures: requests of nodes to the scheduler, answered once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import asdict

from braid.errors import BraidError, CommError
from braid.ps.kv.app import App, Ticket
from braid.ps.kv.messages import Candidate, Depart, Enter, KVRequest, Members, Numbered, Passed
from braid.ps.kv.protocol.members_state import (
    Instruction,
    MembersState,
    PublishMembers,
    Refuse,
)
from braid.ps.messages import Failure, Here, NodeJoin, RequestRefused
from braid.ps.protocol.directory import SCHEDULER, Directory
from braid.runtime.message import Delivery, Failed, Message
from braid.runtime.wire import Buffer

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["CONTROL_APP", "Control", "KVScheduler", "Opened"]

CONTROL_APP = -1  # no program can have it
Opened: TypeAlias = Callable[[str], None]  # called with why a barrier cannot open, or with ""


class Control(App):
    """Requests of a node to the scheduler."""

    def __init__(self, node: KVNode) -> None:
        super().__init__(node, CONTROL_APP)

    def enter(self, group: int, number: int) -> int:
        """Come to a barrier; returns the timestamp to wait for."""
        return self._ask_scheduler(lambda own: Enter(**asdict(own), group=group, number=number))

    def depart(self) -> int:
        """Inform the scheduler that this node is done; returns the timestamp to wait for."""
        return self._ask_scheduler(lambda own: Depart(**asdict(own)))

    def _ask_scheduler(self, make: Callable[[KVRequest], Message]) -> int:
        def build(header: KVRequest) -> tuple[Message, Sequence[Buffer]]:
            return make(header), ()

        return self._ask({0: SCHEDULER}, build)

    def _execute(self, message: KVRequest, delivery: Delivery, ticket: Ticket) -> None:
        del message, delivery, ticket
        msg = f"{self._node.name} is not the scheduler: it has no barriers"
        raise CommError(msg)


class KVScheduler(Control):
    """Carries out what `MembersState` decides."""

    def __init__(self, node: KVNode) -> None:
        super().__init__(node)
        self._version = 0
        self.state: MembersState[Opened] = MembersState(node.num_servers, node.num_workers)
        self._postoffice.register(
            {NodeJoin: self._join, Candidate: self._number},
            on_lost=self._lost,
            on_resend=self._publish_losses,
            waiting=self.state.waiting,
        )

    def enter_here(self, group: int, number: int, opened: Opened) -> None:
        """Let the scheduler itself come to a barrier."""
        with self._postoffice.lock:
            self._act(self.state.enters(SCHEDULER, number, group, opened))

    def _execute(self, message: KVRequest, delivery: Delivery, ticket: Ticket) -> None:
        del delivery
        opened = partial(self._opened, ticket)
        with self._postoffice.lock:
            if isinstance(message, Enter):
                done = self.state.enters(ticket.node, message.number, message.group, opened)
                self._act(done)
            elif isinstance(message, Depart):
                self._act(self.state.departs(ticket.node))
                opened("")

    def _opened(self, ticket: Ticket, problem: str) -> None:
        self._reply(ticket, RequestRefused(problem) if problem else Passed((ticket.part,)))

    def _join(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, NodeJoin), "this handler is for nodes that join"
        try:
            done = self.state.joins(delivery.sender, delivery.incarnation, message.address)
        except BraidError as exc:
            self._postoffice.send(delivery.sender, Failure(str(exc)))
            return
        self._act(done)

    def _number(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, Candidate), "this handler is for processes without number"
        answer: Message
        try:
            answer = Numbered(self.state.number(delivery.sender, message.role))
        except BraidError as exc:
            answer = Failed(type(exc).__name__, str(exc))
        self._postoffice.send(delivery.sender, answer, answers=delivery.id)

    def _lost(self, node: str) -> None:
        self._act(self.state.loses(node, self._postoffice.losses[node].reason))

    def _publish_losses(self) -> None:
        """Repeat what nodes may not have received, on links that lose messages."""
        if self.state.is_complete and self.state.lost:
            self._act([PublishMembers(tuple(self.state.addresses))])

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, PublishMembers):
                self._publish(each.nodes)
                continue
            problem = each.text if isinstance(each, Refuse) else ""
            for opened in each.tickets:
                opened(problem)

    def _publish(self, nodes: Sequence[str]) -> None:
        """Send addresses to nodes; losses change the directory, so that nobody calls the lost."""
        state, postoffice = self.state, self._postoffice
        servers: dict[int, str] = {}
        workers: list[int] = []
        for node, address in state.addresses.items():
            role, _, number = node.partition(":")
            if node not in state.lost and role == "server":
                servers[int(number)] = address
            elif role == "worker":
                workers.append(int(number))
        last = postoffice.directory
        if last is None or last.servers != servers:
            epoch = 0 if last is None else last.epoch + 1
            directory = Directory(
                epoch=epoch,
                replicas=0,
                servers=servers,
                chains=(),
                joining=(),
                workers=dict.fromkeys(workers, 0),
            )
            postoffice.set_directory(directory)
        assert postoffice.directory is not None, "it was made above"
        self._version += 1
        members = Members(self._version, dict(state.addresses), dict(state.lost))
        self._node.set_members(members)
        for node in nodes:
            if postoffice.van.is_connected(node):
                postoffice.send(node, Here(postoffice.directory))
                postoffice.send(node, members)
