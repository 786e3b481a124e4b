"""A post office sends over the link that it has, and connects only if there is none."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import PeerLostError, RendezvousError, StaleError
from braid.ps.messages import Drain, Failure
from braid.ps.postoffice import Postoffice
from braid.runtime.clock import VirtualClock
from braid.runtime.message import Delivery


class Links:
    """Van that notes what it is asked to do, and answers each call by the next given error."""

    def __init__(self, *answers: Exception | None) -> None:
        self.node, self.incarnation, self.clock = "server:0", 1, VirtualClock()
        self.peers: tuple[str, ...] = ()
        self.answers, self.calls = list(answers), []

    def _next(self, call: str) -> None:
        self.calls.append(call)
        if (error := self.answers.pop(0)) is not None:
            raise error

    def send(self, to: str, message: Any, **_: Any) -> None:
        self._next(f"send {type(message).__name__} to {to}")

    def connect(self, to: str, address: str, **_: Any) -> None:
        self._next(f"connect to {to} at {address}")


SEND, CONNECT = "send Drain to scheduler", "connect to scheduler at here"
LOST, STALE, UNREACHED = PeerLostError("lost"), StaleError("stale"), RendezvousError("none")


@pytest.mark.parametrize(
    ("answers", "calls", "is_sent", "works"),
    [
        ([None], [SEND], True, True),
        ([LOST, None, None], [SEND, CONNECT, SEND], True, True),
        ([LOST, UNREACHED], [SEND, CONNECT], False, False),
        ([LOST, None, LOST], [SEND, CONNECT, SEND], False, False),
        ([STALE], [SEND], False, False),
    ],
)
def test_a_message_goes_over_a_new_link_if_there_was_none(answers, calls, is_sent, works):
    van = Links(*answers)
    office = Postoffice(van, "here")
    assert office.send("scheduler", Drain()) is is_sent
    assert (van.calls, office.links.works("scheduler")) == (calls, works)


def test_a_link_that_has_just_failed_is_not_tried_for_each_message():
    van = Links(LOST, UNREACHED, LOST)
    office = Postoffice(van, "here")
    assert [office.send("scheduler", Drain()) for _ in range(2)] == [False, False]
    assert van.calls == [SEND, CONNECT, SEND]


def test_the_removal_of_an_earlier_process_does_not_concern_its_successor():
    office = Postoffice(Links())
    for life in (9, 1):
        office.handle(Delivery("server:0", Failure(f"{life} was removed", True, life)))
    assert (office.failure, office.is_removed) == ("1 was removed", True)
