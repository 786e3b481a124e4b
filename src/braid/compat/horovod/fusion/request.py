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

BATCHED = frozenset({"all_reduce"})  # kinds that are combined into one message
# kinds that work after a rank has joined
JOINABLE = frozenset({"all_reduce", "barrier"})


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One rank's request for one operation on one tensor.

    Attributes:
        name: Name that matches the requests of all ranks.
        kind: all_reduce, all_gather, broadcast, all_to_all, reduce_scatter, barrier or agree, which
            checks that `text` is equal on all ranks.
        dtype: Data type by torch's name.
        shape: Shape of this rank's tensor.
        itemsize: Bytes of an element.
        op: Reduction.
        root: Group rank of the root.
        prescale: Factor before the reduction.
        postscale: Factor after the reduction.
        splits: Number of rows for each rank of an all_to_all.
        group: Name of an explicit group, which is carried out or refused as a whole.
        group_size: Number of requests in the group.
        text: Text that must be the same on all ranks.
        device: Type and number of the tensor's device.
        place: Offset of the tensor in a flat tensor of this rank, in elements; -1 without one.
            Adjacent tensors are reduced together without copies. Different flat tensors have
            different places: see `Fusion.reserve`.
        strides: Strides of a tensor with a place, if it is not contiguous.
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
    """Decision on the requests of one name, the same on all ranks.

    Attributes:
        name: Name of the requests.
        request: One of the requests, for their common fields; not meaningful with an error.
        rows: Size of dim 0 by rank for an all_gather; by sender, then receiver for an all_to_all.
        error: Reason why the requests are refused.
    """

    name: str
    request: Request
    rows: tuple[tuple[int, ...], ...] = ()
    error: str = ""


# made here: msgspec (0.22) crashes if two threads create the first decoder of a type concurrently
_REQUESTS = msgspec.msgpack.Decoder(Request)


def check_sendable(request: Request) -> None:
    """Check that the other ranks can read a request.

    Raises:
        ConfigError: A field has a wrong type, a number of more than 64 bits, or text that cannot be
            encoded as UTF-8.
    """
    try:
        _REQUESTS.decode(msgspec.msgpack.encode(request))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        msg = f"request {request.name!r} cannot be sent to the other ranks: {error}"
        raise ConfigError(msg) from error


class RankList(msgspec.Struct, array_like=True):
    """Message of a rank to rank 0: the operations that it has submitted.

    Attributes:
        requests: New requests.
        ages_s: Seconds since the submission of each request.
        joined: Whether the rank has joined.
        stopping: Reason to end the engine; empty to continue.
    """

    requests: list[Request]
    ages_s: list[float]
    joined: bool
    stopping: str


class ResponseList(msgspec.Struct, array_like=True):
    """Message of rank 0 to all ranks: the operations to carry out, in order.

    Attributes:
        responses: Responses in the order in which they are carried out.
        last_joined: Position of the rank that joined last, when all have joined; -1 otherwise.
        stalls: Names that wait for ranks.
        stop: Reason to end the engine; empty to continue.
        settings: New limit of a batch in bytes and cycle time in seconds, if they change.
    """

    responses: list[Response]
    last_joined: int
    stalls: list[Stall]
    stop: str
    settings: tuple[int, float] | None = None


NOTHING = ResponseList([], -1, [], "")

# made here: msgspec (0.22) crashes if two threads create the first decoder of a type concurrently
read_list = msgspec.msgpack.Decoder(RankList).decode
read_answer = msgspec.msgpack.Decoder(ResponseList).decode
