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
    """Number of a reference or of a fork (one use of it), unique over processes and restarts.

    Attributes:
        process: Process that has created it.
        number: Count in that process.
    """

    process: int
    number: int


class Fork(msgspec.Struct, tag="rpc.fork", frozen=True):
    """A user (a process that refers to a value) asks the value's owner to register its fork.

    All requests of this user below `oldest_open` are over, so late copies of them are ignored.

    Attributes:
        ref: Number of the reference.
        fork: Number of the user's fork.
        number: Number of this request.
        oldest_open: Lowest number of a request of this user that has no answer.
    """

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Forked(msgspec.Struct, tag="rpc.forked", frozen=True):
    """The owner's answer to a user: the reference is registered, or the value does not exist."""

    fork: Id
    is_known: bool


class Confirmed(msgspec.Struct, tag="rpc.confirmed", frozen=True):
    """A user reports that its fork is registered, to the process that sent the reference.

    The receiver may then delete its own fork.
    """

    fork: Id


class Noted(msgspec.Struct, tag="rpc.noted", frozen=True):
    """Answer to `Confirmed`, so that it is not sent again."""

    fork: Id


class UserDelete(msgspec.Struct, tag="rpc.delete", frozen=True):
    """A user reports to the owner of a value that the user's fork (reference) is gone.

    `number` is the number of the fork's request, 0 for none; see `Fork` for the other fields.
    """

    ref: Id
    fork: Id
    number: int
    oldest_open: int


class Deleted(msgspec.Struct, tag="rpc.deleted", frozen=True):
    """The owner's answer to `UserDelete`: the owner has forgotten the fork."""

    fork: Id


ReferenceMessage: TypeAlias = Fork | Forked | Confirmed | Noted | UserDelete | Deleted
