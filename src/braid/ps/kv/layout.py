"""Places of the values of some keys of a request among those of all keys.

Equal lengths: the values of key i are vals[k * i : k * (i + 1)]. Own lengths: offsets say it. A
range of keys has a range of values, which is a view; other places are gathered and scattered.
"""

from __future__ import annotations

import torch

from braid.errors import ConfigError
from braid.ps.kv.pairs import offsets
from braid.ps.kv.slicers import Places

__all__ = ["KeyLayout"]


class KeyLayout:
    """Places of values by places of keys.

    Args:
        num_keys: Number of keys.
        num_vals: Number of values.
        lens: Number of values of each key; the same for each when None.
    """

    def __init__(self, num_keys: int, num_vals: int, lens: torch.Tensor | None) -> None:
        self._each = num_vals // num_keys if num_keys else 0
        self._lens = lens
        self._offsets = None if lens is None else offsets(lens)

    def span(self, places: slice) -> slice:
        """Return the range of values of a range of keys."""
        if self._offsets is None:
            return slice(places.start * self._each, places.stop * self._each)
        return slice(int(self._offsets[places.start]), int(self._offsets[places.stop]))

    def indices(self, places: torch.Tensor) -> torch.Tensor:
        """Return the places of the values of some keys."""
        if self._lens is None or self._offsets is None:
            inside = torch.arange(self._each)
            return (places[:, None] * self._each + inside).reshape(-1)
        lens = self._lens[places]
        begins = self._offsets[places] - (lens.cumsum(0) - lens)
        return begins.repeat_interleave(lens) + torch.arange(int(lens.sum()))

    def gather(self, vals: torch.Tensor, places: Places) -> torch.Tensor:
        """Return the values of some keys; a view for a range."""
        if isinstance(places, slice):
            return vals[self.span(places)]
        return vals[self.indices(places)]

    def scatter(self, vals: torch.Tensor, places: Places, own: torch.Tensor) -> None:
        """Write the values of some keys; does nothing if they are there already.

        Raises:
            ConfigError: There is another number of them.
        """
        if isinstance(places, slice):
            target = vals[self.span(places)]
            expected = len(target)
        else:
            indices = self.indices(places)
            expected = len(indices)
        if len(own) != expected:
            msg = f"{len(own)} values came in the place of {expected}"
            raise ConfigError(msg)
        if not isinstance(places, slice):
            vals[indices] = own.to(vals.device)
        elif target.data_ptr() != own.data_ptr():
            target.copy_(own)
