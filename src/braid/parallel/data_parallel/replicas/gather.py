"""Gathering of the outputs of replicas on one device.

Tensors are concatenated in the order of replicas. One number per replica, such as a loss, becomes a
vector: only the caller knows if it was a mean or a sum over a share, and a mean of means is not the
mean of the batch if shares differ in size. Everything else must be the same on all replicas. torch
returns such a vector with a warning, takes keys and fields from the first replica, and promotes
different dtypes to the wider one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.comm.autograd.nested import parts_of, rebuild
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device
from braid.types import dtype_name

__all__ = ["gather"]


def gather(outputs: Sequence[Any], device: DeviceLike, dim: int = 0) -> Any:
    """Combine the results of all replicas into one; differentiable.

    Args:
        outputs: Results of the replicas, in their order: lists, tuples, named tuples, mappings and
            dataclasses of tensors.
        device: Device of the result.
        dim: Dim of samples.

    Returns:
        The same structure. Tensors without dims are stacked to a vector; with a single replica they
        are returned unchanged.

    Raises:
        ConfigError: Replicas returned different structures, dtypes or shapes; the message shows
            where.
    """
    if not outputs:
        msg = "outputs is empty: gather needs the result of at least one replica"
        raise ConfigError(msg)
    return _gather(list(outputs), as_device(device), dim, "output")


def _gather(outputs: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = outputs[0]
    odd = next((i for i, other in enumerate(outputs) if type(other) is not type(first)), None)
    # a returned parameter is an nn.Parameter on the module itself, a tensor on replicas
    if odd is not None and not all(isinstance(other, torch.Tensor) for other in outputs):
        names = type(first).__name__, type(outputs[odd]).__name__
        raise _differ(where, "type", f"{names[0]} on replica 0 and {names[1]} on replica {odd}")
    if isinstance(first, torch.Tensor):
        return _concatenate(outputs, device, dim, where)
    parts = parts_of(first)
    if parts is None:
        return _same(outputs, where)
    keys = list(parts)
    columns = [parts_of(other) or {} for other in outputs]
    for index, column in enumerate(columns):
        if column.keys() != parts.keys():
            values = f"{keys} on replica 0 and {list(column)} on replica {index}"
            raise _differ(where, "keys", values)
    gathered = {
        key: _gather([column[key] for column in columns], device, dim, f"{where}[{key!r}]")
        for key in keys
    }
    return rebuild(first, gathered)


def _concatenate(
    outputs: list[torch.Tensor], device: torch.device, dim: int, where: str
) -> torch.Tensor:
    first = outputs[0]
    if len(outputs) == 1:
        return first.to(device)
    bare = first.dim() == 0
    if not (bare or -first.dim() <= dim < first.dim()):
        msg = (
            f"{where} of shape {list(first.shape)} has no dim {dim} for samples: choose another dim"
        )
        raise ConfigError(msg)
    for index, other in enumerate(outputs):
        if other.dtype != first.dtype or _shape_without(other, dim) != _shape_without(first, dim):
            specs = [f"{dtype_name(x.dtype)}{list(x.shape)}" for x in (first, other)]
            values = f"{specs[0]} on replica 0 and {specs[1]} on replica {index}"
            raise _differ(where, f"dtype and shape (up to dim {dim})", values)
    # copies to the host with non_blocking would not be complete on return
    moved = [x.to(device, non_blocking=device.type != "cpu") for x in outputs]
    return torch.stack(moved) if bare else torch.cat(moved, dim)


def _shape_without(x: torch.Tensor, dim: int) -> list[int]:
    """Return the shape of `x` with -1 for the number of samples."""
    shape = list(x.shape)
    if -len(shape) <= dim < len(shape):
        shape[dim] = -1
    return shape


def _same(outputs: list[Any], where: str) -> Any:
    first = outputs[0]
    for index, other in enumerate(outputs):
        if other is not first and not _equal(first, other):
            values = f"{first!r} on replica 0 and {other!r} on replica {index}"
            raise _differ(where, "value", values)
    return first


def _equal(one: Any, other: Any) -> bool:
    verdict = one == other
    return verdict if isinstance(verdict, bool) else False


def _differ(where: str, aspect: str, values: str) -> ConfigError:
    msg = (
        f"replicas differ in the {aspect} of {where}: {values}; return tensors with one row "
        "per sample"
    )
    return ConfigError(msg)
