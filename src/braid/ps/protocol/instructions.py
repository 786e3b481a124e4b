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
    """A shard's chain, as one epoch of the directory says.

    Attributes:
        epoch: The epoch.
        chain: Servers, the head first.
        joining: Servers among them that have no state yet, with the epoch since which they join.
        members: Workers for which a clock waits, with the first clock of each.
    """

    epoch: int
    chain: tuple[int, ...]
    joining: Mapping[int, int]
    members: Mapping[int, int]


class Keep(NamedTuple):
    """Keep the value of this push."""

    worker: int
    clock: int


class DropPushes(NamedTuple):
    """Forget the values of these pushes."""

    pushes: tuple[Push, ...]


class Merge(NamedTuple):
    """Add up the kept values of a record."""

    record: ShardRecord


class SendOn(NamedTuple):
    """Send a record and its sum to the successor."""

    number: int


class Apply(NamedTuple):
    """Let the optimizer step with the sum of a record."""

    record: ShardRecord


class Confirm(NamedTuple):
    """Inform the predecessor that all servers from here on have the records up to this one."""

    number: int


class Accept(NamedTuple):
    """Answer a push: it will not be lost."""

    request: Request


class AnswerPull(NamedTuple):
    """Answer a pull with the values."""

    request: Request


class Moved(NamedTuple):
    """Answer a request: another server is the head, as a later directory says."""

    request: Request


class Install(NamedTuple):
    """Send the whole state to a server that has none."""

    server: int


Instruction: TypeAlias = (
    Keep | DropPushes | Merge | SendOn | Apply | Confirm | Accept | AnswerPull | Moved | Install
)
