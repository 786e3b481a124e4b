"""Faults by script: this rank, at this step, inside that span, does this.

A script is text, so that it travels to other processes: `kill rank=1 step=3 in=backward; stop
rank=0 step=5`. It is armed on a rank's recorder and strikes at the begin of the span, which is also
where the black box will say it happened.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NamedTuple

from braid.errors import ConfigError
from braid.events import Recorder

__all__ = ["Fault", "FaultScript", "InjectedError"]

KINDS = ("kill", "stop", "raise", "exit", "segv")


class InjectedError(Exception):
    """The exception of a scripted `raise`."""


class Fault(NamedTuple):
    """One fault.

    Attributes:
        kind: kill (SIGKILL), stop (SIGSTOP), raise, exit (code 3) or segv (SIGSEGV).
        rank: Global rank that suffers it.
        step: Step at which it strikes, as given to the `step` span.
        span: Name, or beginning of the name, of the span at whose begin it strikes.
    """

    kind: str
    rank: int
    step: int
    span: str = "step"

    def strike(self) -> None:
        """Do it."""
        if self.kind == "raise":
            msg = f"injected on rank {self.rank} at step {self.step} in {self.span}"
            raise InjectedError(msg)
        if self.kind == "exit":
            sys.exit(3)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
        os.kill(os.getpid(), number[self.kind])


class FaultScript(NamedTuple):
    """Faults of a whole job; each rank arms the same script."""

    faults: tuple[Fault, ...]

    @classmethod
    def from_text(cls, text: str) -> FaultScript:
        """Parse `kind rank=R step=S [in=SPAN]; ...`.

        >>> FaultScript.from_text("kill rank=1 step=3 in=backward").faults
        (Fault(kind='kill', rank=1, step=3, span='backward'),)

        Raises:
            ConfigError: Says which part is wrong.
        """
        faults = []
        for clause in filter(None, (part.strip() for part in text.split(";"))):
            kind, *words = clause.split()
            given = dict(word.partition("=")[::2] for word in words)
            if kind not in KINDS or not {"rank", "step"} <= given.keys() <= {"rank", "step", "in"}:
                msg = f"expected '{'|'.join(KINDS)} rank=R step=S [in=SPAN]', found {clause!r}"
                raise ConfigError(msg)
            faults.append(
                Fault(kind, int(given["rank"]), int(given["step"]), given.get("in", "step"))
            )
        return cls(tuple(faults))

    def to_text(self) -> str:
        """Inverse of `from_text`."""
        return "; ".join(f"{f.kind} rank={f.rank} step={f.step} in={f.span}" for f in self.faults)

    def arm(self, rank: int, recorder: Recorder) -> None:
        """Let the faults of `rank` strike when `recorder` begins their spans."""
        mine = [fault for fault in self.faults if fault.rank == rank]
        step = -1

        def listener(kind: str, seq: int) -> None:
            nonlocal step
            if kind == "step":
                step = seq
            for fault in tuple(mine):
                if fault.step == step and kind.startswith(fault.span):
                    mine.remove(fault)
                    fault.strike()

        recorder.listener = listener if mine else None
