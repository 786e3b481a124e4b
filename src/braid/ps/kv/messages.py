"""The messages of key-value programs; keys and values are sent as separate buffers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from braid.ps.messages import (
    Answer,
    Explain,
    Explained,
    Failure,
    Here,
    NodeJoin,
    Released,
    Repeat,
    RequestRefused,
    ValuesAnswer,
)
from braid.runtime.message import Schema
from braid.types import TensorSpec

__all__ = [
    "SCHEMA",
    "Candidate",
    "Coding",
    "Compressed",
    "Depart",
    "Enter",
    "FixedPointed",
    "Head",
    "KVRequest",
    "Note",
    "NoteReceived",
    "Numbered",
    "Sparsified",
    "Transfer",
    "Transferred",
]


class KVRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of requests that the receiver executes once, even if they arrive twice.

    Attributes:
        app: Number of the app that sends the request, and of the app that answers it.
        customer: Number of the customer, the object in the sender's process that sends the request.
        timestamp: Number of the request, consecutive for each customer.
        seen: Timestamp below which all requests of the customer are answered or cancelled.
        part: Number of the receiver among the request's receivers; the answer repeats it.
    """

    app: int
    customer: int
    timestamp: int
    seen: int
    part: int


class Note(KVRequest, tag="kv.note", frozen=True, kw_only=True):
    """A request of any app to the same app on another node, with a number and a text."""

    head: int
    body: str


class Enter(KVRequest, tag="kv.enter", frozen=True, kw_only=True):
    """A node reports to the scheduler that it enters a barrier of a group.

    Barriers with different numbers are independent.
    """

    group: int
    number: int


class Depart(KVRequest, tag="kv.depart", frozen=True, kw_only=True):
    """A node reports to the scheduler that it has finished."""


class Compressed(msgspec.Struct, tag="compressed", frozen=True):
    """Encoding of a tensor as compressed bytes: its name, dtype and number of elements."""

    name: str
    dtype: str
    numel: int


class FixedPointed(msgspec.Struct, tag="fixed_point", frozen=True):
    """Encoding of values as integer multiples of a scale, with the dtype of the values."""

    scale: float
    dtype: str


class Sparsified(msgspec.Struct, tag="sparsified", frozen=True):
    """Encoding that sends only some values, with their places; `numel` counts all values."""

    numel: int


Head: TypeAlias = Compressed | FixedPointed | Sparsified


class Coding(msgspec.Struct, frozen=True):
    """An encoding that the sender of a request wants for the answers.

    Attributes:
        bits: Bits of a fixed-point number; 0 for compression.
        level: Level of the compression.
        seed: Seed of the rounding.
    """

    bits: int = 0
    level: int = 0
    seed: int = 0


class Transfer(KVRequest, tag="kv.transfer", frozen=True, kw_only=True):
    """Request of a worker to a server: a push, a pull or both.

    Attributes:
        cmd: Number that the worker's program passes to the server's handle, its request function.
        push: Whether there are values.
        pull: Whether the answer has values.
        ranged: Whether all keys lie in the receiver's range.
        digest: Digest of the keys, if the server must cache them or has them cached.
        heads: Encodings of the tensors, in the order in which they were applied.
        names: Names of the tensors.
        specs: Shapes and dtypes of the tensors.
        codings: Encodings for the answer.
    """

    cmd: int
    push: bool
    pull: bool
    ranged: bool
    digest: bytes
    heads: list[Head]
    names: list[str]
    specs: list[TensorSpec]
    codings: list[Coding]


class NoteReceived(Answer, tag="kv.noted", frozen=True):
    """The receiver's answer to a `Note`, with a text."""

    body: str


class Transferred(ValuesAnswer, tag="kv.transferred", frozen=True):
    """A server's answer to a `Transfer`, with the values if it was a pull."""

    heads: list[Head]
    names: list[str]
    specs: list[TensorSpec]


class Candidate(msgspec.Struct, tag="kv.candidate", frozen=True):
    """A process asks the scheduler for a number as a server or a worker."""

    role: str


class Numbered(msgspec.Struct, tag="kv.numbered", frozen=True):
    """The scheduler's answer to `Candidate`: the number of the process in its role."""

    number: int


SCHEMA = Schema(
    *(Note, Enter, Depart, Transfer, NoteReceived, Transferred, Released, Repeat, RequestRefused),
    *(Explain, Explained),
    *(NodeJoin, Here, Failure, Candidate, Numbered),
)
