"""Lists that ranks exchange in a cycle: news of each rank, and the decisions of rank 0. Pure."""

from __future__ import annotations

import msgspec

from braid.fusion.request import Request, Response
from braid.fusion.stall import Stall

__all__ = ["NOTHING", "Answer", "RankList", "read_answer", "read_list"]


class RankList(msgspec.Struct, array_like=True):
    """News of a rank.

    Attributes:
        requests: New requests.
        ages_s: Seconds since the submission of each request.
        joined: Whether the rank has joined.
        stopping: Reason why everything should end; empty to go on.
    """

    requests: list[Request]
    ages_s: list[float]
    joined: bool
    stopping: str


class Answer(msgspec.Struct, array_like=True):
    """Decisions of rank 0.

    Attributes:
        responses: Responses in the order in which they are carried out.
        last_joined: Position of the rank that joined last, when all have; -1 otherwise.
        stalls: Names that wait for ranks.
        stop: Reason why everything ends; empty to go on.
        settings: Limit of a batch in bytes and cycle time in seconds, when they change.
    """

    responses: list[Response]
    last_joined: int
    stalls: list[Stall]
    stop: str
    settings: tuple[int, float] | None = None


NOTHING = Answer([], -1, [], "")

# made here: msgspec (0.22) crashes where two threads make the first decoder of a type at once
read_list = msgspec.msgpack.Decoder(RankList).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
