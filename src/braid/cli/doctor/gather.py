"""Collects the facts about this machine; only this module and `probes` query the system."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import socket
import sys
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import psutil

from braid.cli.doctor.checks import DEFAULT_PORT
from braid.cli.doctor.facts import (
    Accelerators,
    Clocks,
    Cores,
    Engines,
    HostNames,
    MemoryFacts,
    NumaNodes,
    Ports,
    ResourceLimits,
    SharedMemory,
    System,
    Threads,
    Versions,
)
from braid.cli.doctor.probes import text_of
from braid.errors import ConfigError
from braid.launch.process.oom import cgroup_paths, parse_limit
from braid.runtime.rendezvous import wants_portable
from braid.runtime.rendezvous.engine_job import name_of_job, shared_networks
from braid.runtime.rendezvous.engine_ranks import as_torchrun, engine_rank

__all__ = [
    "accelerators",
    "clocks",
    "cores",
    "engines",
    "limits",
    "memory",
    "names",
    "nodes",
    "ports",
    "shared_memory",
    "system",
    "threads",
    "versions",
]

CGROUPS = Path("/sys/fs/cgroup")
USAGE = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
CLOCK_READS = 2000


def versions() -> Versions:
    """Return the versions of Python, torch and numpy; imports torch."""
    error, lacks = "", ()
    try:
        importlib.import_module("torch")
        lacks = tuple(importlib.import_module("braid.runtime.torch_internals").missing())
    except ModuleNotFoundError as exc:
        error = "" if exc.name == "torch" else str(exc)
    except Exception as exc:  # noqa: BLE001 - any error of a broken installation is the finding
        error = str(exc).split("\n")[0] or type(exc).__name__
    return Versions(
        python=platform.python_version(),
        torch=_installed("torch"),
        numpy=_installed("numpy"),
        torch_error=error,
        torch_lacks=lacks,
    )


def engines() -> Engines:
    """Return the cluster engines that this process sees."""
    environ = os.environ
    try:
        engine, values = as_torchrun(environ, name_of_job(), shared_networks())
        here = engine_rank(environ) if engine else None
    except ConfigError as exc:
        return Engines(problem=str(exc))
    rank = allocation = ""
    if here is not None:
        address = {"MASTER_ADDR": "?", "MASTER_PORT": "?", **environ, **values}
        rank = (
            f"{engine}, rank {here.rank} of {here.world_size}, local rank {here.local_rank} of "
            f"{here.local_world_size}, ranks meet at {address['MASTER_ADDR']}:"
            f"{address['MASTER_PORT']}"
        )
    elif "SLURM_JOB_ID" in environ:
        nodes = environ.get("SLURM_JOB_NODELIST", "unknown nodes")
        allocation = f"Slurm job {environ['SLURM_JOB_ID']} on {nodes}"
    elif environ.get("RAY_ADDRESS"):
        allocation = f"Ray cluster at {environ['RAY_ADDRESS']}"
    programs = {"Slurm": "srun", "MPI": "mpirun"}
    installed = [name for name, program in programs.items() if shutil.which(program)]
    installed += ["Ray"] if find_spec("ray") is not None else []
    return Engines(rank=rank, allocation=allocation, installed=tuple(installed))


def system() -> System:
    """Return platform, kernel and C library."""
    library, version = platform.libc_ver()
    glibc = version if library == "glibc" else ""
    try:
        portable: bool | None = wants_portable()
    except ConfigError:
        portable = None
    has_shared_counters = True
    if _torch() is not None:  # `braid.runtime.transport` imports torch
        has_shared_counters = importlib.import_module(
            "braid.runtime.transport.atomic"
        ).is_atomic_between_processes()
    return System(
        sys.platform, platform.machine(), platform.release(), glibc, portable, has_shared_counters
    )


def cores() -> Cores:
    """Return the cores of this machine and of this process."""
    return Cores(
        physical=psutil.cpu_count(logical=False) or 0,
        logical=psutil.cpu_count() or 1,
        usable=_usable(),
        quota=_quota(),
        load=os.getloadavg()[0],
    )


def threads() -> Threads:
    """Return the numbers of threads of a rank."""
    torch = _torch()
    return Threads(
        omp=os.environ.get("OMP_NUM_THREADS", ""),
        torch=torch.get_num_threads() if torch is not None else 0,
        usable=_usable(),
    )


def memory() -> MemoryFacts:
    """Return the memory of the host and of the fullest control group."""
    main, swap = psutil.virtual_memory(), psutil.swap_memory()
    groups = [
        (parse_limit(text_of(path / files.limit)), _number(path / USAGE[files.limit]))
        for path, files in cgroup_paths(text_of(Path("/proc/self/cgroup")), CGROUPS)
    ]
    limited = [(limit, used) for limit, used in groups if limit and limit < main.total]
    limit, used = min(limited, key=lambda pair: pair[0] - pair[1], default=(0, 0))
    return MemoryFacts(main.total, main.available, swap.total, swap.free, limit, used)


def shared_memory() -> SharedMemory:
    """Return the size and free space of `/dev/shm`."""
    path = Path("/dev/shm")  # noqa: S108 - nothing is written there
    if not path.is_dir():
        return SharedMemory(0, 0)
    usage = psutil.disk_usage(str(path))
    return SharedMemory(usage.total, usage.free)


def ports() -> Ports:
    """Return the state of loopback ports; no port stays bound."""
    error = ""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen(1)
    except OSError as exc:
        error = exc.strerror or str(exc)
    limits = text_of(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    first, last = map(int, limits) if len(limits) == 2 else (0, 65535)
    with socket.socket() as other:
        other.settimeout(1.0)
        used = not error and other.connect_ex(("127.0.0.1", DEFAULT_PORT)) == 0
    return Ports(error, first, last, used)


def names() -> HostNames:
    """Return the addresses of the host name and of `localhost`."""
    hostname = socket.gethostname()
    start_s = time.monotonic()
    addresses, error = _addresses(hostname)
    seconds = time.monotonic() - start_s
    lines = (line.partition("#")[0].split() for line in text_of(Path("/etc/hosts")).splitlines())
    in_hosts = any(hostname in entry[1:] for entry in lines)
    return HostNames(hostname, addresses, error, seconds, _addresses("localhost")[0], in_hosts)


def limits() -> ResourceLimits:
    """Return the resource limits of this process."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    pairs = [resource.getrlimit(kind) for kind in kinds]
    (files, hard_files), (processes, _), (locked, _) = (
        tuple(None if limit == resource.RLIM_INFINITY else limit for limit in pair)
        for pair in pairs
    )
    return ResourceLimits(files, hard_files, processes, locked)


