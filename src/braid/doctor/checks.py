"""The checks: from facts to a finding, each a pure function. Thresholds stand here with their reasons."""

from __future__ import annotations

import re

from braid.doctor.facts import (
    Accelerators,
    Clocks,
    Container,
    Cores,
    Limits,
    Memory,
    Names,
    Nodes,
    Permissions,
    Ports,
    SharedMemory,
    System,
    Threads,
    Versions,
)
from braid.doctor.finding import Finding, note, ok, problem

__all__ = [
    "check_clock",
    "check_container",
    "check_cores",
    "check_gpus",
    "check_kernel_permissions",
    "check_limits",
    "check_memory",
    "check_names",
    "check_nodes",
    "check_ports",
    "check_shared_memory",
    "check_system",
    "check_threads",
    "check_versions",
]

GIB = 1 << 30
OLDEST = {"python": (3, 10), "torch": (2, 10), "numpy": (1, 26)}
OLDEST_KERNEL = (5, 3)  # pidfd_open
LITTLE_MEMORY = 2 * GIB  # torch alone takes 0.3 GiB a rank
NO_MEMORY = GIB // 2
LITTLE_SHM = 256 << 20  # a container's default is 64 MiB: one batch of images
FEW_FILES = 1024  # a rank holds some 10, and 4 for each peer
FEW_PROCESSES = 256
FEW_PORTS = 1000
SLOW_NAME_S = 1.0
SLOW_CLOCK_NS = 500.0  # a clock read by a system call, and every event reads it twice
DEFAULT_PORT = 29500


def check_versions(facts: Versions) -> list[Finding]:
    """Python, torch and numpy are there and new enough."""
    found = [_version("python", facts.python, "install a newer Python, and braid with it")]
    for name, version in (("torch", facts.torch), ("numpy", facts.numpy)):
        least = ".".join(map(str, OLDEST[name]))
        found.append(_version(name, version, f"pip install '{name}>={least}'"))
    if facts.torch_error:
        advice = "install torch again: `python -c 'import torch'` shows the whole error"
        found[1] = problem(
            "torch", f"{facts.torch}, cannot be imported: {facts.torch_error}", advice
        )
    found.append(
        ok("braid", f"{facts.braid} in {facts.braid_path}" if facts.braid_path else facts.braid)
    )
    return found


def check_system(facts: System) -> Finding:
    """Ranks share memory on Linux on x86-64, and send each other copies elsewhere."""
    libc = f", glibc {facts.glibc}" if facts.glibc else ""
    found = f"{facts.platform} {facts.kernel} on {facts.machine}{libc}"
    if facts.portable is None:
        advice = "set BRAID_PORTABLE to 0 or 1, or unset it: no rank starts as it is"
        return problem("system", f"{found}, BRAID_PORTABLE is neither 0 nor 1", advice)
    if facts.platform != "linux" or facts.machine not in {"x86_64", "AMD64"}:
        advice = (
            "use Linux on x86-64 where speed matters: here ranks send each other copies over "
            "loopback sockets"
        )
        return note("system", found, advice)
    if facts.portable:
        advice = (
            "unset BRAID_PORTABLE where speed matters: with it ranks send each other copies "
            "over loopback sockets"
        )
        return note("system", f"{found}, BRAID_PORTABLE=1", advice)
    if not facts.counts:
        advice = (
            "install the C++ runtime (libstdc++.so.6) where speed matters: without it ranks "
            "send each other copies over loopback sockets"
        )
        return note("system", f"{found}, no C++ runtime", advice)
    if _numbers(facts.kernel)[:2] < OLDEST_KERNEL:
        advice = (
            f"a kernel from {'.'.join(map(str, OLDEST_KERNEL))} on lets ranks see each "
            "other's deaths at once"
        )
        return note("system", found, advice)
    return ok("system", found)


def check_cores(facts: Cores) -> Finding:
    """A rank wants a core of its own."""
    physical = f"{facts.physical} physical, " if facts.physical else ""
    found = (
        f"{physical}{facts.logical} logical, {facts.usable} usable by this process, load "
        f"{facts.load:.1f}"
    )
    if facts.quota is not None:
        found += f", quota {facts.quota:g}"
        if facts.quota < facts.usable:
            advice = (
                f"run at most {max(1, int(facts.quota))} busy threads in all: the control "
                "group throttles more"
            )
            return note("cores", found, advice)
    if facts.usable == 1:
        return note(
            "cores", found, "ranks will take turns on the one core: expect no gain from several"
        )
    if facts.load > facts.usable:
        return note("cores", found, "others compute here: measure when the host is idle")
    return ok("cores", found)


