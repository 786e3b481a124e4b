"""Unrolls that have been learned from, to learn from them again.

Source: L. Lin, "Self-improving reactive agents based on reinforcement learning, planning and
teaching", 1992; mixed with fresh unrolls as in L. Espeholt et al., ICML 2018, section 5.2.2.
"""

from __future__ import annotations

import torch

from braid.errors import ConfigError
from braid.rl.actor import Unroll

__all__ = ["Replay"]


class Replay:
    """The newest unrolls, drawn uniformly.

    Args:
        capacity: Unrolls that are kept; the oldest goes first.
        seed: Seed of the draws.

    Raises:
        ConfigError: The capacity is below 1.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        if capacity < 1:
            msg = f"a replay needs capacity >= 1, got {capacity}"
            raise ConfigError(msg)
        self._capacity = capacity
        self._unrolls: list[Unroll] = []
        self._next = 0  # place of the next unroll when full
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Return the number of unrolls."""
        return len(self._unrolls)

    def add(self, unroll: Unroll) -> None:
        """Keep an unroll."""
        if len(self._unrolls) < self._capacity:
            self._unrolls.append(unroll)
        else:
            self._unrolls[self._next] = unroll
            self._next = (self._next + 1) % self._capacity

    def sample(self, count: int) -> list[Unroll]:
        """Draw unrolls, each of all that are kept; none from an empty replay."""
        if not self._unrolls:
            return []
        drawn = torch.randint(len(self._unrolls), (count,), generator=self._generator)
        return [self._unrolls[index] for index in drawn.tolist()]
