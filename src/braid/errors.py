"""Everything that braid raises, as one tree.

    BraidError
    ├── ConfigError      (ValueError, RuntimeError)  what you passed cannot work
    ├── CommError        (RuntimeError)    a collective or message failed
    │   ├── PeerLostError                  a rank died, left or was declared dead
    │   ├── CommTimeout  (TimeoutError)    a deadline passed; says who has not arrived
    │   └── MismatchError                  ranks asked for different things; carries the table
    ├── RendezvousError  (RuntimeError)    ranks could not find or did not trust each other
    ├── StaleError       (RuntimeError)    an object of an earlier epoch, or of a closed group
    ├── CheckpointError  (RuntimeError)    a checkpoint is missing, incomplete, corrupt or misfits
    ├── RecomputeError   (RuntimeError)    a recomputed segment differs (in `braid.comm.autograd`)
    └── InternalError    (RuntimeError)    a bug in braid: please report it

Messages have four parts: the problem in the user's words, the values, the place (rank, group,
operation, parameter) and what to do. All but the root are RuntimeErrors, because torch raises those
for most mistakes and programs written for it catch them.
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
    """An argument, option or environment that cannot work; raised before anything is started."""


class CommError(BraidError, RuntimeError):
    """A collective or a message failed; tensors that took part in it are undefined."""


class PeerLostError(CommError):
    """A rank that this operation needs is gone.

    Attributes:
        rank: Global rank of the lost process, -1 when unknown.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class CommTimeout(CommError, TimeoutError):
    """A deadline passed; the message names who has not arrived and what it last did."""


class MismatchError(CommError):
    """Ranks asked for different operations, shapes, dtypes or roots; the text is a table."""


class RendezvousError(BraidError, RuntimeError):
    """Ranks could not find each other, or one could not prove that it belongs to the job."""


class StaleError(BraidError, RuntimeError):
    """An object that belongs to an earlier epoch or to a closed group was used."""


class CheckpointError(BraidError, RuntimeError):
    """A checkpoint is missing, incomplete, corrupt or does not fit the model."""


class InternalError(BraidError, RuntimeError):
    """An invariant of braid was broken: a bug in braid, not in the program that uses it."""


def message_of(exc: BaseException) -> str:
    r"""Return the message of any exception as text that can be encoded.

    An exception of the user may have a `__str__` that raises, or a message with lone surrogates
    (a file name that is no UTF-8). Neither may keep its rank from being named.

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
    """Raise one error with all problems, each of them once; do nothing without any."""
    if each := list(dict.fromkeys(problems)):
        raise kind("; ".join(each))


def below(least: float, /, **values: object) -> list[str]:
    """Return a problem for each value that is not a number of at least `least`, by its name.

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
