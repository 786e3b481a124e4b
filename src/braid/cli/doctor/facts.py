"""Facts about a machine: the input of the checks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "Accelerators",
    "Clocks",
    "Cores",
    "Engines",
    "HostNames",
    "MemoryFacts",
    "NumaNodes",
    "Permissions",
    "Ports",
    "ResourceLimits",
    "SharedMemory",
    "System",
    "Threads",
    "Versions",
]


class Versions(NamedTuple):
    """Versions of packages; empty for a package that is not installed."""

    python: str
    torch: str
    numpy: str
    torch_error: str = ""
    torch_lacks: tuple[str, ...] = ()  # private names that braid uses


class System(NamedTuple):
    """Platform of the machine.

    Attributes:
        platform: Value of `sys.platform`.
        machine: Machine type, as in uname(2).
        kernel: Release of the kernel, as in uname(2).
        glibc: Version of glibc; empty with another C library.
        portable: Whether `BRAID_PORTABLE` forbids shared memory; None if its value is invalid.
        has_shared_counters: Whether ranks can increment a counter in shared memory atomically.
    """

    platform: str
    machine: str
    kernel: str
    glibc: str
    portable: bool | None = False
    has_shared_counters: bool = True


class Engines(NamedTuple):
    """Cluster engines that this process sees.

    Attributes:
        rank: Text with the rank of this process under srun, mpirun or Kubernetes; empty for none.
        problem: Reason why the engine's variables are inconsistent.
        allocation: Text with the allocation that contains this process, if it is not a rank.
        installed: Engines with installed programs or packages.
    """

    rank: str = ""
    problem: str = ""
    allocation: str = ""
    installed: tuple[str, ...] = ()


class Cores(NamedTuple):
    """Numbers of cores; `physical` is 0 if unknown, `quota` is None without a quota."""

    physical: int
    logical: int
    usable: int
    quota: float | None
    load: float


class Threads(NamedTuple):
    """Numbers of threads: `OMP_NUM_THREADS` as set, torch's choice (0 without torch), cores."""

    omp: str
    torch: int
    usable: int


class MemoryFacts(NamedTuple):
    """Memory in bytes; `limit` and `used` describe the control group, 0 without a limit."""

    total: int
    available: int
    swap_total: int
    swap_free: int
    limit: int = 0
    used: int = 0


class SharedMemory(NamedTuple):
    """Size and free space of `/dev/shm` in bytes; both 0 if it does not exist."""

    size: int
    free: int


class Permissions(NamedTuple):
    """Results of system calls between processes; a text is empty after success, else the reason.

    Attributes:
        memfd: Result of memfd_create.
        pidfd: Result of pidfd_open of a child.
        read_child: Result of process_vm_readv of a child.
        read_sibling: Result of process_vm_readv of a sibling that allows it.
        ptrace_scope: Yama's setting; None without Yama.
    """

    memfd: str
    pidfd: str
    read_child: str
    read_sibling: str
    ptrace_scope: int | None


class Ports(NamedTuple):
    """Ports of the loopback interface.

    Attributes:
        bind_error: Reason why 127.0.0.1 cannot be bound; empty if it can.
        first: First ephemeral port.
        last: Last ephemeral port.
        default_port_used: Whether a process listens on port 29500.
    """

    bind_error: str
    first: int
    last: int
    default_port_used: bool


class HostNames(NamedTuple):
    """Names of this host.

    Attributes:
        hostname: Name of the host.
        addresses: Addresses of the host name.
        error: Reason why there are no addresses; empty if there are.
        seconds: Duration of the look-up of the host name.
        localhost: Addresses of `localhost`.
        in_hosts: Whether /etc/hosts contains the host name.
    """

    hostname: str
    addresses: tuple[str, ...]
    error: str
    seconds: float
    localhost: tuple[str, ...]
    in_hosts: bool


class ResourceLimits(NamedTuple):
    """Soft resource limits; None for no limit. `hard_files` is the hard limit of open files."""

    files: int | None
    hard_files: int | None
    processes: int | None
    locked_bytes: int | None


class Clocks(NamedTuple):
    """Time source of the kernel, empty if unknown, and the duration of one reading."""

    source: str
    read_ns: float


class Accelerators(NamedTuple):
    """GPUs that torch sees, versions (empty if none), driver of this host, and torch's error."""

    names: tuple[str, ...]
    cuda: str
    nccl: str
    driver: str
    error: str = ""


class NumaNodes(NamedTuple):
    """Processors of each NUMA node, as the kernel lists them."""

    processors: tuple[str, ...]
