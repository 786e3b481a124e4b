"""Which device is meant: torch writes 0, "cuda:0" and torch.device("cuda", 0) for the same one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["DeviceLike", "as_device", "devices_for"]

DeviceLike: TypeAlias = "int | str | torch.device"


def as_device(found: DeviceLike) -> torch.device:
    """The device, with its index.

    Args:
        found: Number of a GPU (-1 is the CPU, as in torch), a name, or a device.

    Raises:
        ConfigError: There is no such device.
    """
    if isinstance(found, int):
        device = torch.device("cpu") if found == -1 else torch.device("cuda", found)
    else:
        try:
            device = torch.device(found)
        except (RuntimeError, TypeError) as exc:
            msg = f"expected a device, such as 0, 'cuda:0' or 'cpu', found {found!r}: {exc}"
            raise ConfigError(msg) from exc
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index: int | None = device.index  # torch's stubs know no None
    if index is None and count:
        return torch.device("cuda", torch.cuda.current_device())
    if index is None or index >= count:
        msg = (
            f"expected one of the {count} CUDA devices that this process sees, found {found!r}: name others, or look at "
            "CUDA_VISIBLE_DEVICES"
        )
        raise ConfigError(msg)
    return device


def devices_for(module: nn.Module, wanted: Sequence[DeviceLike] | None) -> list[torch.device]:
    """The devices of a module's replicas.

    Args:
        module: Stays where it is when there is no GPU.
        wanted: None for all GPUs.

    Raises:
        ConfigError: None at all, or such as there are not.
    """
    if wanted is None:
        wanted = list(range(torch.cuda.device_count()))
        if not wanted:
            home = next(iter([*module.parameters(), *module.buffers()]), None)
            wanted = [torch.device("cpu") if home is None else home.device]
    devices = [as_device(device) for device in wanted]
    if not devices:
        msg = "expected at least one device in device_ids, found none: leave it out for all GPUs"
        raise ConfigError(msg)
    return devices
