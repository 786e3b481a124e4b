"""A rank of `horovod.run`: it reads the function, calls it and writes the result."""

from __future__ import annotations

import os
import pickle
import stat
import traceback
from pathlib import Path
from typing import Any

import msgspec

from braid.errors import ConfigError
from braid.runtime.rendezvous import JobEnvironment

__all__ = [
    "FUNCTION",
    "Ended",
    "call",
    "dumps",
    "loads",
    "read_ended",
    "read_private",
    "result_name",
    "write_private",
]

try:
    from cloudpickle import dumps
except ImportError:  # functions of importable modules do not need it
    from pickle import dumps

FUNCTION = "function.pickle"
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Result of the function on a rank.

    Attributes:
        returned: Whether the function returned.
        value: Pickled result or exception; empty if the exception cannot be pickled.
        summary: The error in one line.
        stack: Traceback of the error.
    """

    returned: bool
    value: bytes
    summary: str = ""
    stack: str = ""


def call(directory: str) -> None:
    """Read the function from the files in `directory`, call it, and write its result there.

    Raises:
        ConfigError: Other users can write the file, or the result cannot be pickled.
    """
    folder = Path(directory)
    target = folder / result_name(JobEnvironment.from_os().rank)
    try:
        function, args, kwargs = loads(read_private(folder / FUNCTION))
        ended = Ended(returned=True, value=_packed(function(*args, **kwargs)))
    except BaseException as exc:
        write_private(target, msgspec.msgpack.encode(_raised(exc)))
        raise  # the launcher finds the first rank that failed, and ends the others
    write_private(target, msgspec.msgpack.encode(ended))


def loads(content: bytes) -> Any:
    """Unpickle an object; use only with the result of `read_private`, since this can run code."""
    return pickle.loads(content)  # noqa: S301 - only this user can have written it


def read_ended(path: Path) -> Ended | None:
    """Return the record that a rank has written; None if it does not exist."""
    try:
        return msgspec.msgpack.decode(read_private(path), type=Ended)
    except FileNotFoundError:
        return None


def result_name(rank: int) -> str:
    """Return the name of a rank's result file."""
    return f"rank{rank}.pickle"


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only this user can read.

    Raises:
        OSError: The file cannot be written, or exists already.
    """
    part = path.with_suffix(".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - by descriptor
        file.write(content)
    part.rename(path)


def read_private(path: Path) -> bytes:
    """Read a file that only this user can have written.

    Raises:
        ConfigError: Others can access it, or it belongs to another user.
        OSError: The file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - by descriptor
        status = os.fstat(descriptor)
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & OTHERS
        ):
            msg = (
                f"{path} must be a file that user {os.geteuid()} alone can write, got user "
                f"{status.st_uid} and mode {stat.filemode(status.st_mode)}: its content would "
                "be run"
            )
            raise ConfigError(msg)
        return file.read()


def _packed(value: object) -> bytes:
    try:
        return bytes(dumps(value))
    except Exception as exc:
        msg = (
            f"result of the function cannot be pickled, got {type(value).__qualname__} "
            f"({exc}): return numbers, lists or tensors, or the path of a file"
        )
        raise ConfigError(msg) from exc


def _raised(exc: BaseException) -> Ended:
    summary = "".join(traceback.format_exception_only(type(exc), exc)).strip()
    try:
        value = bytes(dumps(exc))
    except Exception:  # noqa: BLE001 - its text is enough
        value = b""
    return Ended(returned=False, value=value, summary=summary, stack=traceback.format_exc())
