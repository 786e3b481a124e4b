"""Requests that have been received, so that each is executed once.

Problem: a request is sent again when its answer does not come, so it may arrive several times. A
receiver that remembers all requests grows without end; one that remembers the last thousand
guesses. PS-Lite makes the number of a message out of the sender's id and a counter, and two senders
can have the same numbers.

Idea: the sender counts its requests, and each request says below which number all are answered.
What lies below needs no memory: if it arrives again, the sender drops the answer. A stream is one
customer in one life of one node, and a new life ends the streams of the one before.

    arrives            below `seen`    executed          under way    else
    begin returns      Over            its answer        UnderWay     New

Source: A. Birrell, B. Nelson, Implementing Remote Procedure Calls, TOCS 1984: an acknowledgement in
the next call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Executed", "RequestProgress", "RequestStream"]

Reply = TypeVar("Reply")


class RequestStream(NamedTuple):
    """Requests that are counted together."""

    sender: str
    incarnation: int
    app: int
    customer: int


class RequestProgress(Enum):
    """State of a request that has no answer."""

    NEW = "execute it"
    UNDER_WAY = "it is being executed"
    OVER = "its sender has the answer"


@dataclass(slots=True)
class _Requests(Generic[Reply]):
    """Requests of a stream from `seen` on, with their answers."""

    seen: int = 0
    replies: dict[int, Reply | None] = field(default_factory=dict)


class Executed(Generic[Reply]):
    """Requests of all streams, with the answers that may be wanted again."""

    def __init__(self) -> None:
        self._streams: dict[RequestStream, _Requests[Reply]] = {}
        self._lives: dict[str, int] = {}

    def begin(self, stream: RequestStream, timestamp: int, seen: int) -> RequestProgress | Reply:
        """Record that a request has arrived; return its answer if it has one."""
        life = self._lives.setdefault(stream.sender, stream.incarnation)
        if stream.incarnation < life:
            return RequestProgress.OVER
        if stream.incarnation > life:
            self._lives[stream.sender] = stream.incarnation
            for other in [each for each in self._streams if each.sender == stream.sender]:
                del self._streams[other]
        own = self._streams.setdefault(stream, _Requests())
        if seen > own.seen:
            own.seen = seen
            for number in [each for each in own.replies if each < seen]:
                del own.replies[number]
        if timestamp < own.seen:
            return RequestProgress.OVER
        if timestamp not in own.replies:
            own.replies[timestamp] = None
            return RequestProgress.NEW
        reply = own.replies[timestamp]
        return RequestProgress.UNDER_WAY if reply is None else reply

    def cancel(self, stream: RequestStream, timestamp: int) -> None:
        """Forget a request that was not executed, so that it is new when it comes again."""
        own = self._streams.get(stream)
        if own is not None and own.replies.get(timestamp, self) is None:
            del own.replies[timestamp]

    def finish(self, stream: RequestStream, timestamp: int, reply: Reply) -> bool:
        """Record the answer of a request; False if it has one already."""
        own = self._streams.get(stream)
        if own is None or timestamp not in own.replies:
            return True  # nobody waits for it any more
        if own.replies[timestamp] is not None:
            return False
        own.replies[timestamp] = reply
        return True

    def replace(self, stream: RequestStream, timestamp: int, reply: Reply) -> None:
        """Record another answer, since the first could not be sent."""
        own = self._streams.get(stream)
        if own is not None and timestamp in own.replies:
            own.replies[timestamp] = reply

    def waiting(self) -> list[str]:
        """Return whose requests no handle has answered, as text."""
        counts = {
            stream: sum(reply is None for reply in own.replies.values())
            for stream, own in self._streams.items()
        }
        return [
            f"the handle of app {stream.app} has {count} requests of {stream.sender} unanswered"
            for stream, count in counts.items()
            if count
        ]

    @property
    def num_remembered(self) -> int:
        """Number of requests in memory."""
        return sum(len(own.replies) for own in self._streams.values())
