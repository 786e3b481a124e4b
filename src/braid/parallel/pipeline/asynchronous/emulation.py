"""Emulation of an `AsynchronousPipeline` in one process, micro-batch by micro-batch.

    for each micro-batch i
        stage 0 with its version v(0, i) -> stage 1 with v(1, i) -> ... -> loss -> back
        each stage with a complete round: mean of the gradients, step, next version

It uses neither programs nor messages. Formulas define the versions, and each version is a copy of
the modules. With w forwards in advance, `every` micro-batches per step, and k = i // replicas,

    stash            v(s, i) = max(0, k - w_s) // every
    vertical_sync    v(s, i) = max(0, k - w_0) // every
    2bw              v(s, i) = max(0, i // (every * replicas) - 1)

Source: D. Narayanan et al., PipeDream, SOSP 2019, section 3.3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.errors import ConfigError
from braid.parallel.pipeline.cutting import (
    checked_loss,
    edges_of,
    parts_of,
    refuse_shared,
    trained_params,
)
from braid.parallel.pipeline.microbatches import num_rows
from braid.parallel.pipeline.stage import Layer, Stage
from braid.programs.schedule.pipeline import VersionRule
from braid.runtime.seeding import Draws

__all__ = ["Emulation"]

Loss = Callable[[Any, Any], torch.Tensor]


class Emulation:
    """Trainer in one process that uses gradients as stale as in an asynchronous pipeline.

    Args:
        layers: The model to train; see `AsynchronousPipeline` for all arguments.
        make_optimizer: Function of a stage's parameters that returns an optimizer for them.
        replicas: Number of ranks of each stage.
        versions: Rule for the version of its weights that a forward uses.
        every: Number of micro-batches per optimizer step of a rank.
        balance: Number of layers of each stage.
        seed: Seed of the layers' random numbers.

    Raises:
        ConfigError: Stages share parameters or skip connections, or an argument is invalid.

    Attributes:
        balance: Number of layers of each stage.
        num_microbatches: Number of micro-batches so far.
        stage: Number of the stage that is stepping, for `before_step`.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        replicas: Sequence[int],
        versions: VersionRule = "stash",
        every: int = 1,
        balance: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        parts = parts_of(nn.Module(), layers, len(replicas), balance)
        refuse_shared(parts)
        if edges_of(parts):
            msg = (
                "the emulation does not support skip connections between stages: train with "
                "AsynchronousPipeline"
            )
            raise ConfigError(msg)
        self._replicas, self._rule, self._every = replicas, versions, every
        self._seed = seed
        self.balance = tuple(map(len, parts))
        self.num_microbatches = self.stage = 0
        self._stages = [
            _Emulated(part, make_optimizer, num_replicas, num_replicas * every)
            for part, num_replicas in zip(parts, replicas, strict=True)
        ]

    @property
    def age(self) -> int:
        """Age in steps of the stepping stage's gradients.

        Shortly after a flush, when all gradients have been used, they are younger.
        """
        per_step = self._replicas[self.stage] * self._every
        numbers = range(2 * sum(self._replicas) * self._every)
        return max(i // per_step - self._version(self.stage, i) for i in numbers)

    def train_on(
        self,
        microbatches: Sequence[tuple[Any, Any]],
        *,
        loss: Loss,
        before_step: Callable[[int, Optimizer], None] | None = None,
    ) -> torch.Tensor:
        """Train on micro-batches, and use all gradients; see `AsynchronousPipeline.train_on`."""
        losses = []
        for stage in self._stages:
            stage.begin()
        for i, (batch, target) in enumerate(microbatches):
            draws = Draws(self._seed, self.num_microbatches + i, range(num_rows(batch)))
            value, passed = batch, []
            for s, stage in enumerate(self._stages):
                stage_copy = stage.copy_of(self._version(s, i), i)
                value, _ = stage_copy.forward(i, value, keeps=True, draws=draws)
                stage.keep_buffers(stage_copy, i)
                passed.append(stage_copy)
            own_loss = checked_loss(loss(value, target))
            losses.append(own_loss.detach())
            passed[-1].replace_outputs(i, own_loss)
            grads = [torch.ones_like(own_loss)]
            for s in reversed(range(len(passed))):
                grads = passed[s].backward(i, {None: grads})[None]
                self._stages[s].add(passed[s], i)
            for s, stage in enumerate(self._stages):
                self.stage = s
                stage.step(i, len(microbatches), self.num_microbatches, before_step)
                stage.forget(self._version(s, i + 1))
        self.num_microbatches += len(microbatches)
        return torch.stack(losses).double()

    def _version(self, stage: int, i: int) -> int:
        if self._rule == "2bw":
            return max(0, i // (self._every * self._replicas[0]) - 1)
        place = 0 if self._rule == "vertical_sync" else stage
        ahead = (sum(self._replicas[place:]) - 1) // self._replicas[place]
        return max(0, i // self._replicas[place] - ahead) // self._every


class _Emulated:
    """Stage with its layers, all versions of them, and gradients of a round."""

    def __init__(
        self,
        layers: Sequence[Layer],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        replicas: int,
        per_step: int,
    ) -> None:
        self._layers = layers
        self._replicas, self._per_step = replicas, per_step
        self._params = trained_params(layers)
        self._optimizer = make_optimizer(self._params)
        self._versions: dict[int, list[Layer]] = {}
        self._newest = 0
        self._buffers = [[b.clone() for b in _buffers(layers)] for _ in range(replicas)]
        self._sums: dict[int, list[torch.Tensor | None]] = {}  # by replica

    def begin(self) -> None:
        """Begin with the current weights of the layers."""
        self._newest = 0
        self._versions = {0: copy.deepcopy(list(self._layers))}

    def copy_of(self, version: int, i: int) -> Stage:
        """Return a stage with a version of the weights, for the replica with micro-batch `i`."""
        layers = copy.deepcopy(self._versions[version])
        _copy_buffers(self._buffers[i % self._replicas], _buffers(layers))
        return Stage(i, layers)

    def keep_buffers(self, stage: Stage, i: int) -> None:
        """Keep buffers, such as running means, of a stage after micro-batch `i`."""
        _copy_buffers(_buffers(stage.layers), self._buffers[i % self._replicas])
        if not i % self._replicas:
            _copy_buffers(_buffers(stage.layers), _buffers(self._layers))

    def forget(self, version: int) -> None:
        """Delete versions that are older than `version`."""
        for old in [v for v in self._versions if v < version]:
            del self._versions[old]

    def add(self, stage: Stage, i: int) -> None:
        """Add the stage's gradients of micro-batch `i` to its replica's gradients."""
        grads = [p.grad for p in trained_params(stage.layers)]
        sums = self._sums.get(i % self._replicas)
        if sums is None:
            self._sums[i % self._replicas] = grads
            return
        for k, grad in enumerate(grads):
            mine = sums[k]
            if grad is not None:
                sums[k] = grad if mine is None else mine + grad

    def step(
        self,
        i: int,
        count: int,
        num_before: int,
        before_step: Callable[[int, Optimizer], None] | None,
    ) -> None:
        """Step the optimizer, if micro-batch `i` of `count` is the last of a round.

        Args:
            i: Number of the micro-batch since the last flush.
            count: Number of micro-batches up to the next flush.
            num_before: Number of micro-batches before the last flush.
            before_step: Called before the step; see `AsynchronousPipeline.train_on`.
        """
        if (i + 1) % self._per_step and i + 1 != count:
            return
        num = i % self._per_step + 1
        for k, param in enumerate(self._params):
            of_replicas = [self._sums[q][k] for q in sorted(self._sums)]
            grads = [grad for grad in of_replicas if grad is not None]
            if grads:
                param.grad = sum(grads[1:], grads[0]) / num
        if before_step is not None:
            before_step(num_before + i + 1 - num, self._optimizer)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._sums.clear()
        self._newest += 1
        self._versions[self._newest] = copy.deepcopy(list(self._layers))


def _buffers(layers: Sequence[Layer]) -> list[torch.Tensor]:
    return [buffer for layer in layers for buffer in layer.module.buffers()]


def _copy_buffers(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for kept, buffer in zip(source, target, strict=True):
        buffer.copy_(kept)
