"""Which group of braid a user means who passes what torch's classes take."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from braid.comm import Group
from braid.errors import ConfigError

__all__ = ["group_of"]


def group_of(process_group: Any, device_mesh: Any = None) -> Group:
    """The group behind `process_group`.

    Args:
        process_group: A braid Group; a process group of `torch.distributed` over the backend "braid"; or None for torch's default
            group, if there is one.
        device_mesh: A mesh of torch with one dim, instead.

    Raises:
        ConfigError: There is no such group; the message says what to pass.
    """
    if isinstance(process_group, Group):
        return process_group
    if device_mesh is not None:
        if process_group is not None or device_mesh.ndim != 1:
            msg = (
                f"expected either process_group or a device_mesh of one dim, found a mesh of {device_mesh.ndim} dims"
                f"{' and a process_group' if process_group is not None else ''}"
            )
            raise ConfigError(msg)
        process_group = device_mesh.get_group(mesh_dim=0)
    found = process_group
    if found is None and dist.is_available() and dist.is_initialized():
        found = dist.group.WORLD
    group = _behind(found) if found is not None else None
    if group is None:
        what = "None" if found is None else type(found).__name__
        msg = (
            f"expected a braid Group as process_group, found {what}: pass process_group=braid.init(), or call "
            'torch.distributed.init_process_group("braid") before'
        )
        raise ConfigError(msg)
    return group


def _behind(found: Any) -> Group | None:
    """A group behind a process group of torch, if that is one of braid's backend."""
    group = getattr(found, "braid_group", None)
    if group is None and isinstance(found, dist.ProcessGroup):
        try:
            backend = found._get_backend(torch.device("cpu"))  # noqa: SLF001 - no public way
        except RuntimeError:  # of other devices only
            return None
        group = getattr(backend, "braid_group", None)
    return group if isinstance(group, Group) else None
