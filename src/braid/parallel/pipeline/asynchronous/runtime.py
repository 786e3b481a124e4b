"""`AsynchronousPipeline`: PipeDream's training, which does not wait for the end of a batch.

    pipeline = AsynchronousPipeline(
        model, partial(torch.optim.SGD, lr=0.1), versions="stash", group=group
    )
    for epoch in range(10):
        losses = pipeline.train_on(micro_batches, loss=nn.functional.cross_entropy)
        print(pipeline.evaluate(inputs, targets, loss=nn.functional.cross_entropy))

Each stage steps as soon as it has a gradient, by a program with versions of weights; see
`programs.schedule.pipeline.asynchronous`. A call of `train_on` ends with a flush: all gradients
have been used. `Emulation` computes the same bits in one process.

Stages with old gradients may begin with smaller learning rates, by PipeMare's rule:

    def before_step(number, optimizer):  # argument of train_on; full rate after 500 steps
        scale = stale_lr_scale(pipeline.age, number, 500)
        optimizer.param_groups[0]["lr"] = 0.1 * scale

Sources: D. Narayanan et al., PipeDream, SOSP 2019; D. Narayanan et al., 2BW, ICML 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.comm.autograd.recompute_policy import RecomputePolicy
from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import note_incomplete
from braid.parallel.gradients.weight_versions import WeightVersions
from braid.parallel.graph import CapturedGraph
from braid.parallel.pipeline.asynchronous.stream import MicrobatchStream
from braid.parallel.pipeline.cutting import (
    check_target,
    checked_loss,
    edges_of,
    parts_of,
    refuse_shared,
    register,
    table_of,
    trained_params,
)
from braid.parallel.pipeline.executor import Executor
from braid.parallel.pipeline.messages import Messages, failing_together
from braid.parallel.pipeline.microbatches import num_rows, scatter, sizes_of
from braid.parallel.pipeline.other_layers import OtherLayers
from braid.parallel.pipeline.recomputing import check_recompute_policy
from braid.parallel.pipeline.replicas import Replicas
from braid.parallel.pipeline.shared_batch import SharedBatch
from braid.parallel.pipeline.stage import Stage
from braid.parallel.pipeline.wired import Wire
from braid.programs.schedule import Action, Program
from braid.programs.schedule.pipeline import (
    VersionRule,
    asynchronous,
    forward_only,
    num_of_step,
    oldest_ages,
    placement_of,
    with_recompute,
)

__all__ = ["AsynchronousPipeline"]

Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
BeforeStep = Callable[[int, Optimizer], None]


class AsynchronousPipeline(nn.Module):
    """Engine that trains a list of layers over the ranks of a group, without bubbles.

    Every rank creates the same whole model, and keeps the layers of its stage. The first ranks of
    the group have stage 0, and so on.

    Args:
        layers: The model; see `braid.Pipeline`.
        make_optimizer: Function of a stage's parameters that returns an optimizer for them.
        group: Ranks of the pipeline.
        replicas: Number of ranks of each stage, which take micro-batches in turn; at each step
            their gradients are averaged. None for one rank per stage.
        versions: Rule for the weights in the forward of a micro-batch: `stash`, the newest of each
            stage; `vertical_sync`, the version that was the newest of stage 0 when the micro-batch
            entered; `2bw`, the version before the last.
        every: Number of micro-batches per optimizer step of a rank; their gradients are averaged.
            For 2bw, at least the number of stages.
        balance: Number of layers of each stage; None for a partition of equal sizes.
        recompute: Micro-batches whose layers run again in backward; see `braid.Pipeline`.
        recompute_policy: Policy of operators that do not run again; see `braid.Pipeline`.
        seed: Seed of the layers' random numbers.

    Attributes:
        group: Ranks of the pipeline.
        stage: Number of this rank's stage.
        age: Age in steps of this stage's gradients, which are younger shortly after the
            begin of `train_on`. `stale_lr_scale` converts it to a factor for the learning rate.
        optimizer: Optimizer of this rank's stage.
        num_microbatches: Number of micro-batches so far. Set it when a run is resumed.
        num_steps: Number of steps of this rank so far.
        other_layers: Layers of the model that other ranks train.
        staleness: Number of gradients of this rank, by their measured age: the number of steps
            between a gradient's forward and its own step.

    Raises:
        ConfigError: Numbers of ranks of stages do not add up to the group, stages share parameters,
            or an argument is invalid.
        MismatchError: Models or arguments differ between ranks.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module] | Sequence[Wire] | CapturedGraph,
        make_optimizer: MakeOptimizer,
        *,
        group: Group,
        replicas: Sequence[int] | None = None,
        versions: VersionRule = "stash",
        every: int = 1,
        balance: Sequence[int] | None = None,
        recompute: str = "never",
        recompute_policy: RecomputePolicy | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.group = group
        self.num_microbatches = self.num_steps = 0
        self.staleness: Counter[int] = Counter()
        counts = tuple(replicas or (1,) * group.size)
        if sum(counts) != group.size:
            msg = (
                f"replicas={list(counts)} need {sum(counts)} ranks, but the group has "
                f"{group.size}: assign each rank to a stage"
            )
            raise ConfigError(msg)
        self._counts, self._rule, self._every = counts, versions, every
        self._recompute, self._seed = recompute, seed
        check_recompute_policy(recompute_policy, recompute)
        self.program(1)  # raises for invalid arguments
        parts = parts_of(self, layers, len(counts), balance)
        refuse_shared(parts)
        idle = [s for s, part in enumerate(parts) if not trained_params(part)]
        if idle:
            msg = (
                f"stage {idle[0]} has no parameters to train: give it layers with parameters by "
                "balance="
            )
            raise ConfigError(msg)
        self.balance = tuple(map(len, parts))
        arguments = {
            "replicas": counts,
            "versions": versions,
            "every": every,
            "balance": self.balance,
            "recompute": recompute,
            "seed": seed,
        }
        table_of(layer for part in parts for layer in part).compare(group, arguments)
        self._placement = placement_of(counts)
        self.stage = next(s for s, ranks in enumerate(self._placement) if group.rank in ranks)
        filled = self.program(2 * sum(counts) * every)
        self.age = oldest_ages(filled)[self.stage]
        own_layers = parts[self.stage]
        params = dict.fromkeys(p for layer in own_layers for p in layer.module.parameters())
        self._params = trained_params(own_layers)
        self._versions = WeightVersions(params)
        stage = Stage(
            self.stage,
            own_layers,
            edges_of(parts),
            policy=recompute_policy,
            versions=self._versions,
        )
        self._stages = {self.stage: stage}
        self._messages = Messages(group, next((p.device for p in params), torch.device("cpu")))
        alike = group.split(self.stage) if max(counts) > 1 else None
        if alike is not None and alike.size > 1:
            self._messages.others.append(alike)
            table_of(own_layers).make_equal(alike, arguments)
            self._replicas = Replicas(self._stages, alike)
        else:
            self._replicas = Replicas(self._stages, None)
        self.optimizer = make_optimizer(self._params)
        if len(counts) > 1:  # state dicts name the stage
            part = f"pipeline stage {self.stage} of {len(counts)}"
            note_incomplete(self, lambda pipeline: pipeline._params, lambda *_: "", part)  # noqa: SLF001
        self._shared = SharedBatch(group, self._placement[0], self._placement[-1])
        self.other_layers = OtherLayers(parts, self._placement, group.rank)
        for layer in own_layers:
            register(self, layer)

    @property
    def most_live(self) -> int:
        """Largest number of simultaneous versions of this stage's weights in memory."""
        return self._versions.most_live

    def train_on(
        self,
        microbatches: Iterable[tuple[Any, Any]],
        *,
        loss: Loss,
        count: int | None = None,
        before_step: BeforeStep | None = None,
    ) -> torch.Tensor:
        """Train on micro-batches, up to a flush, when all gradients have been used.

        Args:
            microbatches: Pairs of input and target; the same on all ranks.
            loss: Function (output, target) that returns the mean loss over samples.
            count: Number of pairs to use; None for all, if `microbatches` has a length.
            before_step: Called before each step of this rank, to set learning rates or clip
                gradients; its arguments are the number of the step's first micro-batch since the
                training began, and the optimizer.

        Returns:
            Losses of the micro-batches, on all ranks, of shape (count,) and dtype float64.

        Raises:
            CommError: Another rank has failed; the message has its layer and action.
            ConfigError: The count is unknown or not the same on all ranks, or micro-batches are
                missing.

        Cost: per stage and micro-batch two messages with the bytes between stages; per step of a
            replicated stage an all_reduce of its gradients; at the end an all_reduce of 8 bytes
            per micro-batch.
        """
        if count is None:
            if not isinstance(microbatches, Sized):
                msg = (
                    "microbatches has no length: pass the number of micro-batches, as in count=100"
                )
                raise ConfigError(msg)
            count = len(microbatches)
        counts = self.group.all_gather(torch.tensor([count])).tolist()
        if len(set(counts)) > 1 or count < 1:
            msg = (
                f"ranks got different numbers of micro-batches, or none, {counts}: pass the same "
                "number, at least 1, on all ranks"
            )
            raise ConfigError(msg)
        with failing_together(self._messages, "training"):
            return self._train(microbatches, count, loss, before_step)

    def evaluate(self, batch: Any, target: Any, *, loss: Loss) -> torch.Tensor:
        """Return the mean loss of a batch, on all ranks, without gradients."""
        with failing_together(self._messages, "an evaluation"):
            return self._evaluate(batch, target, loss)

    def _evaluate(self, batch: Any, target: Any, loss: Loss) -> torch.Tensor:
        rows, size = num_rows(batch), self.group.size
        sizes = sizes_of(rows, size)
        check_target(target, rows)
        self._shared.compare(batch, target)
        targets = scatter(target, sizes)

        def loss_of(output: Any, i: int) -> torch.Tensor:
            return checked_loss(loss(output, targets[i])) * (sizes[i] / rows)

        program = forward_only(size, len(sizes), self._placement)
        with torch.inference_mode(mode=False), torch.no_grad():
            executor = Executor(program, self._messages, self._stages)
            losses = executor.run(scatter(batch, sizes), loss_of)
        return self._losses(losses, len(sizes)).sum()

    def _train(
        self,
        microbatches: Iterable[tuple[Any, Any]],
        count: int,
        loss: Loss,
        before_step: BeforeStep | None,
    ) -> torch.Tensor:
        first = self.num_microbatches
        stream = MicrobatchStream(microbatches, count, seed=self._seed, first=first)
        self._shared.compare(stream[0], stream.target(0))
        program = self.program(count)
        actions = program.ranks[self.group.rank]
        self._versions.begin(a.version for a in actions if a.kind == "F")
        for param in self._params:
            param.grad = None

        def loss_of(output: Any, i: int) -> torch.Tensor:
            return checked_loss(loss(output, stream.target(i)))

        def step(action: Action) -> None:
            self._step(action, count, before_step)

        executor = Executor(program, self._messages, self._stages, on_step=step)
        losses = executor.run(stream, loss_of, stream.draws)
        stream.exhaust()
        self.num_microbatches += count
        return self._losses(losses, count)

    def _step(self, action: Action, count: int, before_step: BeforeStep | None) -> None:
        """Create the next version of the weights, from the gradients of all replicas."""
        self._replicas.begin()
        self._replicas.launch(action.unit)
        self._replicas.finish(action.unit)
        replicas = self._counts[action.unit]
        num = num_of_step(action, replicas, self._every, count)
        for param in self._params:
            if param.grad is not None and num > 1:
                param.grad.div_(num)
        if before_step is not None:
            num_before = (action.version - 1) * replicas * self._every
            before_step(self.num_microbatches + num_before, self.optimizer)
        ages = self._versions.step(self.optimizer.step)
        self.optimizer.zero_grad()
        self.num_steps += 1
        self.other_layers.are_old = True
        self._record(ages)

    def _record(self, ages: Sequence[int]) -> None:
        """Count the gradients of a step by age; `braid report` shows them, and live versions."""
        self.staleness.update(ages)
        events = self.group.context.events
        for age in ages:
            events.instant(f"gradient of stage {self.stage}", seq=age)
        events.instant(f"versions of stage {self.stage}", seq=self._versions.num_live)

    def program(self, count: int) -> Program:
        """Return the program that `train_on` executes for a number of micro-batches."""
        program = asynchronous(self._counts, count, versions=self._rule, every=self._every)
        return with_recompute(program, self._recompute)

    def _losses(self, losses: dict[int, Any], count: int) -> torch.Tensor:
        """Return the losses of all micro-batches, on all ranks."""
        all_losses = torch.zeros(count, dtype=torch.float64)
        for i, value in losses.items():
            all_losses[i] = value.double().cpu()
        return self.group.all_reduce(all_losses)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise, because a pipeline runs forwards and backwards together."""
        msg = "an AsynchronousPipeline cannot be called: use pipeline.train_on or pipeline.evaluate"
        raise ConfigError(msg)

    def extra_repr(self) -> str:
        """Return the stage, its replicas and the rule for versions, for `repr`."""
        return (
            f"stage {self.stage} of {len(self._counts)}, replicas {list(self._counts)}, "
            f"versions {self._rule}, balance {list(self.balance)}"
        )
