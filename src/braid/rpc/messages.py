"""The messages of remote calls; tensors travel as buffers beside them."""

from __future__ import annotations

import msgspec

from braid.rpc.protocol.autograd_state import AutogradMessage, Span, SparseSpec
from braid.rpc.protocol.reference_messages import (
    Confirmed,
    Deleted,
    Fork,
    Forked,
    Id,
    Noted,
    UserDelete,
)
from braid.runtime.message import Schema
from braid.types import TensorSpec

__all__ = [
    "SCHEMA",
    "AutogradEdge",
    "Body",
    "Call",
    "CallReply",
    "CancelCall",
    "Creation",
    "Raised",
]


class Body(msgspec.Struct, frozen=True):
    """Packed values of a message, and descriptions of their tensors.

    Attributes:
        packed: The values, packed by `codec`.
        specs: Specs of the tensors; their bytes are buffers of the message.
        sparse: Specs of sparse tensors, each made of two of the tensors.
    """

    packed: bytes
    specs: list[TensorSpec]
    sparse: list[SparseSpec] = []


class Creation(msgspec.Struct, frozen=True):
    """Numbers under which the callee keeps the result of a `remote` call, for the caller's RRef."""

    ref: Id
    fork: Id
    oldest_open: int


class AutogradEdge(msgspec.Struct, frozen=True):
    """Edge in the graph of distributed autograd: a message that carries tensors between nodes.

    Attributes:
        context: Number of the context.
        number: Number of the edge; negative if no tensor of the message has a gradient.
        tensors: Indices of the message's tensors that have a gradient.
        is_recording: Whether the sender has gradients enabled.
        history: Numbers of all edges that the tensors depend on.
    """

    context: int
    number: int
    tensors: list[int] = []
    is_recording: bool = True
    history: list[Span] = []


class Call(msgspec.Struct, tag="rpc.call", frozen=True):
    """Request to call a function in the receiving node.

    Attributes:
        function: Name of the function; see the module `names`.
        body: Arguments and keyword arguments.
        creation: Reference under which the result stays; None if it is the answer.
        edge: Edge of distributed autograd; None outside of a context.
        timeout_s: Seconds that the caller waits, also a bound for nested calls; 0 for no limit.
    """

    function: str
    body: Body
    creation: Creation | None = None
    edge: AutogradEdge | None = None
    timeout_s: float = 0.0


class CancelCall(msgspec.Struct, tag="rpc.cancel", frozen=True):
    """The caller asks the callee to cancel a call, given by the number of its message."""

    call: int


class CallReply(msgspec.Struct, tag="rpc.reply", frozen=True):
    """The callee's answer to a `Call`: its result."""

    body: Body
    edge: AutogradEdge | None = None


class Raised(msgspec.Struct, tag="rpc.raised", frozen=True):
    """The callee's answer to a `Call` that raised: type of the exception, text with traceback."""

    error: str
    text: str


SCHEMA = Schema(
    *(Call, CancelCall, CallReply, Raised),
    *(Fork, Forked, Confirmed, Noted, UserDelete, Deleted),
    *AutogradMessage.__args__,
)
