"""Proper exit of a command if its output has no reader, or the disk is full.

Without this, Python would print a traceback, partly after `main` has returned, when the interpreter
flushes its buffers. Here a closed pipe ends the command silently, as SIGPIPE ends other programs,
and a full disk causes one error block.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

__all__ = ["FULL", "drop_unwritten", "ending_well", "print_error"]

BROKEN_PIPE_EXIT_CODE = 141  # as if SIGPIPE had ended it
UNWRITTEN_EXIT_CODE = 74  # EX_IOERR of sysexits.h
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def ending_well(command: Callable[[], int]) -> int:
    """Run `command` and flush its output, without a traceback if the output cannot be written.

    Args:
        command: Function that returns the exit code.

    Returns:
        The exit code of `command`; 141 if its output has no reader, 74 if the disk is full.
    """
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # as with `>&-`
                sys.stdout.flush()  # raise errors here, rather than at the interpreter's exit
    except BrokenPipeError:  # `braid doctor | head`
        drop_unwritten()
        return BROKEN_PIPE_EXIT_CODE
    except SystemExit as exc:
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        drop_unwritten()
        return BROKEN_PIPE_EXIT_CODE  # not rich's 1, a valid result of some commands
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        drop_unwritten()
        where = exc.filename or "the standard output"
        advice = "make room there, or send the output elsewhere"
        print_error(f"stopped (exit {UNWRITTEN_EXIT_CODE})", f"{exc.strerror}: {where}\n{advice}")
        return UNWRITTEN_EXIT_CODE


def print_error(what: str, problem: str) -> None:
    """Print an error block.

    Args:
        what: Outcome of the command, such as `stopped`.
        problem: One line, or several.
    """
    first, *rest = problem.split("\n")
    print(f"braid: {what}", file=sys.stderr)
    print(f"  problem  {first}", *rest, sep="\n           ", file=sys.stderr)


def drop_unwritten() -> None:
    """Discard buffered output that has no reader: writing it at exit would fail again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
