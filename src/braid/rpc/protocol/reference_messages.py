"""Messages between the owner of a value and the processes that refer to it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

__all__ = [
    "Confirmed",
    "Deleted",
    "Fork",
    "Forked",
    "Id",
    "Noted",
    "ReferenceMessage",
    "UserDelete",
]


class Id(NamedTuple):
    """Number of a reference or a fork, unique over all processes and their lives.

    Attributes:
        process: Process that has created it.
        number: Count in that process.
    """

    process: int
    number: int


class Fork(msgspec.Struct, tag="rpc.fork", frozen=True):
    """A user asks the owner to register its fork.

    All requests of this user below `oldest_open` are over, so late copies of them are ignored.
    """

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Forked(msgspec.Struct, tag="rpc.forked", frozen=True):
    """The owner has registered a fork, or knows no such value."""

    fork: Id
    is_known: bool


class Confirmed(msgspec.Struct, tag="rpc.confirmed", frozen=True):
    """The owner has registered a child, so its parent may be deleted."""

    fork: Id


class Noted(msgspec.Struct, tag="rpc.noted", frozen=True):
    """The parent has seen that its child is confirmed."""

    fork: Id


class UserDelete(msgspec.Struct, tag="rpc.delete", frozen=True):
    """A user refers to the value no longer; the numbers are as in `Fork`, 0 for no request."""

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Deleted(msgspec.Struct, tag="rpc.deleted", frozen=True):
    """The owner has forgotten a fork."""

    fork: Id


ReferenceMessage: TypeAlias = Fork | Forked | Confirmed | Noted | UserDelete | Deleted
