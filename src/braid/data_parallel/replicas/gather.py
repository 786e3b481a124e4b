"""What replicas return, put together on one device.

Tensors are concatenated in the order of replicas. One number per replica, such as a loss, becomes a
vector: whether it was a mean or a sum over a share only the caller knows, and a mean of means is
not the mean of the batch where shares differ in size. Everything else must be the same on all
replicas. torch returns such a vector with a warning, takes keys and fields from the first replica,
and adds dtypes up to the wider one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.data_parallel.containers import parts_of, rebuilt
from braid.data_parallel.devices import DeviceLike, as_device
from braid.errors import ConfigError

__all__ = ["gather"]


def gather(outputs: Sequence[Any], device: DeviceLike, dim: int = 0) -> Any:
    """One result of those of all replicas. Differentiable.

    Args:
        outputs: Of the replicas, in their order: lists, tuples, named tuples, mappings and
            dataclasses of tensors.
        device: Where the result goes.
        dim: Along which samples lie.

    Returns:
        The same structure. Tensors without dims are stacked to a vector; of a single replica they
        stay as they are.

    Raises:
        ConfigError: Replicas returned different structures, dtypes or shapes; says where.
    """
    if not outputs:
        msg = "expected the result of at least one replica to gather, found none"
        raise ConfigError(msg)
    return _gathered(list(outputs), as_device(device), dim, "output")


def _gathered(found: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = found[0]
    odd = next((i for i, other in enumerate(found) if type(other) is not type(first)), None)
    # a parameter that is returned as it is is a Parameter in one process only
    if odd is not None and not all(isinstance(other, torch.Tensor) for other in found):
        names = type(first).__name__, type(found[odd]).__name__
        raise _differ(where, "type", f"{names[0]} on replica 0 and {names[1]} on replica {odd}")
    if isinstance(first, torch.Tensor):
        return _joined(found, device, dim, where)
    parts = parts_of(first)
    if parts is None:
        return _same(found, where)
    keys = list(parts)
    columns = [parts_of(other) or {} for other in found]
    for index, column in enumerate(columns):
        if column.keys() != parts.keys():
            told = f"{keys} on replica 0 and {list(column)} on replica {index}"
            raise _differ(where, "keys", told)
    joined = {
        key: _gathered([column[key] for column in columns], device, dim, f"{where}[{key!r}]")
        for key in keys
    }
    return rebuilt(first, joined)


def _joined(found: list[torch.Tensor], device: torch.device, dim: int, where: str) -> torch.Tensor:
    first = found[0]
    if len(found) == 1:
        return first.to(device)
    bare = first.dim() == 0
    if not (bare or -first.dim() <= dim < first.dim()):
        msg = (
            f"expected samples along dim {dim} of {where}, found shape {list(first.shape)}: "
            "choose another dim"
        )
        raise ConfigError(msg)
    for index, other in enumerate(found):
        if other.dtype != first.dtype or _but(other, dim) != _but(first, dim):
            specs = [
                f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in (first, other)
            ]
            told = f"{specs[0]} on replica 0 and {specs[1]} on replica {index}"
            raise _differ(where, f"dtype and shape (up to dim {dim})", told)
    # to the host, torch would not wait for the end
    moved = [x.to(device, non_blocking=device.type != "cpu") for x in found]
    return torch.stack(moved) if bare else torch.cat(moved, dim)


def _but(x: torch.Tensor, dim: int) -> list[int]:
    """Its shape, apart from the number of samples."""
    shape = list(x.shape)
    if -len(shape) <= dim < len(shape):
        shape[dim] = -1
    return shape


def _same(found: list[Any], where: str) -> Any:
    first = found[0]
    for index, other in enumerate(found):
        if other is not first and not _equal(first, other):
            told = f"{first!r} on replica 0 and {other!r} on replica {index}"
            raise _differ(where, "value", told)
    return first


def _equal(one: Any, other: Any) -> bool:
    verdict = one == other
    return verdict if isinstance(verdict, bool) else False


def _differ(where: str, what: str, told: str) -> ConfigError:
    msg = (
        f"expected replicas to return the same {what} as {where}, found {told}: return tensors "
        "with one row per sample"
    )
    return ConfigError(msg)
