"""The instructions of `ShardState`, and its view of the directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec

from braid.ps.protocol.progress import Push, ShardRecord

__all__ = [
    "Accept",
    "AnswerPull",
    "Apply",
    "Confirm",
    "DropPushes",
    "Install",
    "Instruction",
    "Keep",
    "Merge",
    "Moved",
    "Request",
    "SendOn",
    "View",
]

Request: TypeAlias = tuple[str, int]  # node that asks, and number of its request


class View(NamedTuple):
    """A shard's chain (the servers with copies of it) in one epoch of the directory.

    Attributes:
        epoch: Number of the epoch.
        chain: Servers of the chain, the head first.
        joining: Servers of the chain without state yet, with the epoch of their joining.
        members: First clock of each live worker; a clock is complete when these have pushed it.
    """

    epoch: int
    chain: tuple[int, ...]
    joining: Mapping[int, int]
    members: Mapping[int, int]


class Keep(msgspec.Struct, frozen=True):
    """Instruction: keep the value of a push until it is summed."""

    worker: int
    clock: int


class DropPushes(msgspec.Struct, frozen=True):
    """Instruction: delete the kept values of pushes."""

    pushes: tuple[Push, ...]


class Merge(msgspec.Struct, frozen=True):
    """Instruction: sum the kept values of the pushes that one record (a change) combines."""

    record: ShardRecord


class SendOn(msgspec.Struct, frozen=True):
    """Instruction: send a record (a change) and its sum to the server with the next copy."""

    number: int


class Apply(msgspec.Struct, frozen=True):
    """Instruction: step the optimizer with the sum of a record, which is one change."""

    record: ShardRecord


class Confirm(msgspec.Struct, frozen=True):
    """Instruction: confirm records (changes) up to a number to the previous copy's server.

    This server and all servers after it have these records.
    """

    number: int


class Accept(msgspec.Struct, frozen=True):
    """Instruction: accept a push or a change, since all servers with a copy have it."""

    request: Request


class AnswerPull(msgspec.Struct, frozen=True):
    """Instruction: answer a pull with the values."""

    request: Request


class Moved(msgspec.Struct, frozen=True):
    """Instruction: report to a request's sender that another server decides on the shard."""

    request: Request


class Install(msgspec.Struct, frozen=True):
    """Instruction: send the whole state of the shard to a server that will have a copy."""

    server: int


Instruction: TypeAlias = (
    Keep | DropPushes | Merge | SendOn | Apply | Confirm | Accept | AnswerPull | Moved | Install
)
