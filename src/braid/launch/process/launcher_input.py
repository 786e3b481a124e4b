"""Standard input of the launcher, for the one rank that a person debugs.

Problem: `breakpoint()` needs a terminal, and N ranks that read one terminal steal each other's
keys.

Idea: `braid run --stdin RANK` hands standard input to one rank. If that is a terminal, the rank
gets the terminal for its standard output, too, so that line editing works, and stays in the
launcher's process group, which is in the foreground. Its stderr still goes to its log.
"""

from __future__ import annotations

import os
import termios
from contextlib import suppress

__all__ = ["LauncherInput"]


class LauncherInput:
    """Standard input of this process, and the modes of its terminal.

    Attributes:
        fd: Descriptor to read from.
        out_fd: Descriptor of the terminal to write to, if `is_terminal`.
        is_terminal: Whether a person types the input and reads the output.
    """

    def __init__(self) -> None:
        self.fd, self.out_fd = 0, 1
        self.is_terminal = os.isatty(self.fd) and os.isatty(self.out_fd)
        self._modes = termios.tcgetattr(self.fd) if self.is_terminal else None

    def restore(self) -> None:
        """Restore the terminal's modes, which a process that was killed may have changed."""
        if self._modes is not None:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self._modes)
