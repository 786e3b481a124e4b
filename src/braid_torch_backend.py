"""Entry point that registers the backend named "braid" with torch; it cannot raise.

torch imports this module while it is itself being imported (group `torch.backends`). So the module
is tiny and never breaks a program that does not use braid. It adds one name to torch's table; braid
is imported when the first process group of that name is made.

In a rank of `braid run` it also looks, when the program ends, whether the ranks have ever been made
to communicate. A program without a word of parallel training runs to its end on every rank, N times
the same, and nothing else would say so.
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
        # torch has imported it by now if it has it at all
        backend = sys.modules["torch.distributed.distributed_c10d"].Backend
        backend.register_backend("braid", _create, extended_api=True, devices=["cpu", "cuda"])
        if _is_first_of_several_ranks():
            atexit.register(_report_alone)


def _create(options: Any, backend_options: Any) -> Any:
    return import_module("braid.comm.torch_backend").create(options, backend_options)


def _is_first_of_several_ranks() -> bool:
    """Whether `braid run` itself has started this process, as rank 0 of several."""
    started_by = os.environ.get("BRAID_LAUNCHER_PID", "")
    return (
        started_by == str(os.getppid())
        and os.environ.get("RANK") == "0"
        and os.environ.get("WORLD_SIZE", "1") != "1"
    )


def _report_alone() -> None:
    """Say that the ranks never communicated, unless an exception ends the program."""
    with contextlib.suppress(Exception):
        if getattr(sys, "last_value", None) is not None:
            return
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        if getattr(c10d, "_backend", None) not in {None, "undefined"}:
            return  # it keeps the name of the last process group, also after its end
        for name in ("braid.context", "braid.rpc.current"):
            module = sys.modules.get(name)
            if module is not None and module._DEFAULT.has_joined:  # noqa: SLF001 - as a module would
                return
        size = os.environ["WORLD_SIZE"]
        sys.stderr.write(
            f"braid: {size} ranks have run this program alike and never communicated, so each has "
            "done all of the work: call braid.init() and wrap the model in "
            "braid.DistributedDataParallel, or start it with python\n"
        )
