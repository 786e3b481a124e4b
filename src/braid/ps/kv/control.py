"""Barriers and departures: requests of nodes to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import asdict

from braid.errors import BraidError, CommError
from braid.ps.kv.app import App, Ticket
from braid.ps.kv.messages import Candidate, Depart, Enter, Numbered
from braid.ps.kv.protocol.members_state import KVInstruction, KVMembersState, Refuse
from braid.ps.messages import Failure, Here, NodeJoin, Released, RequestRefused
from braid.ps.protocol.directory import SCHEDULER
from braid.ps.protocol.members_state import PublishDirectory, ReleaseNodes
from braid.runtime.message import Delivery, Failed, Message

if TYPE_CHECKING:
    from braid.ps.kv.node import KVNode

__all__ = ["CONTROL_APP", "Control", "KVScheduler", "Opened"]

CONTROL_APP = -1  # programs cannot use it
Opened: TypeAlias = Callable[[str], None]  # called with the error of a barrier; "" for success


class Control(App):
    """Requests of a node to the scheduler."""

    def __init__(self, node: KVNode) -> None:
        super().__init__(node, CONTROL_APP)

    def enter(self, group: int, number: int) -> int:
        """Enter barrier `number` of a group of nodes; return the timestamp to wait for."""
        return self._ask(
            {0: SCHEDULER}, lambda head: (Enter(**asdict(head), group=group, number=number), ())
        )

    def depart(self) -> int:
        """Report to the scheduler that this node has finished; return the timestamp to wait for."""
        return self._ask({0: SCHEDULER}, lambda head: (Depart(**asdict(head)), ()))

    def _execute(self, delivery: Delivery, ticket: Ticket) -> None:
        del delivery, ticket
        msg = (
            f"{self._node.name} is not the scheduler, and only the scheduler can manage "
            "barriers: send the request to the scheduler"
        )
        raise CommError(msg)


class KVScheduler(Control):
    """The scheduler's side of `Control`: carries out the decisions of `KVMembersState`."""

    def __init__(self, node: KVNode) -> None:
        super().__init__(node)
        self.state: KVMembersState[Opened] = KVMembersState(node.num_servers, node.num_workers)
        self._postoffice.register(
            {NodeJoin: self._join, Candidate: self._number},
            on_lost=self._lost,
            on_resend=self._publish_losses,
            waiting=self.state.waiting,
        )

    def enter_here(self, group: int, number: int, opened: Opened) -> None:
        """Enter barrier `number` of a group as scheduler; `opened` is notified when it opens."""
        with self._postoffice.lock:
            self._act(self.state.enters(SCHEDULER, number, group, opened))

    def _execute(self, delivery: Delivery, ticket: Ticket) -> None:
        opened = partial(self._opened, ticket)
        with self._postoffice.lock:
            match delivery.message:
                case Enter(group=group, number=number):
                    self._act(self.state.enters(ticket.node, number, group, opened))
                case Depart():
                    self._act(self.state.departs(ticket.node))
                    opened("")

    def _opened(self, ticket: Ticket, problem: str) -> None:
        self._reply(ticket, RequestRefused(problem) if problem else Released((ticket.part,)))

    def _join(self, delivery: Delivery) -> None:
        message = delivery.message
        assert isinstance(message, NodeJoin), "this handler is for nodes that join"
        try:
            self._act(self.state.joins(delivery.sender, delivery.incarnation, message.address))
        except BraidError as exc:
            self._postoffice.send(delivery.sender, Failure(str(exc)))
            return
        if self.state.directory is not None:
            self._postoffice.send(delivery.sender, Here(self.state.directory), answers=delivery.id)

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
        self._act(self.state.loses(node, self._postoffice.links.losses[node].reason))

    def _publish_losses(self) -> None:
        """Publish the lost nodes again, on links that lose messages."""
        if self.state.directory is not None and self.state.lost:
            self._postoffice.publish(self.state.directory)

    def _act(self, instructions: Sequence[KVInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case PublishDirectory(directory):
                    self._postoffice.publish(directory)
                case ReleaseNodes(tickets):
                    for opened in tickets:
                        opened("")
                case Refuse(tickets, problem):
                    for opened in tickets:
                        opened(problem)
