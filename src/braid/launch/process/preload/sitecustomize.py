"""Turns an interpreter into a fork server before it runs its program; see `fork_server`.

Python imports a module of this name when it starts. The import returns only in forked ranks, where
Python then runs the program as if the process had just been started: `__main__`, `sys.argv` and
tracebacks are the usual ones.

    server: wait for a request  ->  fork  ->  send the process id  ->  wait for a request
    rank:   descriptors, environment  ->  the program

A rank is forked twice, so that it becomes a child of the launcher, which is a subreaper. Its first
import of torch gets the module that the server has imported. If the program has changed the
environment before, torch would have read it, so the process executes the program again without the
server's modules; also if the server has used CUDA, which a fork cannot use then.

The imports are done by a thread of a lower priority, since ranks train meanwhile. It could not
raise its priority again without privileges, so another thread forks: the main one.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# no modules of programs: a program that changes the environment before its first import of torch is
# executed again, and these modules would be imported already
MODULES = ("torch", "torch._dynamo", "braid.context", "braid.elasticity.begin")
MOST_DESCRIPTORS = 64
NICE = 10  # a tenth of the time of a core on which a rank computes; SCHED_IDLE would get nothing
PR_SET_PDEATHSIG = 1


def _import_modules() -> None:
    os.nice(NICE)  # of this thread
    for name in MODULES:
        import_module(name)


def _serve() -> None:
    """Fork a rank for each request; return in ranks only."""
    launcher, before = os.getppid(), dict(os.environ)
    # This thread is still importing `site`, and another thread that imports it waits for that. A
    # torch for CUDA imports it.
    sys.modules["site"].__spec__._initializing = False  # type: ignore[union-attr]  # noqa: SLF001 - its only name
    thread = threading.Thread(target=_import_modules)
    thread.start()
    thread.join()
    if not all(name in sys.modules for name in MODULES):
        os._exit(1)
    changes = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()  # so that ranks do not copy the memory of these objects
    control = socket.socket(fileno=os.dup(0))
    control.sendall(b"ready\n")
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
        with control.makefile("rb") as file:
            line = file.readline()
        if not line:
            os._exit(0)
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            _become_child(launcher, middle)
            control.sendall(b"%d\n" % os.getpid())
            control.close()
            request = json.loads(line)
            _place(fds, request["numbers"])
            os.environ.clear()
            os.environ.update(request["environ"] | changes)
            sys.meta_path.insert(0, _LoadedTorch())
            return
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _become_child(launcher: int, middle: int) -> None:
    """Wait until the launcher is the parent of this process, which then dies with it."""
    os.setpgid(0, 0)
    while os.getppid() == middle:
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)


def _place(fds: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that the launcher has chosen, and leave stdin empty."""
    end = max(*numbers, *fds) + 1
    fds = [os.open(os.devnull, os.O_RDONLY), *fds]
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, end) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, number in zip(copies, (0, *numbers), strict=True):
        os.dup2(copy, number)
        os.close(copy)
    sys.modules["numpy"].random.seed()  # as in a new process


class _LoadedTorch(MetaPathFinder, Loader):
    """Finds torch in the memory of the server, unless it is of no use then."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._is_usable = not import_module("braid.runtime.torch_internals").is_in_bad_fork()
        self._torch = sys.modules.pop("torch")
        self._spec = self._torch.__spec__

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the import spec of torch; None for any other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if dict(os.environ) != self._environ or not self._is_usable:
            os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - the same program
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """Return torch."""
        return self._torch

    def exec_module(self, _: ModuleType) -> None:
        """Undo the changes that the import has made to the module."""
        self._torch.__spec__ = self._spec


try:
    sys.path.remove(str(Path(__file__).parent))
    this = sys.modules.pop("sitecustomize")
    with suppress(ModuleNotFoundError):
        import_module("sitecustomize")  # of the user
    sys.modules.setdefault("sitecustomize", this)
    _serve()
except BaseException:  # noqa: BLE001 - it would go on as a process without a rank
    traceback.print_exc()
    os._exit(1)
