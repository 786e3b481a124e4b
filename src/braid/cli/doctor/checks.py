"""Pure functions from facts about a machine to findings, and their thresholds with reasons."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, TypeAlias

from braid._version import TORCH_VERSIONS
from braid.cli.doctor.facts import (
    Accelerators,
    Clocks,
    Cores,
    Engines,
    HostNames,
    MemoryFacts,
    NumaNodes,
    Permissions,
    Ports,
    ResourceLimits,
    SharedMemory,
    System,
    Threads,
    Versions,
)
from braid.runtime.text import bytes_text

__all__ = [
    "Finding",
    "check_clock",
    "check_cores",
    "check_engines",
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
LITTLE_MEMORY = 2 * GIB  # torch alone takes 0.3 GiB per rank
NO_MEMORY = GIB // 2
LITTLE_SHM = 256 << 20  # a container's default is 64 MiB: one batch of images
FEW_FILES = 1024  # a rank has about 10 open files, and 4 for each peer
FEW_PROCESSES = 256
FEW_PORTS = 1000
SLOW_NAME_S = 1.0
SLOW_CLOCK_NS = 500.0  # such a clock needs a system call, and every event reads it twice
DEFAULT_PORT = 29500

Verdict: TypeAlias = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """Result of one check of `braid doctor`.

    Attributes:
        check: Name of the check.
        verdict: `ok`; `note` if speed, comfort or error messages suffer; `problem` if braid cannot
            be used.
        fact: Observed fact, on one line.
        advice: Advice, on one line; empty for `ok`.
    """

    check: str
    verdict: Verdict
    fact: str
    advice: str = ""


def ok(check: str, fact: str) -> Finding:
    """Return a finding that needs no advice."""
    return Finding(check, "ok", fact)


def note(check: str, fact: str, advice: str) -> Finding:
    """Return a finding with advice that does not prevent runs."""
    return Finding(check, "note", fact, advice)


def problem(check: str, fact: str, advice: str) -> Finding:
    """Return a finding that makes runs impossible."""
    return Finding(check, "problem", fact, advice)


def check_versions(facts: Versions) -> list[Finding]:
    """Check that Python, torch and numpy are installed and new enough."""
    findings = [_version("python", facts.python, "install a newer Python, and braid with it")]
    for name, version in (("torch", facts.torch), ("numpy", facts.numpy)):
        least = ".".join(map(str, OLDEST[name]))
        findings.append(_version(name, version, f"pip install '{name}>={least}'"))
    if facts.torch_error:
        advice = "install torch again: `python -c 'import torch'` shows the whole error"
        findings[1] = problem(
            "torch", f"{facts.torch}, cannot be imported: {facts.torch_error}", advice
        )
    elif facts.torch_lacks:
        fact = f"{facts.torch} lacks {', '.join(facts.torch_lacks)}, which braid uses"
        findings[1] = problem("torch", fact, f"pip install 'torch=={TORCH_VERSIONS[-1]}'")
    elif _numbers(facts.torch)[:2] > _numbers(TORCH_VERSIONS[-1])[:2]:
        fact = (
            f"{facts.torch}, newer than {TORCH_VERSIONS[-1]}, the newest that braid was tested with"
        )
        advice = f"if an error names torch, pip install 'torch=={TORCH_VERSIONS[-1]}'"
        findings[1] = note("torch", fact, advice)
    return findings


def check_system(facts: System) -> Finding:
    """Check that ranks can share memory: on Linux on x86-64 only; elsewhere they send copies."""
    libc = f", glibc {facts.glibc}" if facts.glibc else ""
    fact = f"{facts.platform} {facts.kernel} on {facts.machine}{libc}"
    if facts.portable is None:
        advice = "set BRAID_PORTABLE to 0 or 1, or unset it: no rank can start with this value"
        return problem("system", f"{fact}, BRAID_PORTABLE is neither 0 nor 1", advice)
    if facts.platform != "linux" or facts.machine not in {"x86_64", "AMD64"}:
        advice = (
            "use Linux on x86-64 where speed matters: on this machine ranks send copies over "
            "loopback sockets"
        )
        return note("system", fact, advice)
    if facts.portable:
        advice = (
            "unset BRAID_PORTABLE where speed matters: with it, ranks send copies over loopback "
            "sockets"
        )
        return note("system", f"{fact}, BRAID_PORTABLE=1", advice)
    if not facts.has_shared_counters:
        advice = (
            "install the C++ runtime (libstdc++.so.6) where speed matters: without it, ranks send "
            "copies over loopback sockets"
        )
        return note("system", f"{fact}, no C++ runtime", advice)
    if _numbers(facts.kernel)[:2] < OLDEST_KERNEL:
        advice = (
            f"use a kernel from {'.'.join(map(str, OLDEST_KERNEL))} on, which lets ranks notice "
            "the death of a peer immediately"
        )
        return note("system", fact, advice)
    return ok("system", fact)


def check_engines(facts: Engines) -> Finding:
    """Report the cluster engine of this process, and the rank that it assigned."""
    if facts.problem:
        advice = "unset these variables, or start the program in one way only"
        return problem("engine", facts.problem, advice)
    where = facts.rank or facts.allocation or "none: ranks start on this host"
    installed = f"; here are {', '.join(facts.installed)}" if facts.installed else ""
    if facts.allocation and not facts.rank:
        engine = facts.allocation.split(" ")[0].lower()
        advice = f"start ranks on all of its nodes with braid run --on {engine} -n N script.py"
        return note("engine", f"{where}{installed}", advice)
    return ok("engine", f"{where}{installed}")


def check_cores(facts: Cores) -> Finding:
    """Check that several ranks can each have a core."""
    physical = f"{facts.physical} physical, " if facts.physical else ""
    fact = (
        f"{physical}{facts.logical} logical, {facts.usable} usable by this process, load "
        f"{facts.load:.1f}"
    )
    if facts.quota is not None:
        fact += f", quota {facts.quota:g}"
        if facts.quota < facts.usable:
            advice = (
                f"run at most {max(1, int(facts.quota))} busy threads in all: the control "
                "group throttles more"
            )
            return note("cores", fact, advice)
    if facts.usable == 1:
        return note(
            "cores", fact, "ranks will take turns on the one core: expect no gain from several"
        )
    if facts.load > facts.usable:
        return note("cores", fact, "other programs use the cores: measure when the host is idle")
    return ok("cores", fact)


def check_threads(facts: Threads) -> Finding:
    """Check that the threads of one rank leave cores for all other ranks."""
    torch = f", torch uses {facts.torch} threads" if facts.torch else ""
    if not facts.omp:
        return ok(
            "threads", f"OMP_NUM_THREADS is not set (braid run sets it to cores / ranks){torch}"
        )
    fact = f"OMP_NUM_THREADS={facts.omp}{torch}"
    if not facts.omp.isdecimal() or not int(facts.omp):
        return note("threads", fact, "set it to a positive integer, or unset it")
    if int(facts.omp) > facts.usable:
        return note(
            "threads", fact, f"set it to cores / ranks: {facts.usable} cores are usable here"
        )
    return ok("threads", fact)


def check_memory(facts: MemoryFacts) -> Finding:
    """Check the free memory: each rank is a process with its own torch."""
    fact = f"{bytes_text(facts.total)}, {bytes_text(facts.available)} available, "
    fact += (
        f"swap {bytes_text(facts.swap_free)} free of {bytes_text(facts.swap_total)}"
        if facts.swap_total
        else "no swap"
    )
    remaining = facts.available
    if facts.limit:
        remaining = min(remaining, max(0, facts.limit - facts.used))
        fact += f", control group {bytes_text(facts.used)} of {bytes_text(facts.limit)}"
    if remaining < NO_MEMORY:
        return problem(
            "memory",
            fact,
            "end other programs, or raise the container's memory limit: no rank fits",
        )
    if remaining < LITTLE_MEMORY:
        return note(
            "memory",
            fact,
            f"each rank needs 0.3 GiB besides its model; {bytes_text(remaining)} are available",
        )
    return ok("memory", fact)


def check_shared_memory(facts: SharedMemory) -> Finding:
    """Check /dev/shm, which holds tensors that torch shares, but no memory of braid."""
    if not facts.size:
        fact = "no /dev/shm; braid itself does not need it, torch's DataLoader workers do"
        return note("shared memory", fact, "mount a tmpfs there, or use DataLoader(num_workers=0)")
    fact = (
        f"{bytes_text(facts.free)} free of {bytes_text(facts.size)} in /dev/shm, used only "
        "for tensors that torch shares"
    )
    if facts.free < LITTLE_SHM:
        return note(
            "shared memory",
            fact,
            "docker run --shm-size=1g (or --ipc=host), for DataLoader workers",
        )
    return ok("shared memory", fact)


def check_kernel_permissions(facts: Permissions) -> list[Finding]:
    """Check the system calls between processes that the probes have tried."""
    findings = [
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
            "ranks notice the death of a peer immediately",
            "allow pidfd_open in the seccomp profile; until then only the launcher notices deaths",
        ),
    ]
    scope = "no Yama" if facts.ptrace_scope is None else f"Yama's ptrace_scope {facts.ptrace_scope}"
    refused = facts.read_child or facts.read_sibling
    advice = "large tensors are copied twice until process_vm_readv is allowed: ptrace_scope 0 or 1"
    advice += ", docker run --cap-add=SYS_PTRACE"
    findings.append(
        note("process_vm_readv", f"{refused} ({scope})", advice)
        if refused
        else ok("process_vm_readv", f"ranks read each other's memory ({scope})")
    )
    return findings


def check_ports(facts: Ports) -> Finding:
    """Check the loopback ports, on which programs for torch.distributed meet."""
    if facts.bind_error:
        advice = "bring the loopback interface up: ip link set lo up"
        return problem("ports", f"127.0.0.1 cannot be bound: {facts.bind_error}", advice)
    fact = f"127.0.0.1 can be bound, ephemeral {facts.first} to {facts.last}"
    if facts.default_port_used:
        fact += f", {DEFAULT_PORT} in use"
        return note(
            "ports",
            fact,
            "`braid run` takes a free port; for torchrun set --master-port other than "
            f"{DEFAULT_PORT}",
        )
    if facts.last - facts.first < FEW_PORTS:
        return note("ports", fact, "widen net.ipv4.ip_local_port_range: many ranks need many ports")
    return ok("ports", f"{fact}, {DEFAULT_PORT} free")


def check_names(facts: HostNames) -> Finding:
    """Check the host name, which Gloo looks up; braid itself uses addresses only."""
    if facts.localhost and not any(a.startswith("127.") or a == "::1" for a in facts.localhost):
        fact = f"localhost is {', '.join(facts.localhost)}"
        return note("names", fact, "put `127.0.0.1 localhost` into /etc/hosts")
    if facts.error:
        fact = f"{facts.hostname} has no address ({facts.error})"
        return note(
            "names",
            fact,
            f"put `127.0.1.1 {facts.hostname}` into /etc/hosts: Gloo looks the name up",
        )
    where = ", in /etc/hosts" if facts.in_hosts else ""
    fact = f"{facts.hostname} is {', '.join(facts.addresses)}{where}"
    if facts.seconds > SLOW_NAME_S:
        fact += f", after {facts.seconds:.1f} s"
        return note(
            "names",
            fact,
            f"put {facts.hostname} into /etc/hosts: every rank waits for that look-up",
        )
    return ok("names", fact)


def check_limits(facts: ResourceLimits) -> Finding:
    """Check the resource limits: ranks have open descriptors for all their peers."""
    fact = f"open files {_count(facts.files)}, processes {_count(facts.processes)}, locked memory "
    fact += "without limit" if facts.locked_bytes is None else bytes_text(facts.locked_bytes)
    if facts.files is not None and facts.files < FEW_FILES:
        more = _count(facts.hard_files)
        return note(
            "limits",
            fact,
            f"ulimit -n {more if more.isdecimal() else 65536}: each rank needs 4 for each peer",
        )
    if facts.processes is not None and facts.processes < FEW_PROCESSES:
        return note(
            "limits", fact, "ulimit -u 4096: ranks, their threads and DataLoader workers all count"
        )
    return ok("limits", fact)


def check_clock(facts: Clocks) -> Finding:
    """Check the duration of a clock reading: every recorded event reads the clock twice."""
    fact = f"{facts.source or 'unknown source'}, {facts.read_ns:.0f} ns a reading"
    if facts.read_ns > SLOW_CLOCK_NS:
        return note(
            "time",
            fact,
            "boot with clocksource=tsc if the host's TSC is stable: each event reads the clock "
            "twice",
        )
    return ok("time", fact)


def check_gpus(facts: Accelerators) -> Finding:
    """Check the GPUs; braid works without GPUs."""
    if facts.error:
        return note(
            "GPUs",
            f"torch.cuda fails: {facts.error}",
            "see `nvidia-smi`: the driver and torch's CUDA must match",
        )
    if facts.names:
        names = sorted({(facts.names.count(name), name) for name in facts.names}, reverse=True)
        fact = ", ".join(f"{count} x {name}" for count, name in names)
        return ok(
            "GPUs",
            f"{fact}, CUDA {facts.cuda}, NCCL {facts.nccl or 'none'}, driver "
            f"{facts.driver or 'unknown'}",
        )
    if facts.driver:
        fact = (
            f"NVIDIA driver {facts.driver}, but torch sees no GPU (CUDA "
            f"{facts.cuda or 'none: a CPU build'})"
        )
        return note("GPUs", fact, "install torch for CUDA, and check CUDA_VISIBLE_DEVICES")
    return ok("GPUs", "none")


def check_nodes(facts: NumaNodes) -> Finding:
    """Check the NUMA nodes: memory of another node is slower."""
    if len(facts.processors) < 2:
        return ok("NUMA", "one node")
    fact = "; ".join(f"node {node}: {cpus}" for node, cpus in enumerate(facts.processors))
    return note("NUMA", fact, "bind ranks to nodes: numactl --cpunodebind, or one run per node")


def _version(name: str, version: str, advice: str) -> Finding:
    least = ".".join(map(str, OLDEST[name]))
    if not version:
        return problem(name, "not installed", advice)
    if _numbers(version)[:2] < OLDEST[name]:
        return problem(name, f"{version}, but braid needs {least} or newer", advice)
    return ok(name, version)


def _tried(check: str, refused: str, good: str, advice: str) -> Finding:
    return note(check, refused, advice) if refused else ok(check, good)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _count(limit: int | None) -> str:
    return "without limit" if limit is None else str(limit)