def check_threads(facts: Threads) -> Finding:
    """Threads of a rank must not take the cores of the others."""
    torch = f", torch uses {facts.torch} threads" if facts.torch else ""
    if not facts.omp:
        return ok(
            "threads", f"OMP_NUM_THREADS is not set (braid run sets it to cores / ranks){torch}"
        )
    found = f"OMP_NUM_THREADS={facts.omp}{torch}"
    if not facts.omp.isdecimal() or not int(facts.omp):
        return note("threads", found, "set it to a number from 1 on, or unset it")
    if int(facts.omp) > facts.usable:
        return note(
            "threads", found, f"set it to cores / ranks: {facts.usable} cores are usable here"
        )
    return ok("threads", found)


def check_memory(facts: Memory) -> Finding:
    """Ranks are processes, and each has its own torch."""
    found = f"{_size(facts.total)}, {_size(facts.available)} available, "
    found += (
        f"swap {_size(facts.swap_free)} free of {_size(facts.swap_total)}"
        if facts.swap_total
        else "no swap"
    )
    left = facts.available
    if facts.limit:
        left = min(left, max(0, facts.limit - facts.used))
        found += f", control group {_size(facts.used)} of {_size(facts.limit)}"
    if left < NO_MEMORY:
        return problem(
            "memory",
            found,
            "end other programs, or raise the container's memory limit: a rank does not fit",
        )
    if left < LITTLE_MEMORY:
        return note(
            "memory", found, f"count 0.3 GiB for each rank before its model; {_size(left)} are left"
        )
    return ok("memory", found)


def check_shared_memory(facts: SharedMemory) -> Finding:
    """Braid's own memory has no name and does not lie in /dev/shm; tensors that torch shares do."""
    if not facts.size:
        found = "no /dev/shm; braid itself does not need it, torch's DataLoader workers do"
        return note("shared memory", found, "mount a tmpfs there, or use DataLoader(num_workers=0)")
    found = (
        f"{_size(facts.free)} free of {_size(facts.size)} in /dev/shm, where only tensors "
        "that torch shares lie"
    )
    if facts.free < LITTLE_SHM:
        return note(
            "shared memory",
            found,
            "docker run --shm-size=1g (or --ipc=host), for DataLoader workers",
        )
    return ok("shared memory", found)


def check_kernel_permissions(facts: Permissions) -> list[Finding]:
    """What processes may do with each other; each was tried on a child."""
    found = [
        _tried(
            "memfd_create",
            facts.memfd,
            "memory without a name",
            "allow memfd_create in the seccomp profile; until then unlinked files in TMPDIR take "
            "its place",
        ),
        _tried(
            "pidfd_open",
            facts.pidfd,
            "deaths are seen at once",
            "allow pidfd_open in the seccomp profile; until then deaths are seen through the "
            "launcher only",
        ),
        _tried(
            "/proc/<pid>/fd",
            facts.descriptors,
            "ranks open each other's memory",
            "ranks hand descriptors over sockets instead: nothing to do, joining takes a little "
            "longer",
        ),
    ]
    scope = "no Yama" if facts.ptrace_scope is None else f"Yama's ptrace_scope {facts.ptrace_scope}"
    refused = facts.read_child or facts.read_sibling
    advice = "large tensors are copied twice until process_vm_readv is allowed: ptrace_scope 0 or 1"
    advice += ", docker run --cap-add=SYS_PTRACE"
    found.append(
        note("process_vm_readv", f"{refused} ({scope})", advice)
        if refused
        else ok("process_vm_readv", f"ranks read each other's memory ({scope})")
    )
    filters = {0: "none", 1: "strict", 2: "a filter"}.get(facts.seccomp, str(facts.seccomp))
    found.append(ok("seccomp", filters))
    pattern = facts.core_pattern or "unknown"
    found.append(ok("core dumps", f"go to {pattern}"))
    return found


def check_ports(facts: Ports) -> Finding:
    """Programs for torch.distributed meet on a loopback port."""
    if facts.bind_error:
        advice = "bring the loopback interface up: ip link set lo up"
        return problem("ports", f"127.0.0.1 cannot be bound: {facts.bind_error}", advice)
    found = f"127.0.0.1 can be bound, ephemeral {facts.first} to {facts.last}"
    if facts.default_port_used:
        found += f", {DEFAULT_PORT} in use"
        return note(
            "ports",
            found,
            "`braid run` takes a free port; for torchrun set --master-port other than "
            f"{DEFAULT_PORT}",
        )
    if facts.last - facts.first < FEW_PORTS:
        return note(
            "ports", found, "widen net.ipv4.ip_local_port_range: many ranks need many ports"
        )
    return ok("ports", f"{found}, {DEFAULT_PORT} free")


