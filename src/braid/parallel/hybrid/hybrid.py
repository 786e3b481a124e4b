"""`HybridParallel`: pipeline stages, replicas, sharded sequences and sharded layers on one mesh.

    hybrid = HybridParallel(model, "pp=2,dp=2,tp=2", group, num_microbatches=8)
    hybrid.attach(optimizer)             # created with the whole model's parameters
    loss = hybrid.step(batch, target, loss=nn.functional.cross_entropy)
    hybrid.clip_grad_norm_(1.0)
    optimizer.step()

    pp    stages of layers        Pipeline over the ranks that differ along pp only
    tp    shards of layers        parallelize, before stages are made
    dp    samples                 replicas of the pipeline; gradients are averaged over them
    cp    positions               replicas as well; attention covers the positions of all ranks
    ep    experts                 replicas of all other layers, with different samples

With `shard`, replicas own shards of optimizer states, gradients and parameters; see
`sharded_stages`.

A mesh of one stage is a pipeline of one stage; its micro-batches accumulate gradients. So there is
one code path for every number of ranks along each axis.

Source: D. Narayanan et al., Efficient large-scale language model training on GPU clusters using
Megatron-LM, SC 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import ReplicatedSnapshot, Snapshot, training_numbers, training_tensors
from braid.checkpoint.agreed_buffers import agreed_buffers
from braid.checkpoint.snapshot import OWN, JoinedSnapshot, param_of
from braid.checkpoint.training_state import kept_buffers, merged_numbers
from braid.comm import Group
from braid.errors import ConfigError, raise_all
from braid.parallel.context_parallel import BatchSplitter, context_parallel
from braid.parallel.expert_parallel import (
    average_gradients,
    divide_experts,
    is_of_experts,
    undivide_experts,
)
from braid.parallel.gradients import ParamRecord, ParamTable
from braid.parallel.gradients.exact_norm import clip_counted_
from braid.parallel.gradients.hashing import compare_optimizers
from braid.parallel.gradients.step_settings import StepSettings
from braid.parallel.graph import CapturedGraph
from braid.parallel.hybrid.sharded_stages import ShardedStages
from braid.parallel.hybrid.snapshot import HybridSnapshot
from braid.parallel.hybrid.torch_functions import guard, release
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.micro_losses import Loss, LossWeight
from braid.parallel.sharding import Sharding
from braid.parallel.tensor_parallel import divide_states, parallelize, slicing_of, undivide
from braid.programs.layout import Mesh

__all__ = ["AXES", "HybridParallel"]

AXES = {
    "pp": "stages of a pipeline",
    "dp": "replicas",
    "cp": "sharded sequences",
    "ep": "sharded experts",
    "tp": "sharded layers",
}


class HybridParallel:
    """Engine that trains a model on a mesh.

    Every rank creates the same whole model. Its layers are sharded in place, and each rank trains
    the parameters of its stages. Create the optimizer with the whole model's parameters. An
    optimizer with only `parameters()` can train, but `checkpoint` cannot save it if there are
    several stages.

    Args:
        model: The model.
        mesh: Numbers of ranks along pp, dp, cp, ep and tp, such as `pp=2,dp=2,tp=2`, in any
            order; the last axis varies fastest.
        group: Ranks of the mesh.
        layers: The model as a list of modules with the same parameters, or as `braid.capture` has
            captured it; None for the model itself, an `nn.Sequential`.
        num_microbatches: See `Pipeline`.
        plan: See `parallelize`; None for a model of a known family.
        shard: State to shard over replicas: 1 for optimizer states, 2 for gradients too, 3 for
            parameters too; 0 for none. The optimizer then needs `attach`.
        averages: Whether `step` averages gradients and losses over replicas. If False,
            `whole_records()` returns this replica's own gradients, and the caller averages them.
        options: Other arguments of `Pipeline`, such as schedule, balance, recompute and seed.

    With cp, inputs and targets are sharded along dim 1, and the first layer is called with (inputs,
    position ids).

    With ep, layers of experts are sharded by `divide_experts`; a loss may add `auxiliary_loss` of
    the layers of the last stage.

    Attributes:
        model: The model, partly on this rank.
        mesh: The mesh.
        place: Index of this rank along each axis, by axis name.
        groups: Ranks along each axis, by axis name; axes with the same ranks share a group.
        samples: Ranks with different samples, in order: those along the axes dp and ep.
        pipeline: Stages of this rank.

    Raises:
        ConfigError: The mesh has other axes or another number of ranks, or layers or heads cannot
            be divided; the message has all problems.
        MismatchError: Models or arguments differ between ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: str | Mesh,
        group: Group,
        *,
        layers: Sequence[nn.Module] | CapturedGraph | None = None,
        num_microbatches: int = 1,
        plan: Mapping[str, str] | None = None,
        shard: int = 0,
        averages: bool = True,
        **options: Any,
    ) -> None:
        self._averages = averages
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        _check(self.mesh, group, model, layers)
        self.place = self.mesh.coordinates(group.rank)
        self.model = model
        self._group = group
        self._groups_by_peers: dict[tuple[int, ...], Group] = {}
        self.groups = {axis: self._along((axis,)) for axis in AXES}
        self.samples = self._along(("dp", "ep"))
        self._replicas = self._along(("dp", "cp", "ep"))
        self._tensor, self._sequence = self.groups["tp"], self.groups["cp"]
        self._experts, self._alike = self.groups["ep"], self._along(("dp", "cp"))
        self._shapes: dict[torch.Tensor, torch.Size] = {p: p.shape for p in model.parameters()}
        if self._tensor.size > 1:
            parallelize(model, self._tensor, plan)
        if self._experts.size > 1:
            divide_experts(model, self._experts)
        if isinstance(layers, CapturedGraph):
            rows = list(layers.modules.values())
        else:
            rows = list(layers if layers is not None else model.children())
        in_parts = rows if self._sequence.size > 1 else []
        self._divided = [context_parallel(row, self._sequence, inputs={}) for row in in_parts]
        whole = model if isinstance(model, nn.Sequential) and layers is None else rows
        has_replicas = averages and self._replicas.size > 1
        # whether the pipeline adds gradients and losses over replicas
        self._adds_in_pipeline = has_replicas and not shard and self._experts.size == 1
        self.pipeline = Pipeline(
            layers if isinstance(layers, CapturedGraph) else whole,
            num_microbatches=num_microbatches,
            group=self.groups["pp"],
            replicas=self._replicas if self._adds_in_pipeline else None,
            **options,
        )
        if has_replicas and not self._adds_in_pipeline:
            self.pipeline.average_over(self._replicas)
        self._sharded: ShardedStages | None = None
        if shard and self.pipeline.splits_backward:
            msg = (
                f"shard={shard} does not support schedules that split backward into input and "
                "weight gradients: use 1f1b, gpipe or interleaved"
            )
            raise ConfigError(msg)
        if shard:
            self._sharded = ShardedStages(
                model,
                rows,
                self.pipeline.parameters(),
                group=self._replicas,
                alike=self._alike,
                layer_group=self._tensor,
                mesh_group=group,
                stage=shard,
            )
        self.pipeline.shard_layers_over(self._tensor)
        self.pipeline.fail_with(self._tensor, self._sequence)
        self._splitter = BatchSplitter(self._sequence)
        self._params = dict(model.named_parameters())
        self._settings = StepSettings(self.named_pieces().values())
        self._owners = self._owners_of()
        guard(self)

    def named_pieces(self) -> dict[str, nn.Parameter]:
        """Return the tensors that an attached optimizer updates on this rank, by parameter name."""
        if self._sharded is not None:
            return dict(self._sharded.named_pieces())
        trained = set(self.pipeline.parameters())
        return {name: param for name, param in self.model.named_parameters() if param in trained}

    def whole_records(self) -> list[ParamRecord]:
        """Return this rank's unsharded parameters; their `.grad` is this replica's gradient."""
        if self._sharded is not None:
            return self._sharded.whole_records()
        return list(ParamTable.named(self.named_pieces().items()))

    @property
    def spent_ns(self) -> int:
        """Nanoseconds that this rank has spent in communication, including waits."""
        groups = {self._group, *self._groups_by_peers.values(), *self.pipeline.groups}
        return sum(group.statistics()["spent_ns"] for group in groups)

    @property
    def sharding(self) -> Sharding | None:
        """Engine that shards the state of replicas; None without `shard`."""
        return None if self._sharded is None else self._sharded.sharding

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank trains."""
        return list(self.pipeline.parameters())

    def attach(self, optimizer: Optimizer) -> None:
        """Give an optimizer of the whole model this rank's shards and states; a collective.

        Raises:
            MismatchError: The optimizer has different settings or states on the ranks.
        """
        compare_optimizers(self._group, optimizer, self._shapes)
        divide_states(optimizer, self._shapes, self._tensor)
        for param, state in optimizer.state.items() if self._experts.size > 1 else ():
            for name, value in state.items():
                if is_of_experts(param) and getattr(value, "shape", None) == self._shapes[param]:
                    state[name] = value.chunk(self._experts.size)[self._experts.rank].clone()
        if self._sharded is not None:
            self._sharded.attach(optimizer)

    def _grads(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, bool]]:
        """Yield parameters with their gradients, and whether replicas have the same gradient."""
        if self._sharded is not None:
            yield from self._sharded.grads()
            return
        for param in self.pipeline.parameters():
            if param.grad is not None:
                yield param, param.grad, True

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise, because a mesh runs forwards and backwards together."""
        msg = "a model on a mesh cannot be called: use step(batch, target, loss=...) or evaluate"
        raise ConfigError(msg)

    def step(
        self, batch: Any, target: Any, *, loss: Loss, loss_weight: LossWeight | None = None
    ) -> torch.Tensor:
        """Run forwards and backwards of a batch; see `Pipeline.step`.

        Args:
            batch: Inputs of this rank's replica; the same on all ranks of the replica.
            target: Targets of the loss.
            loss: Function (output, target) that returns the mean loss of a micro-batch.
            loss_weight: Function of a micro-batch's targets that returns the number of terms of
                its mean; None for its rows. Replicas are weighed by their terms.

        Returns:
            Mean loss over all replicas, on all ranks.
        """
        self._check_weight(loss_weight)
        inputs, targets = self._splitter.split(batch, target)
        if self._sharded is not None:
            self._sharded.sharding.begin_step()
            with self._sharded.sharding.no_sync():
                mean_loss = self.pipeline.step(inputs, targets, loss=loss, loss_weight=loss_weight)
            if self._averages:
                self._sharded.average()
        else:
            mean_loss = self.pipeline.step(inputs, targets, loss=loss, loss_weight=loss_weight)
            if self._experts.size > 1:
                average_gradients(self.pipeline, self._experts, self._alike)
        if self._averages:
            replicas = [self._replicas] if self._sharded is None else []  # else `sharding` does
            self._settings.averaged([*replicas, self._tensor])
        is_averaged = self._adds_in_pipeline or not self._averages
        return mean_loss if is_averaged else self._replicas.all_reduce(mean_loss, op="avg")

    def evaluate(
        self, batch: Any, target: Any, *, loss: Loss, loss_weight: LossWeight | None = None
    ) -> torch.Tensor:
        """Return the mean loss of a batch, on all ranks, without gradients; see `step`."""
        self._check_weight(loss_weight)
        if self._sharded is not None:
            self._sharded.sharding.begin_step()
        parts = self._splitter.split(batch, target)
        mean_loss = self.pipeline.evaluate(*parts, loss=loss, loss_weight=loss_weight)
        is_averaged = self._adds_in_pipeline
        return mean_loss if is_averaged else self._replicas.all_reduce(mean_loss, op="avg")

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, *, copies: Iterable[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Scale all gradients so that their 2-norm over the whole mesh is at most `max_norm`.

        Each element counts once: parameters that stages share, parameters that are replicated on
        all ranks of tp, and parameters of replicas.

        Args:
            max_norm: Largest norm.
            copies: Gradients of other ranks' pieces: scaled, but not added to the norm.

        Returns:
            The norm before scaling, on all ranks.

        Raises:
            ConfigError: `max_norm` is negative or not a number.

        Cost: two all_reduces of at most 24 bytes for each of three groups.
        """
        counted = [
            (grad, self._counts(param, is_copied=is_copied))
            for param, grad, is_copied in self._grads()
        ]
        counted += [(grad, False) for grad in copies]
        return clip_counted_(counted, max_norm, [self._tensor, self.groups["pp"], self._replicas])

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self._sharded is not None:
            self._sharded.sharding.zero_grad()
        for param in self.pipeline.parameters():
            param.grad = None

    def checkpoint(
        self, optimizer: Optimizer | None, others: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[Snapshot, dict[str, Any]]:
        """Return this rank's tensors of a checkpoint, and other values; a collective.

        Over all ranks, each element of the model and of the optimizer's states is written once.

        Args:
            optimizer: Optimizer of the whole model; None to leave it out.
            others: Further tensors by name; the names of tensors that only this rank has begin with
                `own/`.

        Raises:
            ConfigError: The optimizer lacks parameters that other stages train.
        """
        further = dict(others or {})
        buffers = agreed_buffers(self.model, [self._replicas])
        if self._sharded is not None:
            tensors = self._sharded.kept_tensors(optimizer)
            numbers = self._sharded.numbers(optimizer)
        else:
            tensors = training_tensors(self.model, optimizer)
            numbers = training_numbers(self.model, optimizer)
        tensors |= {f"model/{name}": buffer for name, buffer in buffers.items()}
        rank_tensors = {name: x for name, x in further.items() if name.startswith(OWN)}
        shared = {name: x for name, x in further.items() if name not in rank_tensors}
        of_layers = HybridSnapshot(
            tensors | shared,
            self._params,
            self._owners,
            self._tensor,
            stage=self.place.get("pp", 0),
            writes=not self._alike.rank,
            experts=self._experts,
        )
        of_rank = ReplicatedSnapshot(rank_tensors, rank=self._group.rank, size=self._group.size)
        snapshots: list[Snapshot] = [of_rank, of_layers]
        if self._sharded is not None:
            snapshots.append(self._sharded.snapshot(optimizer))
        return JoinedSnapshot(snapshots), merged_numbers(numbers, self.groups["pp"])

    def whole_shape(self, name: str, part: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a checkpoint's whole tensor `name`; this rank's has shape `part`.

        See `braid.checkpoint.Parts`.
        """
        param = self._params.get(param_of(name))
        if param is None or tuple(param.shape) != tuple(part):
            return part
        if is_of_experts(param):
            return (part[0] * self._experts.size, *part[1:])
        slicing = slicing_of(param)
        return part if slicing is None else slicing.whole_shape(param, self._tensor.size)

    def part_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `whole`, the tensor `name` of a checkpoint.

        See `braid.checkpoint.Parts`.
        """
        param = self._params.get(param_of(name))
        if param is None:
            return whole
        if is_of_experts(param) and tuple(whole.shape) == self.whole_shape(name, param.shape):
            return whole.chunk(self._experts.size)[self._experts.rank]
        slicing, size = slicing_of(param), self._tensor.size
        if slicing is None or tuple(whole.shape) != slicing.whole_shape(param, size):
            return whole
        return slicing.part_of(whole, self._tensor.rank, size)

    def make_whole(self) -> None:
        """Restore the whole trained model on all ranks; a collective.

        The engine cannot be used afterwards: make another `HybridParallel` to train on.
        """
        if self._sharded is not None:
            self._sharded.sharding.undo()
        for divided in self._divided:
            divided.remove()
        if self._experts.size > 1:
            undivide_experts(self.model, self._experts)
        if self._tensor.size > 1:
            undivide(self.model, self._tensor)
        release(self)
        if self.groups["pp"].size > 1:
            for name, tensor in self._named().items():
                self.groups["pp"].broadcast(tensor.detach(), self._owners[name])

    def close(self) -> None:
        """Free the groups along the axes and stop sharding; not a collective.

        Call it after the last step; further calls do nothing. Sharded layers cannot compute
        afterwards: call `make_whole` first to keep the model. An engine that is garbage-collected
        with its model needs no `close`: this rank frees the groups when it makes its next group.
        """
        if self._sharded is not None:
            self._sharded.sharding.close()
        for group in self._groups_by_peers.values():
            group.close()

    def _check_weight(self, loss_weight: LossWeight | None) -> None:
        if loss_weight is not None and not self._averages:
            msg = (
                "loss_weight= cannot be used in an elastic training, where micro-batches are "
                "weighed by their rows: leave it out, and use rows with equally many targets that "
                "count"
            )
            raise ConfigError(msg)

    def _counts(self, param: torch.Tensor, *, is_copied: bool) -> bool:
        """Return whether this rank counts a gradient in a norm, among ranks with the same gradient.

        Args:
            param: Parameter of the gradient.
            is_copied: Whether replicas have the same gradient.
        """
        copies = self._alike if is_of_experts(param) else self._replicas
        if is_copied and copies.rank:
            return False
        is_part = slicing_of(param) is not None
        return (is_part or not self._tensor.rank) and not self.pipeline.counts_elsewhere(param)

    def _along(self, axes: tuple[str, ...]) -> Group:
        """Return the group of ranks that differ from this rank along these axes only.

        Sets of axes that differ only in axes of size 1 return the same group.
        """
        here = [axis for axis in self.mesh.axes if axis in axes]
        peers = tuple(self.mesh.peers(here, self._group.rank))
        if peers not in self._groups_by_peers:
            group = self._group.split(peers[0])
            assert group is not None, "every rank is in a group of its peers"
            self._groups_by_peers[peers] = group
        return self._groups_by_peers[peers]

    def _owners_of(self) -> dict[str, int]:
        """Return by name of each tensor the first pipeline rank with a stage that holds it."""
        mine = {*self.pipeline.parameters(), *self.pipeline.buffers()}
        named = self._named()
        is_mine = torch.tensor([int(tensor in mine) for tensor in named.values()])
        holders = self.groups["pp"].all_gather(is_mine).view(self.groups["pp"].size, -1)
        return dict(zip(named, holders.argmax(0).tolist(), strict=True))

    def _named(self) -> dict[str, torch.Tensor]:
        """Return parameters and persistent buffers of the model by name."""
        return {**dict(self.model.named_parameters()), **kept_buffers(self.model)}


def _check(
    mesh: Mesh,
    group: Group,
    model: nn.Module,
    layers: Sequence[nn.Module] | CapturedGraph | None,
) -> None:
    problems = []
    if others := [axis for axis in mesh.axes if axis not in AXES]:
        known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
        problems.append(f"the mesh {mesh} has {', '.join(others)}: its axes may be {known}")
    refused = ("cp", "ep") if isinstance(layers, CapturedGraph) else ()
    problems += [
        f"a captured model does not support {AXES[axis]}: leave the axis {axis} out of the mesh, "
        "or pass a list of the model's layers as layers="
        for axis in refused
        if dict(mesh.axes).get(axis, 1) > 1
    ]
    if mesh.size != group.size:
        problems.append(f"the mesh {mesh} has {mesh.size} ranks, but the group has {group.size}")
    if layers is None and not isinstance(model, nn.Sequential):
        problems.append(
            f"{type(model).__name__} is not an nn.Sequential: pass a list of its layers as layers="
        )
    raise_all(problems)
