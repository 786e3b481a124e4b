"""Slicers divide the keys of a request among servers; a layout finds their values.

    by_range     each server has a range of keys, of equal size; a slice is a view, and not copied
    by_hash      a hash determines the server, for small or consecutive keys

With ranges, all keys below 2^64 / servers are on server 0, as in PS-Lite: programs that number keys
from 0 must spread them, or use `by_hash`.

The values of key i are vals[k * i : k * (i + 1)] if all keys have k values; otherwise offsets give
their positions. A range of keys has a range of values, which is a view; other places are gathered
and scattered.

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
from braid.ps.kv.pairs import offsets
from braid.ps.storage.keys import shard_of, to_signed

__all__ = ["KeyLayout", "Places", "Slicer", "by_hash", "by_range", "check_slices"]

Places: TypeAlias = "slice | torch.Tensor"  # which keys of a request: a range, or ascending indices
Slicer: TypeAlias = Callable[[torch.Tensor, int], "dict[int, Places]"]


def by_range(keys: torch.Tensor, num_servers: int) -> dict[int, Places]:
    """Return the keys of each server by equal ranges of keys.

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
    """Return the keys of each server by a hash, which spreads them evenly; see `by_range`."""
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
    """Check the result of a program's slicer.

    Raises:
        ConfigError: A key has no server or several servers, a server does not exist, or the places
            of a server are out of range or do not ascend.
    """
    uses = torch.zeros(num_keys, dtype=torch.int64)
    for server, places in slices.items():
        if not 0 <= server < num_servers:
            msg = (
                f"the slicer sends keys to server {server}, but servers are 0 to {num_servers - 1}"
            )
            raise ConfigError(msg)
        indices = torch.arange(num_keys)[places] if isinstance(places, slice) else places
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= num_keys):
            msg = f"the slicer sends indices beyond the {num_keys} keys to server {server}"
            raise ConfigError(msg)
        if not bool((indices.diff() > 0).all()):
            msg = (
                f"the slicer sends indices to server {server} that do not ascend: return them "
                "sorted"
            )
            raise ConfigError(msg)
        uses[indices] += 1
    if num_keys and (int(uses.min()), int(uses.max())) != (1, 1):
        place = int((uses != 1).nonzero()[0])
        msg = (
            f"the slicer sends the key at index {place} to {int(uses[place])} servers: send each "
            "key to exactly one"
        )
        raise ConfigError(msg)


class KeyLayout:
    """Maps indices of keys to indices of their values.

    Args:
        num_keys: Number of keys.
        num_vals: Number of values.
        lens: Number of values of each key; all keys have the same number when None.
    """

    def __init__(self, num_keys: int, num_vals: int, lens: torch.Tensor | None) -> None:
        self._each = num_vals // num_keys if num_keys else 0
        self._lens = lens
        self._offsets = None if lens is None else offsets(lens)

    def span(self, places: slice) -> slice:
        """Return the range of value indices for a range of key indices."""
        if self._offsets is None:
            return slice(places.start * self._each, places.stop * self._each)
        return slice(int(self._offsets[places.start]), int(self._offsets[places.stop]))

    def indices(self, places: torch.Tensor) -> torch.Tensor:
        """Return the indices of the values that belong to the keys at `places`."""
        if self._lens is None or self._offsets is None:
            inside = torch.arange(self._each)
            return (places[:, None] * self._each + inside).reshape(-1)
        lens = self._lens[places]
        begins = self._offsets[places] - (lens.cumsum(0) - lens)
        return begins.repeat_interleave(lens) + torch.arange(int(lens.sum()))

    def gather(self, vals: torch.Tensor, places: Places) -> torch.Tensor:
        """Return the values of the keys at `places`; a view if `places` is a range."""
        if isinstance(places, slice):
            return vals[self.span(places)]
        return vals[self.indices(places)]

    def scatter(self, vals: torch.Tensor, places: Places, new_vals: torch.Tensor) -> None:
        """Copy `new_vals` to the keys at `places` in `vals`, unless it is that memory already.

        Raises:
            ConfigError: The number of new values does not fit the keys.
        """
        if isinstance(places, slice):
            target = vals[self.span(places)]
            expected = len(target)
        else:
            indices = self.indices(places)
            expected = len(indices)
        if len(new_vals) != expected:
            msg = f"expected {expected} values, got {len(new_vals)}"
            raise ConfigError(msg)
        if not isinstance(places, slice):
            vals[indices] = new_vals.to(vals.device)
        elif target.data_ptr() != new_vals.data_ptr():
            target.copy_(new_vals)
