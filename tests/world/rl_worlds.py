"""A small environment for actors, and a policy for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Corridor:
    """Five places in a row: the last one gives 1, and the way there nothing; 12 steps at most."""

    def __init__(self, limit: int = 12) -> None:
        self.limit = limit

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        del seed
        self.place, self.steps = 0, 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place = max(0, self.place + (1 if action else -1))
        self.steps += 1
        ended = self.place == 4
        return self.observation(), float(ended), ended, self.steps == self.limit and not ended, {}

    def observation(self) -> Any:
        return torch.eye(5, dtype=torch.float32)[self.place].numpy()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x):
        return self.policy(x), self.value(x).squeeze(-1)
