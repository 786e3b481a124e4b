"""Types of `run.json`, the record of a run that the launcher writes.

Problem: a report that formats the end of a run in separate code soon differs from the run's output.

Idea: the record contains the data of the error block instead of its text, so that a reader can
print exactly the same block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from braid.runtime.diagnose.block import StopReport

__all__ = ["RunHost", "RunRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHost:
    """Host of some ranks.

    Attributes:
        name: Name of the host, as the user gave it.
        address: Address at which other hosts reach it.
        num_ranks: Number of ranks; their numbers follow those of the previous host.
    """

    name: str
    address: str
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Contents of `run.json`.

    Attributes:
        braid: Version of braid.
        command: Script, module or program, followed by its arguments.
        num_ranks: Number of ranks.
        command_kind: Kind of `command[0]`: `script`, `module` or `program`.
        run_id: Unique name of the run.
        started: Time of the start, as ISO 8601 with the time zone.
        threads: OMP_NUM_THREADS of each rank, with the reason for the choice.
        hosts: Hosts of the ranks, in rank order; the launcher's host need not be among them.
        title: Command line that a user would type, if `command` is internal; else empty.
        git: Commit of the repository that contains the working directory, with `+changes` if files
            differ from it; empty outside a repository.
        packages: Versions of Python, torch and packages that are commonly used with torch.
        hangs: Hang reports, in order.
        outcome: Outcome of the run; None during the run, or if the launcher was killed.
    """

    braid: str
    command: tuple[str, ...]
    num_ranks: int
    command_kind: str = "script"
    run_id: str = ""
    started: str = ""
    threads: str = ""
    hosts: tuple[RunHost, ...] = ()
    title: str = ""
    git: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    hangs: tuple[str, ...] = ()
    outcome: StopReport | None = None
