"""End a command properly when nobody reads its output, or the disk is full.

Python would show a traceback, partly after `main` has returned, when the interpreter writes out
what is left. Here a reader that has gone ends the command in silence, as SIGPIPE ends other
programs, and a full disk is one error block.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

__all__ = ["drop_unwritten", "ending_well", "print_error"]

BROKEN_PIPE_EXIT_CODE = 141  # as if SIGPIPE had ended it
UNWRITTEN_EXIT_CODE = 74  # EX_IOERR of sysexits.h
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def ending_well(command: Callable[[], int]) -> int:
    """Run `command` and write out what it has printed.

    Args:
        command: Returns the exit code.

    Returns:
        Its exit code, or 141 when nobody reads its output, or 74 when the output finds no room.
    """
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # as with `>&-`
                sys.stdout.flush()  # what fails here would fail as the interpreter ends
    except BrokenPipeError:  # `braid doctor | head`
        drop_unwritten()
        return BROKEN_PIPE_EXIT_CODE
    except SystemExit as exc:
        if not isinstance(exc.__context__, BrokenPipeError):
            raise
        drop_unwritten()
        return BROKEN_PIPE_EXIT_CODE  # rich says 1, which is an answer of some commands
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
        what: Fate of the command, such as `stopped`.
        problem: One line, or several.
    """
    first, *rest = problem.split("\n")
    print(f"braid: {what}", file=sys.stderr)
    print(f"  problem  {first}", *rest, sep="\n           ", file=sys.stderr)


def drop_unwritten() -> None:
    """Discard output that nobody reads, which would fail again as the interpreter ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
