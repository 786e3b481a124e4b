"""Restore the signal handling of a program in the foreground.

A shell that starts a command in the background lets it ignore SIGINT, and every process that the
command starts inherits this. Tests of signals would then depend on how they were started.
"""

from __future__ import annotations

import signal

__all__ = ["default_signals"]


def default_signals() -> None:
    """Give this process and its children the signal handling of a program in the foreground."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
