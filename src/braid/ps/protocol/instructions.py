"""The instructions of `ShardState`, and its view of the directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

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
    """A shard's chain in one epoch of the directory.

    Attributes:
        epoch: Number of the epoch.
        chain: Servers of the chain, the head first.
        joining: Servers of the chain without state yet, with the epoch of their joining.
        members: First clock of each worker that clocks wait for.
    """

    epoch: int
    chain: tuple[int, ...]
    joining: Mapping[int, int]
    members: Mapping[int, int]


class Keep(NamedTuple):
    """Keep the value of a push until it is summed."""

    worker: int
    clock: int


class DropPushes(NamedTuple):
    """Delete the kept values of pushes."""

    pushes: tuple[Push, ...]


class Merge(NamedTuple):
    """Sum the kept values of a record's pushes."""

    record: ShardRecord


class SendOn(NamedTuple):
    """Send a record and its sum to the successor."""

    number: int


class Apply(NamedTuple):
    """Step the optimizer with the sum of a record."""

    record: ShardRecord


class Confirm(NamedTuple):
    """Report to the predecessor that this and all later servers have the records up to a number."""

    number: int


class Accept(NamedTuple):
    """Answer a push or a change: the whole chain has it."""

    request: Request


class AnswerPull(NamedTuple):
    """Answer a pull with the values."""

    request: Request


class Moved(NamedTuple):
    """Answer a request: this server is not the head of the shard."""

    request: Request


class Install(NamedTuple):
    """Send the whole state to a server that joins the chain."""

    server: int


Instruction: TypeAlias = (
    Keep | DropPushes | Merge | SendOn | Apply | Confirm | Accept | AnswerPull | Moved | Install
)
