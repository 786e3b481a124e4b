"""`torchgpipe.balance`: numbers of layers for GPipe, balanced by time or by size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from braid.parallel import pipeline

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | str | int | None


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device = None,
) -> list[int]:
    """Return the number of layers of each partition, balanced by forward and backward time.

    Args:
        partitions: Number of partitions.
        module: The model.
        sample: Input of the model: a tensor or a tuple of tensors.
        timeout: Seconds for the measurement.
        device: Device to measure on; when None, the first CUDA device, or the CPU without any.
    """
    return list(
        pipeline.balance_by_time(
            partitions, module, sample, timeout_s=timeout, device=_device_of(device)
        )
    )


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,  # noqa: A002 - the original's name
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]:
    """Return the number of layers of each partition, balanced by memory.

    Args:
        partitions: Number of partitions.
        module: The model.
        input: A whole batch.
        chunks: Number of micro-batches into which GPipe will divide the batch.
        param_scale: Memory per byte of parameters, with gradients and optimizer state: 2 for SGD, 4
            for Adam.
        device: See `balance_by_time`.
    """
    return list(
        pipeline.balance_by_size(
            partitions,
            module,
            input,
            num_microbatches=chunks,
            param_scale=param_scale,
            device=_device_of(device),
        )
    )


def _device_of(device: Device) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
