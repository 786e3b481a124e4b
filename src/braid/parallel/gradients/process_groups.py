"""Conversion of torch's process groups and meshes to braid's groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from braid.comm import Group
from braid.errors import ConfigError
from braid.runtime.torch_internals import backend_for

__all__ = ["group_of", "shown_group_of"]


def group_of(process_group: Any, device_mesh: Any = None) -> Group:
    """Return the braid group of `process_group`.

    Args:
        process_group: A braid Group; a process group of `torch.distributed` over the backend
            "braid"; or None for torch's default group, if there is one.
        device_mesh: A mesh of torch with one dim, instead of `process_group`.

    Raises:
        ConfigError: The arguments do not give a group; the message shows valid arguments.
    """
    if isinstance(process_group, Group):
        return process_group
    if device_mesh is not None:
        if process_group is not None or device_mesh.ndim != 1:
            msg = (
                "pass either process_group or a device_mesh of one dim, got a mesh of "
                f"{device_mesh.ndim} "
                f"dims{(' and a process_group' if process_group is not None else '')}"
            )
            raise ConfigError(msg)
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None and dist.is_available() and dist.is_initialized():
        process_group = dist.group.WORLD
    group = None if process_group is None else _behind(process_group)
    if group is None:
        kind = "None" if process_group is None else type(process_group).__name__
        msg = (
            f"process_group must be a braid Group, got {kind}: pass process_group=braid.init(), "
            "or call torch.distributed.init_process_group('braid') first"
        )
        raise ConfigError(msg)
    return group


def shown_group_of(process_group: Any, device_mesh: Any = None) -> Any:
    """Return the group for a wrapper's attribute `process_group`, as torch's wrapper has it."""
    if device_mesh is not None:
        return device_mesh.get_group(mesh_dim=0)
    return dist.group.WORLD if process_group is None else process_group


def _behind(process_group: Any) -> Group | None:
    """Return the braid group behind a process group of torch; None for other backends."""
    group = getattr(process_group, "braid_group", None)
    if group is None and isinstance(process_group, dist.ProcessGroup):
        try:
            backend = backend_for(process_group, torch.device("cpu"))
        except RuntimeError:  # it has other devices only
            return None
        group = getattr(backend, "braid_group", None)
    return group if isinstance(group, Group) else None
