"""What a run says about itself: `run.json`, written by the launcher and read by whoever asks afterwards.

Problem: a report of a run that words the run's end by itself soon says something else than the run
did. Idea: the record holds what the error block is made of, not what was made of it, so that
whoever reads it can print the very same block.
"""

from __future__ import annotations

from dataclasses import dataclass

from braid.diagnose.block import StopReport

__all__ = ["RunHost", "RunRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHost:
    """A host on which ranks ran.

    Attributes:
        name: As the launcher calls it.
        address: Where others reach it.
        num_ranks: Ranks there, whose numbers follow those of the host before.
    """

    name: str
    address: str
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What `run.json` holds.

    Attributes:
        braid: Version that ran it.
        command: What was run, followed by its arguments.
        num_ranks: Number of ranks.
        command_kind: What `command[0]` is: `script`, `module` or `program`.
        run_id: Tells it from other runs.
        started: When, as ISO 8601 with the time zone.
        threads: OMP_NUM_THREADS of each rank, and the reason.
        hosts: Where its ranks ran, in the order of their ranks; the launcher may have been
        elsewhere.
        hangs: Reports of ranks that stood still, in order.
        outcome: How it ended; None while it lasts, or when its launcher was killed.
    """

    braid: str
    command: tuple[str, ...]
    num_ranks: int
    command_kind: str = "script"
    run_id: str = ""
    started: str = ""
    threads: str = ""
    hosts: tuple[RunHost, ...] = ()
    hangs: tuple[str, ...] = ()
    outcome: StopReport | None = None
