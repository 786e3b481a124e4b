"""Reading a peer's private memory: one copy instead of two.

Problem: a tensor that does not lie in shared memory is copied into a slot by its owner and out of
it by the reader. Above about a megabyte both copies go to main memory, and the second one is most
of the cost.

Idea: the kernel copies straight from one process to another (`process_vm_readv`, Linux 3.2). It
asks for the same permission as a debugger, and hardened hosts refuse it. So every rank tries it
once on every peer when they join, and all use it only if it works for all. Under Yama's restricted
mode (`ptrace_scope` 1) a process may name one process whose descendants may read it; each rank
names its parent, the launcher, so that its siblings may.
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
MAX_BYTES = 1 << 30  # of one system call: it copies at most 2 GiB - 4 KiB


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
        rank: The rank that runs as that process, for messages.
        pid: Its process id.
        address: First byte there; the owner keeps it alive and unchanged meanwhile.
        out: Destination here.

    Raises:
        PeerLostError: The process has ended.
        CommError: The kernel refuses, or nothing is mapped there.
    """
    read(rank, pid, address, out.data_ptr(), out.numel() * out.element_size())


def allow_siblings() -> None:
    """Permit the parent and its other children to read this process, where the host asks."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() == "1":
        _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read(rank: int, pid: int, address: int, destination: int, nbytes: int) -> None:
    """Copy `nbytes` from `address` in process `pid` to `destination` here; raise as `pull` does."""
    assert _readv is not None
    done = 0
    while done < nbytes:
        size = min(nbytes - done, MAX_BYTES)
        here, there = _Range(destination + done, size), _Range(address + done, size)
        count = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            if code == errno.ESRCH:
                msg = f"rank {rank} has ended while its memory was read"
                raise PeerLostError(msg, rank=rank)
            why = os.strerror(code) if count < 0 else "nothing could be read"
            msg = (
                f"only {done} of {nbytes} bytes of rank {rank} (pid {pid}) could be read: "
                f"{why}; its tensor was freed during the operation, or the host forbids it "
                "(see braid doctor)"
            )
            raise CommError(msg)
        done += count
