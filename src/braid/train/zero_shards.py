"""Parameters, gradients and optimizer states divided over ranks in place of replicas.

The model and the optimizer are made, and resumed, whole; they are divided before the first step.
A checkpoint has the boxes of each rank. So a run can be resumed on another number of ranks, and
without dividing anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.checkpoint import Snapshot
from braid.comm import Group
from braid.parallel.sharding import (
    ShardedSnapshot,
    Sharding,
    ShardingOptions,
    attach,
    memory_of,
    sharded_numbers,
)
from braid.train.data import Windows
from braid.train.gpt import GPT
from braid.train.sampling import share_of
from braid.train.shards import StepAgreement

__all__ = ["ZeroShards"]


class ZeroShards:
    """Trains a GPT whose state is divided; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        optimizer: Its optimizer.
        windows: Samples to train on.
        group: All ranks that train.
        stage: 1 divides states of the optimizer, 2 gradients, too, and 3 parameters, too.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        group: Group,
        stage: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._windows = windows
        self._group = group
        self._stage = stage
        self._divided: Sharding | None = None

    def backward(self, batch: Sequence[int], *, stop: bool) -> StepAgreement:
        """See `Shards`."""
        self._sharding()
        events = self._group.context.events
        with events.span("data"):
            inputs, targets = self._windows.batch(self._share(batch))
        with events.span("forward"):
            loss: torch.Tensor = self._model(inputs, targets)
        with events.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        mine = torch.tensor([[loss.item(), float(stop)]], dtype=torch.float64)
        losses, stops = self._group.all_gather(mine).t().tolist()
        return StepAgreement(tuple(losses), any(stops))

    def memory(self) -> list[torch.Tensor]:
        """Return the memory of parameters and gradients, gathered ones included."""
        return [x for own in memory_of(self._sharding()) for x in own]

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """See `Shards`."""
        self._sharding()
        with torch.no_grad():
            loss = self._model(*windows.batch(self._share(indices))).double().cpu()
        losses = self._group.all_gather(loss).tolist()
        return float(sum(losses) / len(losses))

    def clip(self, max_norm: float) -> float:
        """See `Shards`."""
        return self._sharding().clip_grad_norm_(max_norm).item()

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """See `Shards`; a collective."""
        sharding = self._sharding()
        return ShardedSnapshot(sharding, optimizer), sharded_numbers(sharding, optimizer)

    def share_weights(self) -> None:
        """See `Shards`: all parameters become whole again."""
        self._sharding().undo()

    def _sharding(self) -> Sharding:
        """Divide the model and the states of its optimizer, once."""
        if self._divided is None:
            options = ShardingOptions(stage=self._stage)
            self._divided = Sharding(self._model, self._group, options)
            attach(self._divided, self._optimizer)
        return self._divided

    def _share(self, indices: Sequence[int]) -> list[int]:
        return share_of(indices, self._group.rank, self._group.size)
