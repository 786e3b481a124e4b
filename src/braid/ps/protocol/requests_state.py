"""A request to several nodes, as a state machine: who has answered, and who must be asked again.

A request has parts, such as the shards of a table. A route says which node has a part now. Parts
with the same node travel in one message. A part is asked for again, at the node that the route then
says, when its node has been lost, or answers that it has it no longer. Requests are sent again in
the order in which they were made.

    begin      SendParts for each node
    answered   Done after the last part
    moved      SendParts again, as soon as the route says another node; with the next route at
               least, which may say the same node, since routes can be missed
    again      SendParts again to the same node
    rerouted   SendParts for all parts that wait for another node than the route says
    lost       nothing: the next route will say another node, or `linked` the same one again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

__all__ = ["Done", "PartsLost", "RequestsState", "SendParts"]

Route: TypeAlias = Callable[[int], "str | None"]


class SendParts(NamedTuple):
    """Send these parts of a request to a node."""

    request: int
    node: str
    parts: tuple[int, ...]


class Done(NamedTuple):
    """All parts of a request are answered."""

    request: int


class PartsLost(NamedTuple):
    """These parts of a request are nowhere."""

    request: int
    parts: tuple[int, ...]


@dataclass(slots=True)
class _Open:
    """A request under way.

    Attributes:
        route: Node of each part.
        asked: Node that each unanswered part was sent to last; empty before that.
        stuck: Parts that must go elsewhere: their node was lost, or does not have them.
    """

    route: Route
    asked: dict[int, str] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)


class RequestsState:
    """Requests of one node that are under way."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def begin(
        self, request: int, parts: Iterable[int], route: Route
    ) -> list[SendParts | Done | PartsLost]:
        """Begin a request."""
        self._open[request] = _Open(route, dict.fromkeys(parts, ""))
        if not self._open[request].asked:
            del self._open[request]
            return [Done(request)]
        return [*self._send(request)]

    def answered(self, request: int, parts: Iterable[int]) -> list[Done]:
        """Record the answer to some parts; answers may come twice."""
        own = self._open.get(request)
        if own is None:
            return []
        for part in parts:
            own.asked.pop(part, None)
            own.stuck.discard(part)
        if own.asked:
            return []
        del self._open[request]
        return [Done(request)]

    def moved(self, request: int, node: str, parts: Iterable[int]) -> list[SendParts | PartsLost]:
        """Ask again for parts that a node does not have; the route may know where they are."""
        own = self._open.get(request)
        if own is None:
            return []
        own.stuck.update(part for part in parts if own.asked.get(part) == node)
        return self._send(request)

    def again(self, request: int, parts: Iterable[int]) -> list[SendParts | PartsLost]:
        """Ask again for parts whose node wants to be asked in another way."""
        own = self._open.get(request)
        if own is None:
            return []
        own.asked.update(dict.fromkeys([part for part in parts if part in own.asked], ""))
        return self._send(request)

    def rerouted(self) -> list[SendParts | PartsLost]:
        """Ask again for all parts whose route has changed, or that had to go elsewhere."""
        for own in self._open.values():
            own.asked.update(dict.fromkeys(own.stuck, ""))
        return [each for request in list(self._open) for each in self._send(request)]

    def lost(self, node: str) -> None:
        """Record that what was sent to a node may not have arrived."""
        for own in self._open.values():
            own.stuck.update(part for part, asked in own.asked.items() if asked == node)

    def linked(self, node: str) -> list[SendParts | PartsLost]:
        """Ask a node again that was lost, and can be reached again."""
        for own in self._open.values():
            for part in [part for part in own.stuck if own.asked[part] == node]:
                own.stuck.discard(part)
                own.asked[part] = ""
        return self.rerouted()

    def resend(self, request: int) -> list[SendParts | PartsLost]:
        """Ask again for all parts of a request, on links that lose messages."""
        own = self._open.get(request)
        if own is None:
            return []
        own.asked = dict.fromkeys(own.asked, "")
        own.stuck.clear()
        return self._send(request)

    def forget(self, request: int) -> None:
        """Forget a request: nobody waits for it any more."""
        self._open.pop(request, None)

    def is_open(self, request: int) -> bool:
        """Whether parts of a request are unanswered."""
        return request in self._open

    def missing(self, request: int) -> dict[int, str]:
        """Return the unanswered parts, with whom they were sent to."""
        own = self._open.get(request)
        return dict(own.asked) if own is not None else {}

    def waits_for(self, request: int, part: int) -> bool:
        """Whether a part is unanswered."""
        own = self._open.get(request)
        return own is not None and part in own.asked

    def _send(self, request: int) -> list[SendParts | PartsLost]:
        own = self._open[request]
        batches: dict[str, list[int]] = {}
        gone: list[int] = []
        for part, asked in own.asked.items():
            node = own.route(part)
            if node is None:
                gone.append(part)
            elif asked != node:
                own.asked[part] = node
                own.stuck.discard(part)
                batches.setdefault(node, []).append(part)
        done: list[SendParts | PartsLost] = [
            SendParts(request, node, tuple(parts)) for node, parts in batches.items()
        ]
        if gone:
            done.append(PartsLost(request, tuple(gone)))
        return done
