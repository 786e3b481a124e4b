"""Reads a peer's private memory: one copy instead of two.

Problem: a tensor outside of shared memory is copied into a slot by its owner and out of it by the
reader. Above about 1 MiB both copies go through main memory, and the second copy is most of the
cost.

Idea: the kernel copies directly from one process to another (`process_vm_readv`, Linux 3.2). It
requires the same permission as a debugger, and hardened hosts refuse it. So every rank tries it
once with every peer when ranks join, and all use it only if it works for all. In Yama's restricted
mode (`ptrace_scope` 1) a process may name one process whose descendants may read it; each rank
names its parent, the launcher, so that its siblings may read it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import torch

from braid.errors import CommError, PeerLostError

__all__ = ["POSSIBLE", "allow_siblings", "pull", "read"]

PR_SET_PTRACER = 0x59616D61  # linux/prctl.h: "Yama"
MAX_BYTES = 1 << 30  # of one system call; the kernel's limit is 2 GiB - 4 KiB


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)  # glibc 2.15, Linux only
POSSIBLE = _readv is not None and sys.platform.startswith("linux")
if _readv is not None:
    _one = ctypes.POINTER(_Range)
    _readv.argtypes = [ctypes.c_int, _one, ctypes.c_ulong, _one, ctypes.c_ulong, ctypes.c_ulong]
    _readv.restype = ctypes.c_ssize_t


def pull(rank: int, pid: int, address: int, out: torch.Tensor) -> None:
    """Fill the contiguous tensor `out` from `address` in process `pid`.

    Args:
        rank: Rank of the process, for messages.
        pid: Process id.
        address: First byte in the process; the owner must not free or change the data meanwhile.
        out: Destination in this process.

    Raises:
        PeerLostError: The process has ended.
        CommError: The kernel refuses, or no memory is mapped there.
    """
    read(rank, pid, address, out.data_ptr(), out.numel() * out.element_size())


def allow_siblings() -> None:
    """Permit the parent and its other children to read this process, where this is needed."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() == "1":
        _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read(rank: int, pid: int, address: int, destination: int, nbytes: int) -> None:
    """Copy `nbytes` from `address` in process `pid` to `destination`; raises as `pull` does."""
    assert _readv is not None
    copied = 0
    while copied < nbytes:
        size = min(nbytes - copied, MAX_BYTES)
        here, there = _Range(destination + copied, size), _Range(address + copied, size)
        count = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            if code == errno.ESRCH:
                msg = (
                    f"rank {rank} has ended while its memory was read: look for the first error of "
                    "that rank"
                )
                raise PeerLostError(msg, rank=rank)
            why = os.strerror(code) if count < 0 else "nothing could be read"
            msg = (
                f"only {copied} of {nbytes} bytes of rank {rank} (pid {pid}) could be read: "
                f"{why}; its tensor was freed during the operation, or the host forbids it "
                "(see braid doctor)"
            )
            raise CommError(msg)
        copied += count
