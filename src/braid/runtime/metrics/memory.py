"""Memory of this process, and what torch has allocated on its GPU."""

from __future__ import annotations

import resource
import sys

import psutil

__all__ = ["memory_bytes"]

PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage's ru_maxrss


def memory_bytes() -> dict[str, int]:
    """Return bytes by name: of the process, and of a GPU that is in use; `rows` has the names."""
    nbytes = {
        "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT,
    }
    torch = sys.modules.get("torch")  # a process that has not imported it uses no GPU
    if torch is not None and torch.cuda.is_initialized():
        # one call for both numbers: it takes half a millisecond
        allocated = torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
        nbytes |= {"cuda_bytes": allocated["current"], "cuda_peak_bytes": allocated["peak"]}
    return nbytes
