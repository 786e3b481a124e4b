"""Scripted faults: at a given step, inside a given span, a rank is killed, stopped or fails.

A script is text, so that it travels to other processes: `kill rank=1 step=3 in=backward; stop
rank=0 step=5`. A rank's recorder arms it. The fault strikes at the begin of the span, which is also
the last event in the black box.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NamedTuple

from braid.errors import ConfigError
from braid.runtime.events import Recorder

__all__ = ["Fault", "FaultScript", "InjectedError"]

KINDS = ("kill", "stop", "raise", "exit", "segv")


class InjectedError(Exception):
    """The exception of a scripted `raise`."""


class Fault(NamedTuple):
    """One scripted fault.

    Attributes:
        kind: kill (SIGKILL), stop (SIGSTOP), raise, exit (code 3) or segv (SIGSEGV).
        rank: Global rank that the fault strikes.
        step: Step at which it strikes, as given to the `step` span.
        span: Name, or beginning of the name, of the span at whose begin it strikes.
    """

    kind: str
    rank: int
    step: int
    span: str = "step"

    def strike(self) -> None:
        """Carry out the fault in this process."""
        if self.kind == "raise":
            msg = f"injected on rank {self.rank} at step {self.step} in {self.span}"
            raise InjectedError(msg)
        if self.kind == "exit":
            sys.exit(3)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}
        os.kill(os.getpid(), number[self.kind])


class FaultScript(NamedTuple):
    """The faults of a whole job; each rank arms the same script."""

    faults: tuple[Fault, ...]

    @classmethod
    def from_text(cls, text: str) -> FaultScript:
        """Parse `kind rank=R step=S [in=SPAN]; ...`.

        >>> FaultScript.from_text("kill rank=1 step=3 in=backward").faults
        (Fault(kind='kill', rank=1, step=3, span='backward'),)

        Raises:
            ConfigError: The text is not a script; the message names the wrong clause.
        """
        faults = []
        for clause in filter(None, (part.strip() for part in text.split(";"))):
            kind, *fields = clause.split()
            given = dict(item.partition("=")[::2] for item in fields)
            if kind not in KINDS or not {"rank", "step"} <= given.keys() <= {"rank", "step", "in"}:
                msg = f"a fault must be '{'|'.join(KINDS)} rank=R step=S [in=SPAN]', got {clause!r}"
                raise ConfigError(msg)
            faults.append(
                Fault(kind, int(given["rank"]), int(given["step"]), given.get("in", "step"))
            )
        return cls(tuple(faults))

    def to_text(self) -> str:
        """Return the text from which `from_text` makes the same script."""
        return "; ".join(f"{f.kind} rank={f.rank} step={f.step} in={f.span}" for f in self.faults)

    def arm(self, rank: int, recorder: Recorder) -> None:
        """Make the faults of `rank` strike when `recorder` begins their spans."""
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