def check_names(facts: Names) -> Finding:
    """Gloo and others look up the host's own name; braid uses addresses only."""
    if facts.localhost and not any(a.startswith("127.") or a == "::1" for a in facts.localhost):
        found = f"localhost is {', '.join(facts.localhost)}"
        return note("names", found, "put `127.0.0.1 localhost` into /etc/hosts")
    if facts.error:
        found = f"{facts.hostname} has no address ({facts.error})"
        return note(
            "names",
            found,
            f"put `127.0.1.1 {facts.hostname}` into /etc/hosts: Gloo looks the name up",
        )
    where = ", in /etc/hosts" if facts.in_hosts else ""
    found = f"{facts.hostname} is {', '.join(facts.addresses)}{where}"
    if facts.seconds > SLOW_NAME_S:
        found += f", after {facts.seconds:.1f} s"
        return note(
            "names",
            found,
            f"put {facts.hostname} into /etc/hosts: every rank waits for that look-up",
        )
    return ok("names", found)


def check_limits(facts: Limits) -> Finding:
    """Ranks hold descriptors of all their peers."""
    found = f"open files {_count(facts.files)}, processes {_count(facts.processes)}, locked memory "
    found += "without limit" if facts.locked_bytes is None else _size(facts.locked_bytes)
    if facts.files is not None and facts.files < FEW_FILES:
        more = _count(facts.hard_files)
        return note(
            "limits",
            found,
            f"ulimit -n {more if more.isdecimal() else 65536}: each rank holds 4 for each peer",
        )
    if facts.processes is not None and facts.processes < FEW_PROCESSES:
        return note(
            "limits", found, "ulimit -u 4096: ranks, their threads and DataLoader workers all count"
        )
    return ok("limits", found)


def check_clock(facts: Clocks) -> Finding:
    """Every recorded event reads the clock twice."""
    found = f"{facts.source or 'unknown source'}, {facts.read_ns:.0f} ns a reading"
    if facts.read_ns > SLOW_CLOCK_NS:
        return note(
            "time",
            found,
            "boot with clocksource=tsc if the host's is stable: each event reads it twice",
        )
    return ok("time", found)


def check_gpus(facts: Accelerators) -> Finding:
    """GPUs are no condition."""
    if facts.error:
        return note(
            "GPUs",
            f"torch.cuda fails: {facts.error}",
            "see `nvidia-smi`: driver and torch's CUDA must fit",
        )
    if facts.names:
        names = sorted({(facts.names.count(name), name) for name in facts.names}, reverse=True)
        found = ", ".join(f"{count} x {name}" for count, name in names)
        return ok(
            "GPUs",
            f"{found}, CUDA {facts.cuda}, NCCL {facts.nccl or 'none'}, driver "
            f"{facts.driver or 'unknown'}",
        )
    if facts.driver:
        found = (
            f"NVIDIA driver {facts.driver}, but torch sees no GPU (CUDA "
            f"{facts.cuda or 'none: a CPU build'})"
        )
        return note("GPUs", found, "install torch for CUDA, and see CUDA_VISIBLE_DEVICES")
    return ok("GPUs", "none")


def check_nodes(facts: Nodes) -> Finding:
    """Memory of another node is slower."""
    if len(facts.processors) < 2:
        return ok("NUMA", "one node")
    found = "; ".join(f"node {node}: {cpus}" for node, cpus in enumerate(facts.processors))
    return note("NUMA", found, "bind ranks to nodes: numactl --cpunodebind, or one run per node")


def check_container(facts: Container) -> Finding:
    """For whoever reads this from afar."""
    return ok("container", f"{facts.kind}, process 1 is {facts.pid_one}" if facts.kind else "none")


def _version(name: str, found: str, advice: str) -> Finding:
    least = ".".join(map(str, OLDEST[name]))
    if not found:
        return problem(name, "not installed", advice)
    if _numbers(found)[:2] < OLDEST[name]:
        return problem(name, f"{found}, expected {least} or newer", advice)
    return ok(name, found)


def _tried(check: str, refused: str, good: str, advice: str) -> Finding:
    return note(check, refused, advice) if refused else ok(check, good)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.0f} MiB"


def _count(limit: int | None) -> str:
    return "without limit" if limit is None else str(limit)
