"""Describes the machine on which figures are measured."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil

__all__ = ["load_per_core", "machine"]


def load_per_core() -> float:
    """Return the load per core over the last minute; above some tenths it distorts figures."""
    return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)


def machine() -> str:
    """Return the number of cores and the model of the processor."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{psutil.cpu_count()} cores {model}"
