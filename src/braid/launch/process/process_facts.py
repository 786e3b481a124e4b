"""What the kernel says of a process: its state, the time it has used, what of it is swapped out.

Source: proc_pid_stat(5), proc_pid_status(5).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from braid.diagnose import Process

__all__ = ["Sample", "catches", "parse_sample", "process_between", "sample"]

PROC = Path("/proc")


class Sample(NamedTuple):
    """A look at a process.

    Attributes:
        state: R S D T t Z; empty when there is nothing to look at.
        cpu_ticks: User and system time so far, of all its threads.
        major_faults: Pages that had to be read so far.
        swapped_bytes: Memory in swap.
        resident_bytes: Memory that is not.
        caught: Signals that it has handlers for, as a bit mask.
    """

    state: str = ""
    cpu_ticks: int = 0
    major_faults: int = 0
    swapped_bytes: int = 0
    resident_bytes: int = 0
    caught: int = 0


def sample(pid: int) -> Sample:
    """Look at a process; empty where there is no /proc, or no such process."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return Sample()
    return parse_sample(stat, status)


def parse_sample(stat: str, status: str) -> Sample:
    """From the texts of `stat` and `status`; what cannot be read is 0."""
    words = stat.rpartition(")")[2].split()  # the name before may hold anything
    numbers = [int(word) if word.lstrip("-").isdecimal() else 0 for word in words]
    if len(numbers) < 13:
        return Sample()
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    caught = fields.get("SigCgt", "").strip()
    return Sample(
        state=words[0],
        cpu_ticks=numbers[11] + numbers[12],
        major_faults=numbers[9],
        swapped_bytes=_kilobytes(fields.get("VmSwap", "")),
        resident_bytes=_kilobytes(fields.get("VmRSS", "")),
        caught=int(caught, 16) if caught and set(caught) <= set("0123456789abcdef") else 0,
    )


def catches(seen: Sample, signum: int) -> bool:
    """Whether the process has a handler for a signal, which would end it otherwise."""
    return bool(seen.caught >> (signum - 1) & 1)


def process_between(before: Sample, after: Sample, elapsed_ns: int) -> Process:
    """What two looks say together."""
    if not after.state:
        return Process()
    elapsed_s = max(elapsed_ns, 1) / 1e9
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    known = bool(before.state)
    return Process(
        state=after.state,
        cpu_share=(after.cpu_ticks - before.cpu_ticks) / ticks_per_s / elapsed_s if known else None,
        swapped_bytes=after.swapped_bytes,
        resident_bytes=after.resident_bytes,
        major_faults_per_s=(after.major_faults - before.major_faults) / elapsed_s if known else 0.0,
    )


def _kilobytes(text: str) -> int:
    """`   2224 kB` in bytes."""
    number = text.strip().partition(" ")[0]
    return int(number) << 10 if number.isascii() and number.isdecimal() else 0
