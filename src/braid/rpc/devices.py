"""Devices on which tensors arrive in other nodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from braid.errors import ConfigError
from braid.rpc.outcomes import RpcError
from braid.rpc.workers import WorkerRecord

__all__ = ["place_of", "placed"]


def place_of(
    device: torch.device,
    sender: str,
    maps: Mapping[str, Mapping[str, str]],
    receiver: WorkerRecord,
) -> str:
    """Return the device on which a tensor arrives; empty for main memory.

    Args:
        device: Device of the tensor here.
        sender: Name of this node.
        maps: Device maps of this node, by the name of the other one.
        receiver: Record of the other node, whose map to this one serves backwards.

    Raises:
        ConfigError: Neither map has the device.
    """
    if device.type == "cpu":
        return ""
    there = maps.get(receiver.name, {}).get(str(device))
    if there is None:
        backwards = {b: a for a, b in receiver.device_maps.get(sender, {}).items()}
        there = backwards.get(str(device))
    if there is None:
        msg = (
            f"a tensor on {device} has no place in {receiver.name}: set_device_map("
            f"{receiver.name!r}, {{{str(device)!r}: ...}}) in the options, or pass tensor.cpu()"
        )
        raise ConfigError(msg)
    return there


def placed(tensor: torch.Tensor, device: str, sender: str) -> torch.Tensor:
    """Return a tensor that arrived in main memory on the device to which its sender maps it.

    The copy keeps the graph of a tensor that a context records, whatever thread unpacks it.

    Raises:
        RpcError: This process has no such GPU.
    """
    target = torch.device(device)
    num_gpus = torch.cuda.device_count()
    if target.type == "cuda" and (target.index or 0) >= num_gpus:
        msg = (
            f"{sender} maps a tensor to {device}, but the receiving node has {num_gpus} GPUs: "
            f"correct set_device_map in the options of {sender}"
        )
        raise RpcError(msg)
    if tensor.grad_fn is None:
        return tensor.detach().to(target).requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return tensor.to(target)
