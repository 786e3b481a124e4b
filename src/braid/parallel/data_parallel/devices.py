"""Conversion of torch's device spellings: 0, "cuda:0" and torch.device("cuda", 0) are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["DeviceLike", "as_device", "devices_for"]

DeviceLike: TypeAlias = "int | str | torch.device"


def as_device(device_like: DeviceLike) -> torch.device:
    """Return the device with its index.

    Args:
        device_like: Number of a GPU (-1 is the CPU, as in torch), a name, or a device.

    Raises:
        ConfigError: The device does not exist.
    """
    if isinstance(device_like, int):
        device = torch.device("cpu") if device_like == -1 else torch.device("cuda", device_like)
    else:
        try:
            device = torch.device(device_like)
        except (RuntimeError, TypeError) as exc:
            msg = f"{device_like!r} is not a device such as 0, 'cuda:0' or 'cpu': {exc}"
            raise ConfigError(msg) from exc
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    index: int | None = device.index  # torch's stubs omit None
    if index is None and count:
        return torch.device("cuda", torch.cuda.current_device())
    if index is None or index >= count:
        msg = (
            f"device {device_like!r} does not exist: this process sees {count} CUDA devices; "
            "name others, or look at CUDA_VISIBLE_DEVICES"
        )
        raise ConfigError(msg)
    return device


def devices_for(module: nn.Module, wanted: Sequence[DeviceLike] | None) -> list[torch.device]:
    """Return the devices of a module's replicas.

    Args:
        module: Module to replicate; without GPUs, its device is used.
        wanted: Devices by number or name; None selects all GPUs.

    Raises:
        ConfigError: `wanted` is empty, or names a device that does not exist.
    """
    if wanted is None:
        wanted = list(range(torch.cuda.device_count()))
        if not wanted:
            home = next(iter([*module.parameters(), *module.buffers()]), None)
            wanted = [torch.device("cpu") if home is None else home.device]
    devices = [as_device(device) for device in wanted]
    if not devices:
        msg = "device_ids is empty: name at least one device, or leave it out for all GPUs"
        raise ConfigError(msg)
    return devices
