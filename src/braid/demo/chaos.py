"""A rank is killed in the middle of a training, which then goes on from its last checkpoint.

The kill is a real one: SIGKILL, which no program can catch, from outside, when the training has
come so far.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil
from rich.console import Console

from braid.train.progress import TrainConsole
from braid.train.reports import Report, Stepped

__all__ = ["Assassin"]


class Assassin(TrainConsole):
    """Shows a training, and kills one of its ranks after a step.

    Args:
        out: Where the training is drawn.
        title: Before it.
        rank: Whom to kill.
        after: Step.

    Attributes:
        struck_at: Step that had been reported when it was killed; 0 while it lives.
    """

    def __init__(self, out: Console, *, title: str, rank: int, after: int) -> None:
        super().__init__(out, title=title)
        self._rank = rank
        self._after = after
        self.struck_at = 0

    def _keep(self, report: Report) -> None:
        super()._keep(report)
        if isinstance(report, Stepped) and report.step >= self._after and not self.struck_at:
            self.struck_at = report.step
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, ProcessLookupError):
                    if child.environ().get("RANK") == str(self._rank):
                        os.kill(child.pid, signal.SIGKILL)
