"""Requests of a rank, responses that all ranks have agreed on, and lists of both. Pure."""

from __future__ import annotations

from math import prod

import msgspec

from braid.compat.horovod.fusion.stall import Stall
from braid.errors import ConfigError

__all__ = [
    "BATCHED",
    "JOINABLE",
    "NOTHING",
    "RankList",
    "Request",
    "Response",
    "ResponseList",
    "check_sendable",
    "read_answer",
    "read_list",
]

BATCHED = frozenset({"all_reduce"})  # kinds that share a message with others of their kind
# kinds that can go on without a rank that has joined
JOINABLE = frozenset({"all_reduce", "barrier"})


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One operation on one tensor, as one rank asks for it.

    Attributes:
        name: Name by which requests of several ranks belong together.
        kind: all_reduce, all_gather, broadcast, all_to_all, reduce_scatter, barrier, or agree (on
            `text`).
        dtype: Data type by torch's name.
        shape: Shape of this rank's tensor.
        itemsize: Bytes of an element.
        op: Reduction.
        root: Group rank of the root.
        prescale: Factor before the reduction.
        postscale: Factor after it.
        splits: Number of rows for each rank of an all_to_all.
        group: Name of requests that are carried out together or not at all.
        group_size: Number of these requests.
        text: Text that must be the same on all ranks.
        device: Type and number of the tensor's device.
        place: Place of the tensor among others in one flat tensor of this rank, in elements; -1
            without one. Operations that are carried out together and lie side by side need no
            copies. Places of several flat tensors differ: see `Fusion.reserve`.
        strides: Strides of a tensor with a place that does not lie row by row.
        refusal: Reason why this rank cannot take part; the operation is then refused on all ranks.
    """

    name: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    group: str = ""
    group_size: int = 0
    text: str = ""
    device: str = "cpu"
    place: int = -1
    strides: tuple[int, ...] = ()
    refusal: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return prod(self.shape) * self.itemsize


class Response(msgspec.Struct, frozen=True, array_like=True):
    """Decision on the tensors of one name, the same on all ranks.

    Attributes:
        name: Name of the requests.
        request: One of the requests, for what they have in common; of no meaning with an error.
        rows: Extent of dim 0 by rank, of an all_gather; by sender, then receiver, of an all_to_all.
        error: Reason why the requests are refused.
    """

    name: str
    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
    error: str = ""


# made here: msgspec (0.22) crashes where two threads make the first decoder of a type at once
_REQUESTS = msgspec.msgpack.Decoder(Request)


def check_sendable(request: Request) -> None:
    """Check that the other ranks can read a request.

    Raises:
        ConfigError: A field has another type than its own, a number of more than 64 bits, or text
            that cannot be written as UTF-8.
    """
    try:
        _REQUESTS.decode(msgspec.msgpack.encode(request))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        msg = f"request {request.name!r} cannot be sent to the other ranks: {error}"
        raise ConfigError(msg) from error


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


class ResponseList(msgspec.Struct, array_like=True):
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


NOTHING = ResponseList([], -1, [], "")

# made here: msgspec (0.22) crashes where two threads make the first decoder of a type at once
read_list = msgspec.msgpack.Decoder(RankList).decode
read_answer = msgspec.msgpack.Decoder(ResponseList).decode
