"""Entry point that registers the backend named "braid" with torch; it cannot raise.

`import torch` imports this module through the entry point group `torch.backends`. So the module
is small and never breaks a program that does not use braid. It adds one name to torch's table of
backends; braid is imported when the first process group with that backend is created.

In rank 0 of `braid run` it also checks, when the program ends, whether the ranks ever created a
group. A program without any parallel training runs to its end on each rank, so N ranks do the same
work N times, and no other code would report this.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from importlib import import_module
from typing import Any

__all__ = ["autoload"]


def autoload() -> None:
    """Register the backend; torch calls this once, at the end of `import torch`."""
    with contextlib.suppress(Exception):  # a torch without distributed, or an unknown version
        # a torch that has this module has imported it by now
        backend = sys.modules["torch.distributed.distributed_c10d"].Backend
        backend.register_backend("braid", _create, extended_api=True, devices=["cpu", "cuda"])
        if _is_first_of_several_ranks():
            atexit.register(_report_alone)


def _create(options: Any, backend_options: Any) -> Any:
    return import_module("braid.comm.torch_backend").create(options, backend_options)


def _is_first_of_several_ranks() -> bool:
    """Return whether `braid run` started this process directly, as rank 0 of several ranks."""
    started_by = os.environ.get("BRAID_LAUNCHER_PID", "")
    return (
        started_by == str(os.getppid())
        and os.environ.get("RANK") == "0"
        and os.environ.get("WORLD_SIZE", "1") != "1"
    )


def _report_alone() -> None:
    """Write to stderr that the ranks never communicated, unless an exception ended the program."""
    with contextlib.suppress(Exception):
        if getattr(sys, "last_value", None) is not None:
            return
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        if getattr(c10d, "_backend", None) not in {None, "undefined"}:
            return  # the last process group's backend, also after the group was destroyed
        for name in ("braid.context", "braid.rpc.current"):
            module = sys.modules.get(name)
            if module is not None and module._DEFAULT.has_joined:  # noqa: SLF001 - as a module would
                return
        size = os.environ["WORLD_SIZE"]
        sys.stderr.write(
            f"braid: each of {size} ranks ran the whole program, and the ranks never communicated: "
            "call braid.init() and wrap the model in braid.DistributedDataParallel, or start the "
            "program with python\n"
        )
