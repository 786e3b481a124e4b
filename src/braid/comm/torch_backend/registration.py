"""Registration of the backend "braid" with torch."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.distributed as dist

from braid.comm import Group
from braid.comm.torch_backend.base import BaseProcessGroup
from braid.comm.torch_backend.collectives import Collectives
from braid.comm.torch_backend.process_group import BraidProcessGroup
from braid.comm.torch_backend.shared_world import SharedWorlds
from braid.comm.torch_backend.work import FinishedWork, PendingWork
from braid.runtime.torch_internals import compile_nothing

__all__ = ["create", "register", "share"]

# The only state of this package: where this process is a rank. Other modules do not read it.
_SHARED_WORLDS = SharedWorlds()


def create(options: Any, _backend_options: Any = None) -> BraidProcessGroup:
    """Return a new process group; torch calls this on all of its members.

    Args:
        options: torch's `_DistributedBackendOptions`.

    Raises:
        RendezvousError: Some members did not come.
        ConfigError: The members are on several hosts without a common secret.
    """
    return BraidProcessGroup.open(options, _SHARED_WORLDS)


def share(world: Group | None) -> None:
    """Use the shared memory of `world` for process groups that torch makes of its ranks.

    `braid.init` calls this with the group of all ranks, and `braid.shutdown` with None before it
    closes that group.
    """
    _SHARED_WORLDS.program = world


def register() -> None:
    """Make `init_process_group("braid")` and `new_group(backend="braid")` work. Idempotent."""
    _skip_in_dynamo(BaseProcessGroup, Collectives, BraidProcessGroup, FinishedWork, PendingWork)
    dist.Backend.register_backend("braid", create, extended_api=True, devices=["cpu", "cuda"])


def _skip_in_dynamo(*classes: type) -> None:
    """Exclude the functions of these classes, and their callees, from compilation."""
    # DistributedDataParallel calls the group from C++ during a compiled forward. Dynamo then traces
    # the methods as the program's code, and fails on the group, which torch 2.13 treats as opaque.
    # `torch._dynamo.disable` would import the compiler, which takes a second, and wrap each call.
    for kind in classes:
        for member in vars(kind).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                compile_nothing(function.__code__)
