"""Splitting of a batch into one share per replica, in any nested containers.

torch splits each tensor separately, with `chunk`: 5 samples for 4 devices are shares of 2, 2 and 1;
10 are 3, 3, 3 and 1, and BatchNorm fails on a share of 1. If tensors differ in length, `zip` drops
shares without notice. Here sizes differ by one at most, larger ones first, and all tensors must
have the same number of samples. A tensor without dims is not split: all replicas get it, as they
get numbers, strings and other objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.comm.autograd.nested import flatten, tensors_in, unflatten
from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device

__all__ = ["num_samples", "scatter", "share_sizes"]


def share_sizes(total: int, count: int) -> list[int]:
    """Return the number of samples in each share of a batch, for at most `count` shares.

    No share is empty, except for the single share of an empty batch.

    Args:
        total: Number of samples in the batch.
        count: Number of replicas.
    """
    count = max(1, min(total, count))
    size, larger = divmod(total, count)
    return [size + (index < larger) for index in range(count)]


def num_samples(inputs: Any, dim: int = 0) -> int | None:
    """Return the length of all tensors in `inputs` along `dim`; None if no tensor has dims.

    Args:
        inputs: Containers of tensors and other objects, as in `braid.comm.autograd.nested`.
        dim: Dim of samples.

    Raises:
        ConfigError: Tensors have different lengths, or too few dims.
    """
    shapes = [list(x.shape) for x in tensors_in(inputs) if x.dim()]
    short = next((shape for shape in shapes if not -len(shape) <= dim < len(shape)), None)
    if short is not None:
        msg = (
            f"tensor of shape {short} has no dim {dim} for samples: choose another dim, or "
            "register a tensor that all samples share as a buffer of the module"
        )
        raise ConfigError(msg)
    lengths = {shape[dim] for shape in shapes}
    if len(lengths) > 1:
        msg = (
            f"tensors differ in the number of samples along dim {dim}, got shapes "
            f"{', '.join(map(str, shapes))}: register a tensor that all samples share as a "
            "buffer; if a sample has several rows, make them another dim"
        )
        raise ConfigError(msg)
    return lengths.pop() if lengths else None


def scatter(inputs: Any, devices: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Return one share of `inputs` per device that gets samples; differentiable.

    Args:
        inputs: Lists, tuples, named tuples, mappings and dataclasses; containers that hold tensors
            are copied, other objects are passed to all replicas. A tensor that occurs twice is one
            tensor in each share.
        devices: Devices; only the first ones are used if there are fewer samples than devices.
        dim: Dim of samples.

    Returns:
        Shares in the order of devices; a single one if nothing can be split. A share of a tensor
        that is on its device already is a view.

    Raises:
        ConfigError: Tensors have different numbers of samples, or are in unsupported containers.
    """
    places = [as_device(device) for device in devices]
    if not places:
        msg = "devices is empty: name at least one device to scatter to"
        raise ConfigError(msg)
    tree, tensors = flatten(inputs)
    hidden = next(tensors_in(tree), None)
    if hidden is not None:
        msg = (
            f"tensor of shape {list(hidden.shape)} is in a container that cannot be split: pass "
            "lists, tuples, dicts or dataclasses, such as dict(...) or list(...) of it"
        )
        raise ConfigError(msg)
    sizes = share_sizes(num_samples(tensors, dim) or 0, len(places))
    places = places[: len(sizes)]
    parts = [_parts(x, sizes, places, dim) for x in tensors]
    return [unflatten(tree, [part[index] for part in parts]) for index in range(len(places))]


def _parts(
    x: torch.Tensor, sizes: Sequence[int], places: Sequence[torch.device], dim: int
) -> list[torch.Tensor]:
    whole = x.dim() == 0 or len(sizes) == 1
    cut: Sequence[torch.Tensor] = [x] * len(sizes) if whole else torch.split(x, list(sizes), dim)
    # copies to the host with non_blocking would not be complete on return
    return [
        part.to(place, non_blocking=place.type != "cpu")
        for part, place in zip(cut, places, strict=True)
    ]
