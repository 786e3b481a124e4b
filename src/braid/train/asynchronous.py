"""Training on an asynchronous pipeline: many steps up to each flush.

    steps 1 .. 20       program of 20 micro-batches, one optimizer step each     flush: losses
    steps 21 .. 40      next program; then evaluation, checkpoint if due         flush: losses

Stages step at different times, so each stage clips its own gradients, and no stage waits for the
loss. With `stale_lr_steps`, a stage's learning rate depends on the age of its gradients. One rank
with `reference_shards` stages computes the same.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch

from braid.checkpoint import (
    ReplicatedSnapshot,
    Snapshot,
    training_numbers,
    training_tensors,
)
from braid.checkpoint.snapshot import param_of
from braid.checkpoint.training_state import merged_numbers
from braid.comm import Group
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.parallel.pipeline import sizes_of
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline, Emulation, stale_lr_scale
from braid.programs.schedule.pipeline import VersionRule, asynchronous, oldest_ages
from braid.train.config import TrainConfig
from braid.train.gpt import GPT, mean_loss
from braid.train.stage_balance import stage_balance
from braid.train.windows import Windows

__all__ = ["AsynchronousStages", "Trained"]


class Trained(NamedTuple):
    """Losses and gradient norms of the steps up to a flush.

    Attributes:
        losses: Mean loss of each batch.
        norms: Norm of the gradients of this rank's stage before each step; norm of the first stage
            if this rank has all stages.
    """

    losses: list[float]
    norms: list[float]


class AsynchronousStages:
    """Trains a GPT on an asynchronous pipeline, or on its emulation; see `Shards`.

    Args:
        model: The model, equal on all ranks.
        optimizer: Optimizer of all parameters; each rank updates the parameters of its stage.
        windows: Samples to train on.
        group: All ranks that train.
        config: Stages, versions and micro-batches.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        windows: Windows,
        group: Group,
        config: TrainConfig,
    ) -> None:
        self._model, self._windows = model, windows
        self._group, self._config = group, config
        layers = model.layers()
        balance, self.note = stage_balance(
            config, group, layers, lambda rows: windows.batch(range(rows))[0]
        )
        options: dict[str, Any] = {
            "replicas": config.counts,
            "versions": config.versions,
            "every": config.every,
            "balance": balance,
            "seed": config.seed,
        }
        # a rank has gradients of its stage's parameters only, so the optimizer updates only these
        self._pipeline: AsynchronousPipeline | Emulation
        if config.reference_shards:
            self._pipeline = Emulation(layers, lambda _: optimizer, **options)
        else:
            self._pipeline = AsynchronousPipeline(
                layers,
                lambda _: optimizer,
                group=group,
                recompute=config.recompute,
                **options,
            )
        ends = [*accumulate(self._pipeline.balance)]
        stage_of = {
            param: bisect(ends, index)
            for index, layer in enumerate(layers)
            for param in layer.parameters()
        }
        firsts = [*accumulate(config.counts, initial=0)]  # first rank of each stage
        self._owners = {name: firsts[stage_of[param]] for name, param in model.named_parameters()}
        up_to_flush = asynchronous(
            config.counts,
            config.flush_every * config.every,
            versions=cast("VersionRule", config.versions),
            every=config.every,
        )
        self._ages = oldest_ages(up_to_flush)

    @property
    def ages(self) -> tuple[str, ...]:
        """Lines for users: ages of gradients, weight versions and learning rates."""
        old, steps = ", ".join(map(str, self._ages)), self._config.stale_lr_steps
        stages = f"stages 0 to {len(self._ages) - 1}"
        line = (
            f"gradients are up to {old} steps old on {stages}, which keep "
            f"{', '.join(str(age + 1) for age in self._ages)} versions"
        )
        if not steps:
            return (line,)
        if max(self._ages) < 2:
            return line, (
                f"stale_lr_steps={steps} changes no learning rate, since no gradient is more than "
                "1 step old"
            )
        divisors = ", ".join(str(max(1, age)) for age in self._ages)
        return line, (
            f"learning rates are divided by {divisors} on {stages} at first, and whole from step "
            f"{steps + 1} on"
        )

    def train_on(
        self,
        first_step: int,
        batches: Sequence[Sequence[int]],
        check: Callable[[float, int], None],
    ) -> Trained:
        """Take one optimizer step per batch, then flush the pipeline.

        Args:
            first_step: Number of steps taken before this call.
            batches: Samples of each batch.
            check: Function of the norm of a stage's gradients and the number of earlier steps,
                called before the weights change; raises if the norm is not finite.
        """
        norms: dict[int, float] = {}  # by step; norm of this rank's first stage
        every = self._config.every

        def before_step(microbatch: int, optimizer: torch.optim.Optimizer) -> None:
            number = microbatch // every
            age = self._ages[self._pipeline.stage]
            scale = stale_lr_scale(age, number, self._config.stale_lr_steps)
            for param_group in optimizer.param_groups:
                param_group["lr"] = self._config.lr_at(number) * scale
            norm = clip_whole_(self._model.parameters(), self._config.clip)
            check(norm, number)
            norms.setdefault(number, norm)

        self._pipeline.num_microbatches = first_step * every
        losses = self._pipeline.train_on(
            [*self._microbatches(batches)], loss=mean_loss, before_step=before_step
        )
        means = losses.reshape(len(batches), -1).mean(1)
        norm, of_steps = 0.0, []
        for step in range(first_step, first_step + len(batches)):
            norm = norms.get(step, norm)  # replicas: this rank steps for one of several batches
            of_steps.append(norm)
        return Trained(means.tolist(), of_steps)

    def _microbatches(
        self, batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for indices in batches:
            inputs, targets = self._windows.batch(indices)
            sizes = sizes_of(len(inputs), self._config.every)
            yield from zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)

    def evaluate(self, windows: Windows, indices: Sequence[int]) -> float:
        """Compute the mean loss without gradients; see `Shards.evaluate`."""
        inputs, targets = windows.batch(indices)
        if isinstance(self._pipeline, AsynchronousPipeline):
            return self._pipeline.evaluate(inputs, targets, loss=mean_loss).item()
        with torch.no_grad():
            return float(self._model(inputs, targets))

    def checkpoint(self, optimizer: torch.optim.Optimizer) -> tuple[Snapshot, dict[str, Any]]:
        """Return the tensors of this rank's stage, and other values; see `Shards.checkpoint`."""
        tensors = training_tensors(self._model, optimizer)
        numbers = training_numbers(self._model, optimizer)
        if isinstance(self._pipeline, Emulation):
            return ReplicatedSnapshot(tensors), numbers
        mine = {
            name: tensor
            for name, tensor in tensors.items()
            if self._owners.get(param_of(name), 0) == self._group.rank
        }
        return ReplicatedSnapshot(mine), merged_numbers(numbers, self._group)

    def share_weights(self) -> None:
        """Gather all weights on rank 0; see `Shards.share_weights`."""
        if self._group.size > 1:
            for name, param in self._model.named_parameters():
                self._group.broadcast(param.data, self._owners[name])
        if isinstance(self._pipeline, AsynchronousPipeline):
            self._pipeline.other_layers.release()
