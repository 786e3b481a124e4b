"""`torch.distributed.pipeline.sync.utils`: a model moved to devices according to a balance."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

__all__ = ["partition_model"]


def partition_model(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device | str | int] | None = None,
) -> nn.Sequential:
    """Return the layers of `module` in one nn.Sequential per device, on these devices.

    Args:
        module: The layers, which are moved.
        balance: Number of layers on each device.
        devices: Devices; when None, the GPUs in order.

    Raises:
        ValueError: `balance` does not add up to the number of layers, or there are too few devices.
    """
    places = list(range(len(balance))) if devices is None else list(devices)
    if sum(balance) != len(module) or len(places) < len(balance):
        msg = (
            f"balance {list(balance)} must add up to the {len(module)} layers, with one device per "
            f"number, got {len(places)} devices: pass other numbers or devices"
        )
        raise ValueError(msg)
    ends = accumulate(balance)
    layers = list(module)
    return nn.Sequential(
        *(
            nn.Sequential(*layers[end - size : end]).to(device)
            for end, size, device in zip(ends, balance, places, strict=False)
        )
    )
