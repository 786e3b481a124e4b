"""The messages between workers and servers; values travel as buffers beside them."""

from __future__ import annotations

import msgspec

from braid.message import Schema
from braid.types import TensorSpec

__all__ = ["SCHEMA", "Leave", "Pull", "Pulled", "Push", "Pushed", "Refused"]


class Push(msgspec.Struct, tag="push", frozen=True):
    """A gradient for a worker's clock; the part of this server."""

    table: str
    clock: int
    spec: TensorSpec


class Pushed(msgspec.Struct, tag="pushed", frozen=True):
    """A push has arrived."""

    table: str
    clock: int


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """A request for the values before a clock."""

    table: str
    clock: int


class Pulled(msgspec.Struct, tag="pulled", frozen=True):
    """The values of this server's part."""

    table: str
    spec: TensorSpec
    version: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request that makes no sense to the server, which lives on."""

    text: str


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """A worker is done."""


SCHEMA = Schema(Push, Pushed, Pull, Pulled, Refused, Leave)
