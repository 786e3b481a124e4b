"""The exceptions that braid raises, as one tree.

    BraidError
    ├── ConfigError      (ValueError, RuntimeError)  an argument or option cannot work
    ├── CommError        (RuntimeError)    a collective or message failed
    │   ├── PeerLostError                  a rank died, left or was declared dead
    │   ├── CommTimeout  (TimeoutError)    a deadline passed; the message names the missing ranks
    │   └── MismatchError                  ranks called different operations; carries a table
    ├── RendezvousError  (RuntimeError)    ranks could not find or authenticate each other
    ├── StaleError       (RuntimeError)    an object of an earlier epoch, or of a closed group
    ├── CheckpointError  (RuntimeError)    a checkpoint is missing, corrupt or for another model
    ├── RecomputeError   (RuntimeError)    a recomputed segment differs (in `braid.comm.autograd`)
    └── InternalError    (RuntimeError)    a bug in braid: please report it

A message has four parts: the problem in the user's words, the values, the place (rank, group,
operation, parameter) and a remedy. All classes but the root derive from RuntimeError: torch raises
RuntimeError for most mistakes, and programs written for torch catch it.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

__all__ = [
    "BraidError",
    "CheckpointError",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "InternalError",
    "MismatchError",
    "PeerLostError",
    "RendezvousError",
    "StaleError",
    "encodable",
    "message_of",
]


class BraidError(Exception):
    """Root of every error that braid raises on purpose."""


class ConfigError(BraidError, ValueError, RuntimeError):
    """An argument, option or environment variable that cannot work; raised before work starts."""


class CommError(BraidError, RuntimeError):
    """A collective or a message failed; the contents of its tensors are undefined."""


class PeerLostError(CommError):
    """A rank that this operation needs has died or left.

    Attributes:
        rank: Global rank of the lost process, -1 when unknown.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CommTimeout(CommError, TimeoutError):
    """A deadline passed; the message names each missing rank and its last operation."""


class MismatchError(CommError):
    """Ranks called different operations, shapes, dtypes or roots; the message is a table."""


class RendezvousError(BraidError, RuntimeError):
    """Ranks could not find each other, or a process failed to authenticate itself to the job."""


class StaleError(BraidError, RuntimeError):
    """The program used an object of an earlier membership (epoch) or of a closed group."""


class CheckpointError(BraidError, RuntimeError):
    """A checkpoint is missing, incomplete, corrupt or does not fit the model."""


class InternalError(BraidError, RuntimeError):
    """An invariant of braid does not hold: a bug in braid, not in the program that uses it."""


def message_of(exc: BaseException) -> str:
    r"""Return the message of any exception as text that can be encoded.

    An exception of the user may have a `__str__` that raises, or a message with lone surrogates
    (a file name that is not UTF-8). The error report must name the failed rank in both cases.

    >>> message_of(KeyError("x"))
    "'x'"
    >>> message_of(OSError("no file a\udcff"))
    'no file a\\udcff'
    """
    try:
        text = str(exc)
    except Exception as failure:  # noqa: BLE001 - code of the user
        text = f"<its __str__ raised {type(failure).__name__}>"
    return encodable(text)


def encodable(text: str) -> str:
    """Return `text` with lone surrogates written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def raise_all(problems: Iterable[str], kind: type[BraidError] = ConfigError) -> None:
    """Raise one error of type `kind` that lists all distinct problems, if there are any."""
    if distinct := list(dict.fromkeys(problems)):
        raise kind("; ".join(distinct))


def below(least: float, /, **values: object) -> list[str]:
    """Return an error message for each of the named values that is not a number >= `least`.

    >>> below(1, steps=0, seconds=float("nan"))
    ['steps must be at least 1, got 0', 'seconds must be at least 1, got nan']
    >>> below(1, rounds=None)
    ['rounds must be at least 1, got None']
    """
    return [
        f"{name} must be at least {least}, got {value}"
        for name, value in values.items()
        if not (isinstance(value, Real) and float(value) >= least)  # also NaN
    ]
