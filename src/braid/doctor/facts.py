"""What checks are made of: plain facts about a machine, as they can be made up in a test."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "Accelerators",
    "Clocks",
    "Container",
    "Cores",
    "Limits",
    "Memory",
    "Names",
    "Nodes",
    "Permissions",
    "Ports",
    "SharedMemory",
    "System",
    "Threads",
    "Versions",
]


class Versions(NamedTuple):
    """Versions; empty for what is not installed."""

    python: str
    torch: str
    numpy: str
    braid: str
    braid_path: str = ""
    torch_error: str = ""


class System(NamedTuple):
    """Platform, as in `sys.platform` and uname(2); `glibc` is empty with another C library.

    `portable` is whether the environment forbids to share memory; None when it says neither yes nor
    no. `counts` is whether ranks can count on one word that they share.
    """

    platform: str
    machine: str
    kernel: str
    glibc: str
    portable: bool | None = False
    counts: bool = True


class Cores(NamedTuple):
    """Cores; 0 for an unknown number of physical ones, `quota` None without one."""

    physical: int
    logical: int
    usable: int
    quota: float | None
    load: float


class Threads(NamedTuple):
    """Threads: `OMP_NUM_THREADS` as it is set, and torch's own choice (0 without torch)."""

    omp: str
    torch: int
    usable: int


class Memory(NamedTuple):
    """Memory in bytes; `limit` and `used` are the control group's, 0 without a limit."""

    total: int
    available: int
    swap_total: int
    swap_free: int
    limit: int = 0
    used: int = 0


class SharedMemory(NamedTuple):
    """`/dev/shm` in bytes; both 0 when it is missing."""

    size: int
    free: int


class Permissions(NamedTuple):
    """What the kernel lets processes do, each tried: empty when it worked, else why it did not.

    Attributes:
        memfd: memfd_create.
        pidfd: pidfd_open of a child.
        descriptors: Opening a sibling's memory through /proc/<pid>/fd.
        read_child: process_vm_readv of a child.
        read_sibling: process_vm_readv of a sibling that allows it.
        ptrace_scope: Yama's, None without Yama.
        seccomp: 0 none, 1 strict, 2 filter.
        core_pattern: Where core dumps go.
    """

    memfd: str
    pidfd: str
    descriptors: str
    read_child: str
    read_sibling: str
    ptrace_scope: int | None
    seccomp: int
    core_pattern: str


class Ports(NamedTuple):
    """Ports: why the loopback interface cannot be bound (empty if it can), the ephemeral range, who is on 29500."""

    bind_error: str
    first: int
    last: int
    default_port_used: bool


class Names(NamedTuple):
    """Names: the addresses of the own name and of `localhost`, or why there are none; how long the former took."""

    hostname: str
    addresses: tuple[str, ...]
    error: str
    seconds: float
    localhost: tuple[str, ...]
    in_hosts: bool


class Limits(NamedTuple):
    """Soft resource limits; None for no limit. `hard_files` is the hard one of open files."""

    files: int | None
    hard_files: int | None
    processes: int | None
    locked_bytes: int | None


class Clocks(NamedTuple):
    """Time: the kernel's source, empty when unknown, and what reading it costs."""

    source: str
    read_ns: float


class Accelerators(NamedTuple):
    """GPUs that torch sees, versions (empty for none), the driver on this host, and torch's error."""

    names: tuple[str, ...]
    cuda: str
    nccl: str
    driver: str
    error: str = ""


class Nodes(NamedTuple):
    """NUMA: the processors of each node, as the kernel lists them."""

    processors: tuple[str, ...]


class Container(NamedTuple):
    """Name of what contains this process, empty for nothing, and whether it shares the host's processes' numbers."""

    kind: str
    pid_one: str
