"""Kill a rank in the middle of a training, to show that the training resumes from its checkpoint.

The kill is a real one: SIGKILL from outside, which no program can catch, once the training has
reached a given step.
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
        out: Console on which the training is drawn.
        title: Text before the moving line.
        rank: Rank to kill.
        after: Step after which to kill it.

    Attributes:
        struck_at: Last reported step when the rank was killed; 0 before.
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
