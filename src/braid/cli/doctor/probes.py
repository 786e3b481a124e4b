"""Tries which system calls the kernel permits between processes.

Problem: whether a process may open another's memory depends on Yama, seccomp, capabilities, user
and pid namespaces and the container's profile. A prediction from all these settings is wrong sooner
or later.

Idea: start two children. One of them accesses the other as ranks access each other, this process
accesses a child as a launcher would, and the kernel's answers are kept.

Source: memfd_create(2), pidfd_open(2), process_vm_readv(2), prctl(2) PR_SET_PTRACER, proc(5).
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from braid.cli.doctor.facts import Permissions

__all__ = ["probe_permissions", "text_of"]

LIMIT_S = 10.0
PROC = Path("/proc")
MARK = b"braid was here!!"

# Isolated interpreters without site start in some 15 ms. The holder prints its address
# and waits for the end of its stdin.
HOLDER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(os.getppid()), 0, 0, 0)
memory = ctypes.create_string_buffer(b"braid was here!!")
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""
REACHER = """
import ctypes, os, sys
pid, address = map(int, sys.argv[1:])
class Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))
libc = ctypes.CDLL(None, use_errno=True)
into = ctypes.create_string_buffer(16)
here, there = Range(ctypes.addressof(into), 16), Range(address, 16)
try:
    count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    print("" if count == 16 else os.strerror(ctypes.get_errno()))
except AttributeError:
    print("not in this C library")
"""


class _Holder(NamedTuple):
    pid: int
    address: int


class _IoVec(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def probe_permissions() -> Permissions:
    """Try all system calls and return the kernel's answers.

    Raises:
        OSError: A child cannot be started.
        ValueError: The answer of a child cannot be parsed.
        subprocess.SubprocessError: A child does not answer.
    """
    with _holder() as holder:
        argv = [str(number) for number in holder]
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", REACHER, *argv],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        read_sibling = answer.stdout.strip() if answer.stdout else "no answer"
        pidfd, read_child = _pidfd(holder.pid), _read(holder)
    scope = text_of(PROC / "sys/kernel/yama/ptrace_scope")
    return Permissions(
        memfd=_memfd(),
        pidfd=pidfd,
        read_child=read_child,
        read_sibling=read_sibling,
        ptrace_scope=int(scope) if scope.isdecimal() else None,
    )


@contextmanager
def _holder() -> Iterator[_Holder]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        yield _Holder(child.pid, int(child.stdout.readline()))  # closing its stdin ends the child


def _memfd() -> str:
    if not hasattr(os, "memfd_create"):
        return "not in this Python"
    try:
        os.close(os.memfd_create("braid-doctor"))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _pidfd(pid: int) -> str:
    if not hasattr(os, "pidfd_open"):
        return "not in this Python"
    try:
        os.close(os.pidfd_open(pid))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _read(holder: _Holder) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    readv = getattr(libc, "process_vm_readv", None)
    if readv is None:
        return "not in this C library"
    into = ctypes.create_string_buffer(len(MARK))
    here = _IoVec(ctypes.addressof(into), len(MARK))
    there = _IoVec(holder.address, len(MARK))
    count = readv(holder.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count == len(MARK) and into.raw == MARK:
        return ""
    return os.strerror(ctypes.get_errno() or errno.EIO)


def text_of(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
