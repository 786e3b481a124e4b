"""Process groups of torch that are also groups of braid.

torch's functions, such as `all_reduce(x, group=get_tensor_model_parallel_group())`, use them as
process groups of the backend "braid", for any backend of the default group; the layers here use the
underlying `Group`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

import braid.comm.torch_backend  # noqa: F401 - registers the backend
from braid.comm import Group
from braid.compat.megatron.failure import GroupNotInitializedError, UnsupportedError, UsageError

__all__ = ["braid_group", "check_initialized", "create_group"]

OWN_BACKENDS = (None, "braid", "nccl", "gloo")  # a group of "braid" takes tensors of CPUs and GPUs


def check_initialized() -> None:
    """Raise GroupNotInitializedError unless torch.distributed has been initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        msg = (
            "torch.distributed is not initialized: call "
            "torch.distributed.init_process_group('braid') first, also under `braid run` and after "
            "braid.init()"
        )
        raise GroupNotInitializedError(msg)


def create_group(
    ranks: list[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Create a process group of the backend "braid"; all ranks call this.

    Args:
        ranks: Members; all ranks when None.
        timeout: Timeout of the group's operations.
        backend: None, "braid", "nccl" or "gloo"; a group of braid replaces all of them.
        pg_options: Must be None, since braid has no such options.
        use_local_synchronization: Whether only the members of the group call this.
        group_desc: Description for torch.
    """
    if pg_options is not None:
        msg = (
            f"pg_options of type {type(pg_options).__name__} cannot be used: groups of braid have "
            "no options of NCCL. Leave them out, or set NCCL's environment variables"
        )
        raise UnsupportedError(msg)
    if backend not in OWN_BACKENDS:
        msg = (
            f"backend {backend!r} cannot be used: a group of braid takes CPU tensors and, through "
            "NCCL, CUDA tensors. Leave it out"
        )
        raise UnsupportedError(msg)
    return dist.new_group(
        ranks,
        timeout,
        "braid",
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )


def braid_group(group: Any) -> Group:
    """Return the braid group of a torch process group; return a braid group unchanged.

    Raises:
        UsageError: The process group has another backend, or has ended.
    """
    if isinstance(group, Group):
        return group
    behind = getattr(group, "braid_group", None)
    if isinstance(behind, Group):
        return behind
    if hasattr(group, "braid_group"):
        msg = (
            "the process group has been destroyed: make the layer again after "
            "initialize_model_parallel, or pass it a tp_group"
        )
        raise UsageError(msg)
    name = getattr(group, "name", None)
    kind = name() if callable(name) else type(group).__name__
    msg = (
        f"a group of {kind} is not a braid group: pass one of "
        "braid.compat.megatron.parallel_state, or of "
        "torch.distributed.new_group(ranks, backend='braid')"
    )
    raise UsageError(msg)
