"""Received requests, so that each one is executed once.

Problem: a request is sent again if its answer does not come, so it may arrive several times. A
receiver that remembers all requests grows without bound; one that remembers the last thousand is
not reliable. PS-Lite builds message numbers from the sender's id and a counter, and two senders can
have the same numbers.

Idea: the sender numbers its requests, and each request carries the number `seen` below which all
requests are answered. The receiver need not remember those: if one arrives again, the sender drops
the answer. A stream is one customer in one process of a node; a new process of the node ends the
streams of the previous one.

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
    """Identity of a stream: the requests of one customer in one process, numbered consecutively."""

    sender: str
    incarnation: int
    app: int
    customer: int


class RequestProgress(Enum):
    """State of a request for which no answer is recorded: new, under way, or over."""

    NEW = "execute it"
    UNDER_WAY = "it is being executed"
    OVER = "its sender has the answer"


@dataclass(slots=True)
class _Requests(Generic[Reply]):
    """Requests of a stream from `seen` on, with their answers."""

    seen: int = 0
    replies: dict[int, Reply | None] = field(default_factory=dict)


class Executed(Generic[Reply]):
    """Requests that a node has received, with recorded answers: each request is executed once."""

    def __init__(self) -> None:
        self._streams: dict[RequestStream, _Requests[Reply]] = {}
        self._lives: dict[str, int] = {}

    def begin(self, stream: RequestStream, timestamp: int, seen: int) -> RequestProgress | Reply:
        """Record that a request has arrived; return its answer, or its progress without one.

        Requests of the stream with timestamps below `seen` are over: their answers are deleted.
        """
        life = self._lives.setdefault(stream.sender, stream.incarnation)
        if stream.incarnation < life:
            return RequestProgress.OVER
        if stream.incarnation > life:
            self._lives[stream.sender] = stream.incarnation
            for old in [other for other in self._streams if other.sender == stream.sender]:
                del self._streams[old]
        requests = self._streams.setdefault(stream, _Requests())
        if seen > requests.seen:
            requests.seen = seen
            for number in [number for number in requests.replies if number < seen]:
                del requests.replies[number]
        if timestamp < requests.seen:
            return RequestProgress.OVER
        if timestamp not in requests.replies:
            requests.replies[timestamp] = None
            return RequestProgress.NEW
        reply = requests.replies[timestamp]
        return RequestProgress.UNDER_WAY if reply is None else reply

    def cancel(self, stream: RequestStream, timestamp: int) -> None:
        """Forget a request that was not executed, so that its repetition counts as new."""
        requests = self._streams.get(stream)
        if requests is not None and requests.replies.get(timestamp, self) is None:
            del requests.replies[timestamp]

    def finish(self, stream: RequestStream, timestamp: int, reply: Reply) -> bool:
        """Record the answer of a request; return False if an answer was recorded before."""
        requests = self._streams.get(stream)
        if requests is None or timestamp not in requests.replies:
            return True  # the sender does not wait for it any more
        if requests.replies[timestamp] is not None:
            return False
        requests.replies[timestamp] = reply
        return True

    def replace(self, stream: RequestStream, timestamp: int, reply: Reply) -> None:
        """Replace the answer of a request, since the first one could not be sent."""
        requests = self._streams.get(stream)
        if requests is not None and timestamp in requests.replies:
            requests.replies[timestamp] = reply

    def waiting(self) -> list[str]:
        """Return lines of text about requests that the program's functions have not answered."""
        counts = {
            stream: sum(reply is None for reply in requests.replies.values())
            for stream, requests in self._streams.items()
        }
        return [
            f"the handle of app {stream.app} has {count} requests of {stream.sender} unanswered"
            for stream, count in counts.items()
            if count
        ]

    @property
    def num_remembered(self) -> int:
        """Number of requests in memory."""
        return sum(len(requests.replies) for requests in self._streams.values())
