"""Start, shutdown and properties of the job: `init`, `rank`, `size`, `local_rank` and others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from braid.comm import Group
from braid.compat.horovod.common.exceptions import translated
from braid.compat.horovod.common.process_sets import ProcessSet, add_process_set, check_sets
from braid.compat.horovod.session import session, start, started, stop
from braid.errors import ConfigError

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
) -> None:
    """Start Horovod's session on this rank. Calling it again has no effect.

    Args:
        comm: None, a `braid.Group`, or the list of all ranks; for operations among some ranks use
            process sets.
        process_sets: Sets that exist from the beginning, the same on all ranks; "dynamic" is
            accepted, since sets can always be added.

    Raises:
        ConfigError: `comm` is invalid, or a process set occurs twice or has ranks that do not
            exist.
    """
    if started():
        return
    sets = check_sets([] if process_sets is None or isinstance(process_sets, str) else process_sets)
    if process_sets is not None and isinstance(process_sets, str) and process_sets != "dynamic":
        msg = f"process_sets must be a list or 'dynamic', got {process_sets!r}"
        raise ConfigError(msg)
    current = start(comm if isinstance(comm, Group) else None)
    everybody = list(range(current.group.size))
    if comm is not None and not isinstance(comm, Group) and list(comm) not in ([], everybody):
        stop()
        msg = (
            f"comm must be None, a Group or all ranks {everybody}, got {comm!r}: pass "
            "process_sets= for operations among some ranks"
        )
        raise ConfigError(msg)
    try:
        for wanted in sets:
            add_process_set(wanted)
    except BaseException:
        stop()
        raise


def shutdown() -> None:
    """End the session; operations in flight fail on all ranks."""
    stop()


def is_initialized() -> bool:
    """Return whether `init` has been called."""
    return started()


def rank() -> int:
    """Return the rank of this process."""
    return session().group.rank


def size() -> int:
    """Return the number of ranks."""
    return session().group.size


def local_rank() -> int:
    """Return this rank's number among the ranks of this host."""
    return session().job.local_rank


def local_size() -> int:
    """Return the number of ranks of this host."""
    return session().local_size


def cross_rank() -> int:
    """Return the index of this host among the hosts that have a rank with this local rank."""
    return session().cross[0]


def cross_size() -> int:
    """Return the number of hosts that have a rank with this process's local rank."""
    return session().cross[1]


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return session().homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the operations on each tensor from now on; all ranks call this.

    Args:
        file_path: Path where `stop_timeline` writes the timeline, on rank 0.
        mark_cycles: Whether to record each exchange as well.
    """
    current = session()
    current.timeline = os.fspath(file_path)
    current.whole.engine.timeline.start(mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Write the timelines of all ranks into one file on rank 0; all ranks call this.

    Raises:
        HorovodInternalError: Another rank has shut down.
    """
    current = session()
    path = current.timeline or current.environment.timeline
    with translated():
        current.whole.engine.stop_timeline(Path(path) if path else None).wait()


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return True: ranks communicate without MPI; scripts call this to check for that."""
    return True


def gloo_built() -> bool:
    """Return True: see `gloo_enabled`."""
    return True


def nccl_built() -> int:
    """Return NCCL's version as one number, such as 22703; 0 if torch has no NCCL or no GPU."""
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = (*version, 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built for ROCm."""
    return torch.version.hip is not None
