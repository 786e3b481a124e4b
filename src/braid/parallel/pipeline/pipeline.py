"""`Pipeline`: trains a list of layers as stages on the ranks of a group.

    pipeline = braid.Pipeline(model, num_microbatches=8, schedule="1f1b", group=group)
    optimizer = torch.optim.AdamW(pipeline.parameters())  # parameters of this rank's stages
    for batch, target in batches:
        loss = pipeline.step(batch, target, loss=nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()

Gradients are bitwise equal to one process that runs the micro-batches in turn, adds their gradients
in this order and weighs each loss by its share of the batch: all named schedules run the backwards
of a stage in the order of micro-batches.

Source: Y. Huang et al., GPipe, NeurIPS 2019; the schedules name their sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.comm.autograd.nested import tensors_in
from braid.comm.autograd.recompute_policy import RecomputePolicy
from braid.errors import ConfigError, raise_all
from braid.parallel.gradients.exact_norm import clip_counted_
from braid.parallel.gradients.incomplete import PartOfModel, note_incomplete
from braid.parallel.graph import CapturedGraph
from braid.parallel.pipeline.cutting import (
    edges_of,
    noting,
    parts_of,
    register,
    table_of,
)
from braid.parallel.pipeline.deferred_batch_norm import commit_batch_norms
from braid.parallel.pipeline.executor import Executor
from braid.parallel.pipeline.messages import Messages, failing_together
from braid.parallel.pipeline.micro_losses import Loss, LossWarnings, LossWeight, MicroLosses
from braid.parallel.pipeline.microbatches import gather, num_rows, scatter, sizes_of
from braid.parallel.pipeline.other_layers import OtherLayers
from braid.parallel.pipeline.recomputing import check_recompute_policy
from braid.parallel.pipeline.replicas import Replicas
from braid.parallel.pipeline.shared_batch import SharedBatch
from braid.parallel.pipeline.stage import Stage
from braid.parallel.pipeline.tied import TiedParams
from braid.parallel.pipeline.wired import Wire
from braid.programs.schedule import Action, Program, validate
from braid.programs.schedule.files import schedule_named
from braid.programs.schedule.known import RULES
from braid.programs.schedule.pipeline import (
    RECOMPUTE_MODES,
    forward_only,
    stage_ranks,
    with_recompute,
    with_steps,
)
from braid.runtime.seeding import Draws
from braid.runtime.torch_internals import accumulate_hooks, version_of

__all__ = ["Pipeline"]

Schedule = Callable[[int, int], Program]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
CALLS = PartOfModel(
    "clip_grad_norm_(max_norm) of the pipeline",
    "braid.parallel.gradients.AgreedGradScaler([pipeline.group], device)",
    has_whole=True,
)


class Pipeline(nn.Module):
    """Engine that trains a list of layers over the ranks of a group.

    Every rank creates the same whole model, and keeps the layers of its stages; delete the model
    afterwards to free all other layers. Parameters keep their names. A parameter that stages share
    is copied to the ranks of these stages, and its gradients are added. Copies and replicas start
    with the values of their first rank.

    Args:
        layers: The model: an `nn.Sequential`, a list of modules, or a graph from
            `braid.parallel.graph.capture` for any other model. Each module takes the output of the
            previous one, any containers of tensors. Or a list of (module, names of inputs, names of
            outputs); see `wired`.
        num_microbatches: Number of micro-batches of a batch; fewer if it has fewer rows.
        schedule: Name of a schedule of `programs.schedule.pipeline`; a file with a program or with
            torch's CSV; or a function of the numbers of ranks and micro-batches that returns a
            program.
        balance: Number of layers of each stage; None for a partition of equal sizes.
        group: Ranks of the pipeline.
        replicas: Ranks with the same stages and other samples, in the order of their samples;
            gradients are added over them. None without replicas.
        recompute: Micro-batches whose layers run again in backward, so that a stage keeps their
            inputs only: `always`, `except_last` or `never`. An integer k checkpoints every k
            layers.
        recompute_policy: Policy of results that are kept and not computed again, or a list of
            operators with kept results, such as matrix products; see
            `braid.comm.autograd.recompute_policy`.
        deferred_batch_norm: Whether running statistics of BatchNorm are updated once per batch
            instead of once per micro-batch; see `DeferredBatchNorm`.
        seed: Seed of the layers' random numbers, such as dropout. They depend on the seed, the
            step, the layer and the sample, but not on stages, micro-batches or ranks.

    Attributes:
        group: Ranks of the pipeline.
        stages: Stages of this rank, by number.
        balance: Number of layers of each stage.
        num_steps: Number of steps so far, which keys random numbers. Set it when a run is resumed.
        other_layers: Layers of the model that other ranks train.
        on_sent: Called with each tensor that this rank sends in a step to another stage, and with
            its place in the order of computation: s for the forward of stage s of n, and
            2 n - 1 - s for its backward. None for no call.

    Raises:
        ConfigError: There are fewer layers than stages, `balance` does not match, or the schedule
            is unknown; the message has all problems.
        MismatchError: Models or arguments differ between ranks; the message has the differences.
        TypeError: A stashed tensor is popped by no later layer, or a popped one was not stashed.
    """

    def __init__(
        self,
        layers: nn.Sequential | Sequence[nn.Module] | Sequence[Wire] | CapturedGraph,
        *,
        num_microbatches: int,
        schedule: str | Schedule = "1f1b",
        balance: Sequence[int] | None = None,
        group: Group,
        replicas: Group | None = None,
        recompute: str | int = "never",
        recompute_policy: RecomputePolicy | None = None,
        deferred_batch_norm: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.group = group
        self.num_steps = 0
        self.on_sent: Callable[[int, torch.Tensor], None] | None = None
        self._seed = seed
        self._make = schedule if callable(schedule) else schedule_named(schedule)
        self._is_own = callable(schedule)  # files have been validated
        self._num_microbatches = num_microbatches
        self._programs: dict[tuple[bool, int], Executor] = {}
        self._homes: dict[int, int] = {}
        problems: list[str] = []
        every, parts = 0, []
        with noting(problems):
            self._recompute, every = _recompute_of(recompute)
        with noting(problems):
            check_recompute_policy(recompute_policy, recompute)
        with noting(problems):
            self._homes = stage_ranks(self._make(group.size, num_microbatches))
        with noting(problems):
            num_stages = max(len(self._homes), 1)
            parts = parts_of(self, layers, num_stages, balance, deferred=deferred_batch_norm)
        raise_all(problems)
        self.balance = tuple(map(len, parts))
        edges = edges_of(parts)
        arguments = {"num_microbatches": num_microbatches, "balance": self.balance}
        arguments |= {"recompute": recompute, "seed": seed, "stages by rank": self._homes}
        table = table_of(layer for part in parts for layer in part)
        table.compare(group, arguments)
        self._tied = TiedParams(parts, self._homes, group)
        self.stages = {
            stage: Stage(stage, part, edges, every=every, policy=recompute_policy)
            for stage, part in enumerate(parts)
            if self._homes[stage] == group.rank
        }
        params = [p for local_stage in self.stages.values() for p in local_stage.parameters()]
        self.device = params[0].device if params else torch.device("cpu")
        self._messages = Messages(group, self.device)
        self._messages.others += [g for g in (replicas, *self._tied.groups) if g is not None]
        self._tied.make_equal()
        if replicas is not None:
            own_layers = (
                layer for local_stage in self.stages.values() for layer in local_stage.layers
            )
            table_of(own_layers).make_equal(replicas, arguments)
        self._replicas = Replicas(self.stages, replicas)
        self._advice = LossWarnings(self.parameters if group.size > 1 else None)
        self._optimizers: dict[int, Optimizer] = {}
        self._shared_optimizer: Optimizer | None = None
        for local_stage in self.stages.values():
            for layer in local_stage.layers:
                register(self, layer)
        homes = [(self._homes[stage],) for stage in range(len(parts))]
        self._shared = SharedBatch(group, homes[0], homes[-1])
        self.other_layers = OtherLayers(parts, homes, group.rank)
        if group.size > 1:
            part = f"pipeline rank {group.rank} of {group.size}"
            note_incomplete(self, Pipeline.parameters, CALLS.refusal, part)
        self._executor(num_microbatches, trains=True)  # raises for unsupported programs

    def step_in_program(self, make: MakeOptimizer) -> list[Optimizer]:
        """Step the optimizer of each stage as soon as the stage's gradients are complete.

        `step` then steps and sets gradients to None. Parameters that stages share are stepped at
        its end.

        Args:
            make: Function of parameters that returns an optimizer for them, such as
                `partial(torch.optim.AdamW, lr=1e-3)`; called for each stage of this rank.

        Returns:
            The optimizers, for learning rate schedules and checkpoints.
        """
        num_stages = Counter(
            p for local_stage in self.stages.values() for p in local_stage.parameters()
        )
        shared = self._tied.params | {p for p, count in num_stages.items() if count > 1}
        for stage, local_stage in self.stages.items():
            if params := [p for p in local_stage.parameters() if p not in shared]:
                self._optimizers[stage] = make(params)
        if rest := [p for p in num_stages if p in shared]:
            self._shared_optimizer = make(rest)
        self._programs.clear()
        others = [] if self._shared_optimizer is None else [self._shared_optimizer]
        return [*self._optimizers.values(), *others]

    def _complete(self, stage: int) -> None:
        """Add the gradients of a stage after its last backward, over layers and over replicas."""
        self._tied.complete(stage)
        self._replicas.launch(stage)

    def _sent(self, action: Action, value: Any) -> None:
        """Call `on_sent` for a value or gradients that this rank sends."""
        if self.on_sent is not None:
            is_forward = action.kind in {"F", "send_f"}
            last = 2 * len(self.balance) - 1
            for tensor in tensors_in(value):
                self.on_sent(action.unit if is_forward else last - action.unit, tensor)

    def _take_step(self, action: Action) -> None:
        """Take the step of a stage's unshared parameters."""
        stage = action.unit
        self._replicas.finish(stage)
        if stage in self._optimizers:
            self._optimizers[stage].step()
            self._optimizers[stage].zero_grad()

    def step(
        self, batch: Any, target: Any, *, loss: Loss, loss_weight: LossWeight | None = None
    ) -> torch.Tensor:
        """Run forwards and backwards of a batch; gradients are added to `.grad`.

        Args:
            batch: Input of the model: containers of tensors that are split along dim 0; the same
                on all ranks. Only the first stage reads it, but other ranks need its length.
            target: Targets of the loss, split in the same way; only the last stage reads them.
            loss: Function (output, target) that returns the mean loss of a micro-batch.
            loss_weight: Function of a micro-batch's targets that returns the number of terms of
                its mean, such as tokens without padding; None for its rows. Where the number is 0,
                the micro-batch adds nothing, and `loss` is not called.

        Returns:
            Mean loss of the batch, on all ranks; without a graph.

        Raises:
            CommError: Another rank has failed; the message has its layer and action.
            ConfigError: The batch has no rows, lengths of batches differ between ranks, or a weight
                is not valid.

        Cost: per stage and micro-batch two messages with the bytes between stages; an all_gather
            and a broadcast of 8 bytes; in some steps, an all_gather of 48 bytes.
        """
        with failing_together(self._messages, "a step"):
            return self._step(batch, target, loss, loss_weight)

    def _step(
        self, batch: Any, target: Any, loss: Loss, loss_weight: LossWeight | None
    ) -> torch.Tensor:
        # gradients of earlier steps have been added over ranks already
        added = self._tied.params | self._replicas.params
        earlier = {p: p.grad for p in added if p.grad is not None}
        for param in earlier:
            param.grad = None
        versions = {p: version_of(p) for p in self._hooked_params()}
        self._replicas.begin()
        try:
            with self._tied.separate_uses(self.stages):
                losses = self._run(batch, target, loss, loss_weight, trains=True)
            self._replicas.finish()
            self._tied.add_up()
        finally:
            for param, grad in earlier.items():
                param.grad = grad if param.grad is None else grad.add_(param.grad)
        if any(version_of(p) != version for p, version in versions.items()):
            msg = (
                "a hook has changed a parameter as soon as its gradient came, which is a part of "
                "the batch's gradient: call optimizer.step() after pipeline.step, or use "
                "step_in_program"
            )
            raise ConfigError(msg)
        commit_batch_norms(self)
        if self._shared_optimizer is not None:
            self._shared_optimizer.step()
            self._shared_optimizer.zero_grad()
        self._advice.end_step()
        self.num_steps += 1
        self.other_layers.are_old = True
        return self._replicas.sum_of(self._sum_of(losses))

    def _hooked_params(self) -> list[nn.Parameter]:
        """Return the parameters that only a hook of the program could change during a step."""
        if self._optimizers or (self._num_microbatches == 1 and not self._replicas.params):
            return []
        hooked = {param for param in self.parameters() if accumulate_hooks(param)}
        for module in self.modules() if hooked else ():
            if getattr(module, "max_norm", None):  # an embedding that changes its rows itself
                hooked.difference_update(module.parameters())
        return list(hooked)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their 2-norm over all stages is at most `max_norm`.

        Parameters that stages share count once.

        Returns:
            The norm before scaling, on all ranks.

        Raises:
            ConfigError: `max_norm` is negative or not a number, or `step_in_program` was called, so
                that gradients no longer exist.

        Cost: an all_reduce of 8 bytes.
        """
        if self._optimizers:
            msg = (
                "step_in_program cannot clip gradients, as it updates parameters before the norm "
                "of all stages is known: clip and step after pipeline.step"
            )
            raise ConfigError(msg)
        grads = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        counted = ((grad, not self.counts_elsewhere(param)) for param, grad in grads)
        return clip_counted_(counted, max_norm, [self.group])

    def counts_elsewhere(self, param: torch.Tensor) -> bool:
        """Return whether another rank counts this parameter, which stages share, in a norm."""
        return self._tied.counts_elsewhere(param)

    @property
    def groups(self) -> list[Group]:
        """Groups in which this rank communicates in a step, without replicas."""
        return [self.group, *self._tied.groups]

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule has separate actions for gradients of inputs and of weights."""
        program = self._make(self.group.size, self._num_microbatches)
        return any(action.kind == "W" for actions in program.ranks for action in actions)

    def shard_layers_over(self, group: Group) -> None:
        """Require the same batches on the ranks of a group, which have shards of the layers."""
        self._shared.layer_group = group

    def fail_with(self, *groups: Group) -> None:
        """Abort other groups of this rank when a step fails, so that no rank waits in them."""
        self._messages.others += [group for group in groups if group.size > 1]

    def average_over(self, group: Group) -> None:
        """Weigh losses for gradients and losses that the caller averages over replicas."""
        self._replicas = Replicas({}, group, averages=True)
        self._messages.others.append(group)

    def evaluate(
        self, batch: Any, target: Any, *, loss: Loss, loss_weight: LossWeight | None = None
    ) -> torch.Tensor:
        """Return the mean loss of a batch, on all ranks, without gradients; see `step`."""
        # memory for messages must be usable by threads that are not in inference mode
        usual = torch.inference_mode(mode=False)
        with failing_together(self._messages, "an evaluation"), usual, torch.no_grad():
            losses = self._run(batch, target, loss, loss_weight, trains=False)
            return self._replicas.sum_of(self._sum_of(losses))

    def predict(self, batch: Any) -> Any:
        """Return the output of a batch on the rank of the last stage, and None on other ranks."""
        usual = torch.inference_mode(mode=False)
        with failing_together(self._messages, "a prediction"), usual, torch.no_grad():
            outputs = self._run(batch, None, None, None, trains=False)
        return gather([outputs[i] for i in sorted(outputs)]) if outputs else None

    def _run(
        self,
        batch: Any,
        target: Any,
        loss: Loss | None,
        loss_weight: LossWeight | None,
        *,
        trains: bool,
    ) -> dict[int, Any]:
        rows = num_rows(batch)
        if not rows:
            msg = "a batch of 0 rows cannot be split into micro-batches: leave it out on all ranks"
            raise ConfigError(msg)
        self._shared.check_rows(rows)
        self._shared.compare(batch, target)
        all_rows = [float(rows)] if loss is None else self._replicas.weights(rows)
        # replicas that gather parameters in each micro-batch need equal numbers of micro-batches
        fewest = round(min(all_rows)) if self._replicas.averages else rows
        sizes = sizes_of(rows, min(fewest, self._num_microbatches))
        first = round(sum(all_rows[: self._replicas.number]))
        ends = list(accumulate(sizes, initial=first))
        draws = [
            Draws(self._seed, self.num_steps, range(begin, end)) for begin, end in pairwise(ends)
        ]
        losses = None
        if loss is not None:
            losses = MicroLosses(
                loss,
                loss_weight,
                target,
                sizes,
                replicas=self._replicas,
                rows=all_rows,
                advice=self._advice if trains else None,
            )
        microbatches = scatter(batch, sizes) if 0 in self.stages else []
        executor = self._executor(len(sizes), trains=trains)
        return executor.run(microbatches, losses, draws.__getitem__ if trains else None)

    def _executor(self, num_microbatches: int, *, trains: bool) -> Executor:
        key = trains, num_microbatches
        executor = self._programs.get(key)
        if executor is None:
            if trains:
                program = self._make(self.group.size, num_microbatches)
            else:
                homes = [self._homes[stage] for stage in range(len(self._homes))]
                program = forward_only(self.group.size, num_microbatches, homes)
            if self._is_own and (violations := validate(program, RULES)):
                msg = (
                    "the schedule is not valid, check it with `braid schedule check`: "
                    f"{'; '.join(map(str, violations[:5]))}"
                )
                raise ConfigError(msg)
            if trains:
                program = with_recompute(program, self._recompute)
            if trains and self._optimizers:
                program = with_steps(program)
            complete = self._complete if trains else None
            executor = Executor(
                program,
                self._messages,
                self.stages,
                complete,
                self._take_step,
                on_sent=self._sent,
            )
            self._programs[key] = executor
        return executor

    def _sum_of(self, losses: dict[int, Any]) -> torch.Tensor:
        """Return the sum of the weighted losses on all ranks, in the order of micro-batches."""
        total = torch.zeros((), dtype=torch.float64)
        for i in sorted(losses):
            total += losses[i].double().cpu()
        self.group.broadcast(total, self._homes[len(self._homes) - 1])
        return total

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise, because a pipeline runs forwards and backwards together."""
        msg = "a Pipeline cannot be called: use pipeline.step(batch, target, loss=...) or evaluate"
        raise ConfigError(msg)

    def extra_repr(self) -> str:
        """Return stages and layers, for `repr`."""
        return f"stages {sorted(self.stages)} of {len(self.balance)}, balance {list(self.balance)}"


def _recompute_of(recompute: str | int) -> tuple[str, int]:
    """Return the mode for whole micro-batches, and the number of layers per checkpoint."""
    if isinstance(recompute, str) and recompute in RECOMPUTE_MODES:
        return recompute, 0
    if isinstance(recompute, int) and not isinstance(recompute, bool) and recompute > 0:
        return "never", recompute
    msg = (
        f"recompute must be one of {', '.join(RECOMPUTE_MODES)}, or a number of layers of at "
        f"least 1, got {recompute!r}"
    )
    raise ConfigError(msg)