def clocks() -> Clocks:
    """Return the kernel's time source, and the duration of one reading."""
    start_ns = time.monotonic_ns()
    for _ in range(CLOCK_READS):
        time.monotonic_ns()
    read_ns = (time.monotonic_ns() - start_ns) / CLOCK_READS
    folder = Path("/sys/devices/system/clocksource/clocksource0")
    return Clocks(text_of(folder / "current_clocksource"), read_ns)


def accelerators() -> Accelerators:
    """Return the GPUs that torch sees."""
    torch = _torch()
    driver = text_of(Path("/sys/module/nvidia/version"))
    if torch is None:
        return Accelerators((), "", "", driver)
    cuda = torch.version.cuda or ""
    try:
        seen = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        gpus = tuple(torch.cuda.get_device_name(index) for index in seen)
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
    except (RuntimeError, AssertionError, AttributeError) as exc:
        return Accelerators((), cuda, "", driver, str(exc).split("\n")[0])
    return Accelerators(gpus, cuda, nccl, driver)


def nodes() -> NumaNodes:
    """Return the NUMA nodes that have processors."""
    paths = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    lists = [text_of(path) for path in paths]
    return NumaNodes(tuple(cpus for cpus in lists if cpus))


def _torch() -> ModuleType | None:
    """Return torch, or None if it cannot be imported; `versions` reports the error."""
    try:
        return importlib.import_module("torch")
    except Exception:  # noqa: BLE001 - any error of a broken installation
        return None


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _usable() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota() -> float | None:
    """Return the CPU quota of the control group (v2, then v1) in cores; None without a quota."""
    for line in text_of(Path("/proc/self/cgroup")).splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        relative = path.strip("/")
        for folder in (CGROUPS / relative, CGROUPS):
            fields = text_of(folder / "cpu.max").split()
            if hierarchy == "0" and len(fields) == 2 and fields[0].isdecimal():
                return int(fields[0]) / int(fields[1])
        if "cpu" in controllers.split(","):
            for folder in (CGROUPS / "cpu" / relative, CGROUPS / "cpu"):
                quota, period = (
                    _number(folder / "cpu.cfs_quota_us"),
                    _number(folder / "cpu.cfs_period_us"),
                )
                if quota > 0 and period > 0:
                    return quota / period
    return None


def _addresses(name: str) -> tuple[tuple[str, ...], str]:
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        return (), exc.strerror or str(exc)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)), ""


def _number(path: Path) -> int:
    text = text_of(path)
    return int(text) if text.isascii() and text.isdecimal() else 0
