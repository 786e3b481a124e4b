"""Reads the state, CPU time and swapped memory of a process from the kernel.

Source: proc_pid_stat(5), proc_pid_status(5), Documentation/scheduler/sched-stats.rst of Linux.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from braid.runtime.diagnose.hang_view import Process

__all__ = ["Sample", "catches", "parse_sample", "process_between", "sample"]

PROC = Path("/proc")


class Sample(NamedTuple):
    """State of a process at one moment.

    Attributes:
        state: Letter of the process state (R, S, D, T, t or Z); empty if the process is gone.
        cpu_ticks: User and system time of all threads so far, in clock ticks.
        major_faults: Number of pages that had to be read from disk so far.
        swapped_bytes: Number of bytes in swap.
        resident_bytes: Number of bytes in memory.
        caught: Bit mask of the signals that the process handles.
        delayed_ns: Nanoseconds in which the main thread has waited for a core so far.
    """

    state: str = ""
    cpu_ticks: int = 0
    major_faults: int = 0
    swapped_bytes: int = 0
    resident_bytes: int = 0
    caught: int = 0
    delayed_ns: int = 0


def sample(pid: int) -> Sample:
    """Return the state of process `pid`, or an empty sample without /proc or such a process."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        status = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return Sample()
    schedstat = ""
    with suppress(OSError):  # a kernel without these numbers
        schedstat = (PROC / str(pid) / "schedstat").read_text()
    return parse_sample(stat, status, schedstat)


def parse_sample(stat: str, status: str, schedstat: str = "") -> Sample:
    """Parse `/proc/PID/stat`, `/proc/PID/status` and `/proc/PID/schedstat`.

    Unreadable numbers become 0.
    """
    columns = stat.rpartition(")")[2].split()  # the name in parentheses may hold anything
    numbers = [int(text) if text.lstrip("-").isdecimal() else 0 for text in columns]
    if len(numbers) < 13:
        return Sample()
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    caught = fields.get("SigCgt", "").strip()
    _, delayed, *_ = [*schedstat.split(), "", ""]
    return Sample(
        state=columns[0],
        cpu_ticks=numbers[11] + numbers[12],
        major_faults=numbers[9],
        swapped_bytes=_kilobytes(fields.get("VmSwap", "")),
        resident_bytes=_kilobytes(fields.get("VmRSS", "")),
        caught=int(caught, 16) if caught and set(caught) <= set("0123456789abcdef") else 0,
        delayed_ns=int(delayed) if delayed.isascii() and delayed.isdecimal() else 0,
    )


def catches(observed: Sample, signum: int) -> bool:
    """Return whether the sampled process has a handler for signal `signum`."""
    return bool(observed.caught >> (signum - 1) & 1)


def process_between(before: Sample, after: Sample, elapsed_ns: int) -> Process:
    """Return the activity of a process between two samples, `elapsed_ns` apart."""
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
        delayed_share=(after.delayed_ns - before.delayed_ns) / 1e9 / elapsed_s if known else 0.0,
    )


def _kilobytes(text: str) -> int:
    """Convert a text such as `   2224 kB` to bytes."""
    number = text.strip().partition(" ")[0]
    return int(number) << 10 if number.isascii() and number.isdecimal() else 0
