"""Slicers divide the keys of a request among servers.

    by_range     each server has a range of keys, of equal size; a slice is a view, and not copied
    by_hash      the server follows from a hash, for small or consecutive keys

With ranges, keys below 2^64 / servers all lie on server 0, as in PS-Lite: programs that count keys
from 0 spread them themselves, or use `by_hash`.

Source: PS-Lite's DefaultSlicer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from braid.errors import ConfigError
from braid.ps.kv.groups import key_ranges
from braid.ps.storage.keys import shard_of, to_signed

__all__ = ["Places", "Slicer", "by_hash", "by_range", "check_slices"]

Places: TypeAlias = "slice | torch.Tensor"  # which keys of a request: a range, or ascending indices
Slicer: TypeAlias = Callable[[torch.Tensor, int], "dict[int, Places]"]


def by_range(keys: torch.Tensor, num_servers: int) -> dict[int, Places]:
    """Give each server the keys of its range.

    Args:
        keys: Sorted keys, uint64.
        num_servers: Number of servers.

    Returns:
        Places of the keys of each server that has any.
    """
    firsts = np.array([first for first, _ in key_ranges(num_servers)], dtype=np.uint64)
    bounds = [*np.searchsorted(keys.numpy(), firsts).tolist(), len(keys)]
    spans = enumerate(pairwise(bounds))
    return {server: slice(first, end) for server, (first, end) in spans if first < end}


def by_hash(keys: torch.Tensor, num_servers: int) -> dict[int, Places]:
    """Spread keys evenly, however they lie; see `by_range`."""
    servers = shard_of(to_signed(keys), num_servers)
    order = servers.argsort(stable=True)  # stable: the keys of each server stay sorted
    counts = servers.bincount(minlength=num_servers).tolist()
    ends = torch.tensor(counts).cumsum(0).tolist()
    return {
        server: order[end - count : end]
        for server, (count, end) in enumerate(zip(counts, ends, strict=True))
        if count
    }


def check_slices(slices: dict[int, Places], num_keys: int, num_servers: int) -> None:
    """Check what a slicer of the program returns.

    Raises:
        ConfigError: A key has no server or several, or there is no such server.
    """
    uses = torch.zeros(num_keys, dtype=torch.int64)
    for server, places in slices.items():
        if not 0 <= server < num_servers:
            msg = f"the slicer sends keys to server {server}, and there are {num_servers}"
            raise ConfigError(msg)
        own = torch.arange(num_keys)[places] if isinstance(places, slice) else places
        if len(own) and (int(own.min()) < 0 or int(own.max()) >= num_keys):
            msg = f"the slicer sends places beyond the {num_keys} keys to server {server}"
            raise ConfigError(msg)
        if not bool((own.diff() > 0).all()):
            msg = f"the slicer sends server {server} places that do not ascend"
            raise ConfigError(msg)
        uses[own] += 1
    if num_keys and (int(uses.min()), int(uses.max())) != (1, 1):
        place = int((uses != 1).nonzero()[0])
        msg = f"the slicer sends the key at place {place} to {int(uses[place])} servers"
        raise ConfigError(msg)
