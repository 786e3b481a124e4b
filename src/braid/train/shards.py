"""The shards of a batch: one on each rank, or all in one process in the order of ranks.

Both compute the same bits in `.grad`; `braid demo` checks this. The rest of a training (order of
samples, optimizer, reports) is the same code for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import (
    ReplicatedSnapshot,
    Snapshot,
    training_numbers,
    training_tensors,
)
from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel, accumulate
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.parallel.sharding import (
    ShardedSnapshot,
    Sharding,
    ShardingOptions,
    attach,
    memory_of,
    sharded_numbers,
)
from braid.programs.sampling import share_of
from braid.train.gpt import GPT
from braid.train.windows import Windows

__all__ = ["ParallelShards", "ReferenceShards", "Shards", "StepAgreement"]


class StepAgreement(NamedTuple):
    """Values that all ranks know after a step's backward.

    Attributes:
        losses: Loss of each shard, in the order of ranks.
        stop: Whether any rank was asked to stop after this step.
    """

    losses: tuple[float, ...]
    stop: bool

    @property
    def loss(self) -> float:
        """Mean loss of the shards, summed in their order."""
        return sum(self.losses) / len(self.losses)


class Shards(Protocol):
    """Computes gradients and losses of a batch."""

    def backward(self, batch: Sequence[int], *, stop: bool) -> StepAgreement:
        """Compute the averaged gradients of a batch and leave them in `.grad`.

        Args:
            batch: Numbers of the batch's samples.
            stop: Whether this rank was asked to stop after this step; ranks exchange it.
        """

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """Compute the mean loss of the samples `indices` of `windows`, without gradients."""

    def clip(self, max_norm: float) -> float:
        """Scale gradients to at most `max_norm`; return the norm before."""

    def checkpoint(self, optimizer: Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """Return the tensors that this rank writes, and the values that are not tensors."""

    def share_weights(self) -> None:
        """Gather all weights on rank 0, so that it can generate text; a collective."""


class ParallelShards:
    """Shards in parallel, one on each rank; a world of one rank is allowed.

    The model and the optimizer are built and resumed unsharded; the engine that shards is built
    before the first step. A checkpoint can be resumed on another number of ranks, and with another
    `stage`.

    Args:
        model: The model, equal on all ranks.
        optimizer: Optimizer of the model.
        windows: Samples to train on.
        group: Group of all ranks that train.
        stage: 0 replicates everything (DDP), 1 shards optimizer states (ZeRO), 2 also gradients,
            and 3 also parameters.
    """

    def __init__(
        self, model: GPT, optimizer: Optimizer, windows: Windows, group: Group, stage: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._windows = windows
        self._group = group
        self._stage = stage
        self._sharding: Sharding | None = None
        self._parallel: nn.Module | None = (
            None  # module that averages gradients, built before the first step
        )

    def _make(self) -> nn.Module:
        """Shard the model and its optimizer, or wrap the model in DDP, at the first call."""
        if self._parallel is None and self._stage:
            self._sharding = Sharding(self._model, self._group, ShardingOptions(stage=self._stage))
            attach(self._sharding, self._optimizer)
            self._parallel = self._model
        elif self._parallel is None:
            # the trainer checks and reports losses before it uses gradients
            self._parallel = DistributedDataParallel(
                self._model, process_group=self._group, nonfinite="ignore"
            )
        return self._parallel

    def backward(self, batch: Sequence[int], *, stop: bool) -> StepAgreement:
        """Compute the averaged gradients of a batch; see `Shards.backward`.

        Cost: the engine's exchange of gradients and one all_gather of 16 bytes a rank.
        """
        parallel, events = self._make(), self._group.context.events
        with events.span("data"):
            inputs, targets = self._windows.batch(self._share(batch))
        with events.span("forward"):
            loss: torch.Tensor = parallel(inputs, targets)
        with events.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        mine = torch.tensor([[loss.item(), float(stop)]], dtype=torch.float64)
        losses, stops = self._group.all_gather(mine).t().tolist()
        return StepAgreement(tuple(losses), any(stops))

    def memory(self) -> list[torch.Tensor]:
        """Return the buffers that hold parameters and gradients, both sharded and gathered."""
        return [x for memory in memory_of(self._sharding) for x in memory] if self._sharding else []

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """Compute the mean loss without gradients; see `Shards.evaluate`."""
        with torch.no_grad():
            loss = self._model(*windows.batch(self._share(indices))).double().cpu()
        losses = self._group.all_gather(loss).tolist()
        return float(sum(losses) / len(losses))

    def clip(self, max_norm: float) -> float:
        """Scale gradients to at most `max_norm`, and return the norm before; see `Shards.clip`."""
        if self._sharding is not None:
            return self._sharding.clip_grad_norm_(max_norm).item()
        return clip_whole_(self._model.parameters(), max_norm)

    def checkpoint(self, optimizer: Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """Return the tensors that this rank writes, and other values; see `Shards.checkpoint`."""
        if self._stage:
            self._make()
        if (sharding := self._sharding) is not None:
            return ShardedSnapshot(sharding, optimizer), sharded_numbers(sharding, optimizer)
        tensors = training_tensors(self._model, optimizer)
        snapshot = ReplicatedSnapshot(tensors, rank=self._group.rank, size=self._group.size)
        return snapshot, training_numbers(self._model, optimizer)

    def share_weights(self) -> None:
        """Gather sharded weights; replicated weights are complete already."""
        if self._sharding is not None:
            self._sharding.undo()

    def _share(self, indices: Sequence[int]) -> list[int]:
        return share_of(indices, self._group.rank, self._group.size)


class ReferenceShards:
    """Shards of a batch that one process computes in sequence, as a reference.

    Args:
        model: The model.
        windows: Samples to train on.
        group: A world of one rank, which records events.
        num: Number of shards.
    """

    def __init__(self, model: GPT, windows: Windows, group: Group, num: int) -> None:
        self._model = model
        self._windows = windows
        self._group = group
        self._num = num

    def backward(self, batch: Sequence[int], *, stop: bool) -> StepAgreement:
        """Compute the averaged gradients of a batch; see `Shards.backward`."""
        losses = accumulate(
            self._model, [self._loss_of(self._windows, batch, r) for r in range(self._num)]
        )
        return StepAgreement(tuple(loss.item() for loss in losses), stop)

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """Compute the mean loss without gradients; see `Shards.evaluate`."""
        with torch.no_grad():
            losses = [
                self._loss_of(windows, indices, r)().double().item() for r in range(self._num)
            ]
        return sum(losses) / len(losses)

    def clip(self, max_norm: float) -> float:
        """Scale gradients to at most `max_norm`, and return the norm before; see `Shards.clip`."""
        return clip_whole_(self._model.parameters(), max_norm)

    def checkpoint(self, optimizer: Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """Return the tensors that this rank writes, and other values; see `Shards.checkpoint`."""
        snapshot = ReplicatedSnapshot(training_tensors(self._model, optimizer))
        return snapshot, training_numbers(self._model, optimizer)

    def share_weights(self) -> None:
        """Do nothing: the only rank has all weights already."""

    def _loss_of(
        self, windows: Windows, indices: Sequence[int], rank: int
    ) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            with self._group.context.events.span("forward"):
                value: torch.Tensor = self._model(
                    *windows.batch(share_of(indices, rank, self._num))
                )
            return value

        return loss
