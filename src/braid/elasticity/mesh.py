"""`braid.elastic_mesh`: a training on a mesh that goes on when ranks die or come.

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(...)
        return model, torch.optim.AdamW(model.parameters())

    with braid.elastic_mesh(build, "pp=2,dp=2", shard=1) as training:
        for epoch in training.epochs(3):
            for x, y in training.batches(loader):
                with training.step():
                    training.model.step(x, y, loss=nn.functional.mse_loss)

Each epoch of members has a division of the model of its own, a `HybridParallel`. Replicas along dp
take the micro-batches of a step in turn, as ranks with a whole model do (`training`), so the bits
do not depend on their number. Weights that stages share are added up in another order on another
number of stages, so last bits differ then.

    epoch of members   4 ranks: pp=2,dp=2  ── rank 3 dies ──>  3 ranks: dp=3
    state              parts of 4 ranks     ── whole ──>       parts of 3 ranks

Parts that one rank alone has are copied by a neighbour (`shadow`). All members agree on each step
before they update: then everyone has its gradients, so after a loss all of them either make the
update or repeat the step. Nobody goes back.

Source: D. Narayanan et al., SC 2021, section 3, for the mesh; I. Jang et al., "Oobleck", SOSP 2023,
for going on with another mesh of those that are left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from math import nan, prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from braid.checkpoint import restore_training, to_plain, training_numbers
from braid.comm import Group
from braid.elasticity.evaluation import evaluation_of
from braid.elasticity.gradient_sums import memory_for
from braid.elasticity.learning_rate import RateRule, require_rule
from braid.elasticity.members import JobMembers
from braid.elasticity.parts import (
    LostStateError,
    ModelPart,
    TensorBox,
    WholeState,
    boxes_of,
    whole_state,
)
from braid.elasticity.saving import TrainingCheckpoints, checkpoints_in
from braid.elasticity.shadow import Shadow
from braid.elasticity.state_transfer import (
    Received,
    TrainingState,
    broadcast_values,
    check_same_training,
    compare_others,
)
from braid.elasticity.training import ElasticTraining
from braid.errors import CheckpointError, ConfigError, below, raise_all
from braid.parallel.gradients import FlatBuffer, ParamRecord, ParamTable
from braid.parallel.hybrid import HybridParallel
from braid.programs.layout import Mesh

__all__ = ["MeshReplica", "elastic_mesh", "mesh_for"]

LOG = logging.getLogger(__name__)

AXES = ("pp", "dp", "tp")
WHOLE_PARAMETERS = 3  # stage of sharding at which all ranks gather parameters in each forward

Build = Callable[[], tuple[Any, ...]]


def mesh_for(wanted: Mesh, num_ranks: int) -> Mesh:
    """Return the mesh of so many ranks: stages and divided layers stay, or all are replicas.

    >>> wanted = Mesh.parse("pp=2,dp=2")
    >>> str(mesh_for(wanted, 6)), str(mesh_for(wanted, 3))
    ('pp=2,dp=3', 'dp=3')
    """
    inner = prod(size for axis, size in wanted.axes.items() if axis != "dp")
    if num_ranks % inner:
        return Mesh({"dp": num_ranks})
    return Mesh({**wanted.axes, "dp": num_ranks // inner})


class _Division(NamedTuple):
    """A model that was divided over some members.

    Attributes:
        parts: Parts that this rank has: its own, and a copy.
        names: Names of all parts.
        state: Objects of this rank.
        progress: Plain values beside the state.
    """

    parts: list[ModelPart]
    names: list[str]
    state: TrainingState
    progress: Mapping[str, Any]


class MeshReplica:
    """A part of a model on a mesh; see `Replica`.

    Args:
        build: See `elastic_mesh`.
        mesh: Mesh for a number of ranks.
        layers: See `elastic_mesh`.
        clip: See `elastic_mesh`.
        copies: See `elastic_mesh`.
        options: Arguments of `HybridParallel`.

    Attributes:
        model: The model on the mesh of this epoch.
        optimizer: Its optimizer.
    """

    def __init__(
        self,
        build: Build,
        mesh: Callable[[int], Mesh],
        *,
        layers: Callable[[nn.Module], Sequence[nn.Module]] | None,
        clip: float | None,
        copies: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._build = build
        self._mesh_of = mesh
        self._layers = layers
        self._clip = clip
        self._copies = copies
        self._shard = options.get("shard", 0)
        self._options = {key: value for key, value in options.items() if key != "shard"}
        self._divisions: dict[int, _Division] = {}  # by number
        self._shadow: Shadow | None = None
        self.needs_all = False
        self.records: Sequence[ParamRecord] = ()
        self.memory: list[FlatBuffer] = []
        self.model: HybridParallel
        self.state: TrainingState
        self.group: Group

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer."""
        return self.state.optimizer

    def enter(
        self,
        group: Group,
        num_steps: Sequence[int],
        progress: dict[str, Any],
        checkpoints: TrainingCheckpoints,
    ) -> None:
        """See `Replica`.

        Raises:
            CheckpointError: No member has some part, and there is no checkpoint.
            ConfigError: The members have no mesh, or the model cannot be divided like that.
        """
        mesh = self._mesh_of(group.size)
        state = self._made()
        last = max(self._divisions, default=-1)
        if self._divisions:  # which has gone on since
            self._divisions[last] = self._divisions[last]._replace(progress=dict(progress))
        number = 1 + max(group.objects.all_gather(last))
        if max(num_steps) < 0:
            stored = checkpoints.load(group, state)
            newest = group.objects.broadcast(dict(stored or progress), 0)
            _make_equal(group, state.model)
        else:
            try:
                newest = self._restored(group, progress, state)
            except LostStateError as error:
                stored = checkpoints.load(group, state)
                if stored is None:
                    msg = f"{error}: resume from a checkpoint, or pass checkpoints="
                    raise CheckpointError(msg) from error
                if not group.rank:
                    LOG.warning("%s; the training goes back to step %d", error, stored["num_steps"])
                newest = stored
        parts, names = self._divide(state, mesh, group)
        self._divisions[number] = _Division(parts, names, state, dict(newest))
        progress.update(newest)
        group.barrier()  # after it all members can go on from here
        self._divisions = {number: self._divisions[number]}

    def _restored(
        self, group: Group, progress: Mapping[str, Any], state: TrainingState
    ) -> Mapping[str, Any]:
        """Put the newest state of the members into `state`; returns the values beside it."""
        parts = {number: own.parts for number, own in self._divisions.items()}
        names = {number: own.names for number, own in self._divisions.items()}
        number, root, whole = whole_state(group, parts, names)
        beside = None
        if number in self._divisions:
            old = self._divisions[number]
            compare_others(group, old.state)
        else:
            compare_others(group, None)
        if group.rank == root:
            groups = [
                {key: value for key, value in own.items() if key != "params"}
                for own in old.state.optimizer.param_groups
            ]
            others = {name: other.state_dict() for name, other in old.state.others.items()}
            beside = {"groups": groups, "others": others, "progress": dict(old.progress)}
        values = broadcast_values(group, root, beside)
        check_same_training(group, values["progress"], progress)
        _restore(state, whole, values["groups"])
        for name, other in state.others.items():
            other.load_state_dict(values["others"][name])
        newest: Mapping[str, Any] = values["progress"]
        return newest

    def _made(self) -> TrainingState:
        model, optimizer, *others = self._build()
        return TrainingState(model, optimizer, others[0] if others else {})

    def _divide(
        self, state: TrainingState, mesh: Mesh, group: Group
    ) -> tuple[list[ModelPart], list[str]]:
        """Divide the model, and copy the part of a neighbour; a collective.

        Returns:
            The parts of this rank, and the names of all.
        """
        num_replicas = mesh.axes.get("dp", 1)
        shard = self._shard if num_replicas > 1 else 0
        self.model = HybridParallel(
            state.model,
            mesh,
            group,
            layers=None if self._layers is None else self._layers(state.model),
            shard=shard,
            averages=False,
            **self._options,
        )
        if self.model.sharding is not None:
            self.model.sharding.shares_late = True
        self.model.attach(state.optimizer)
        self.state = state
        self.group = self.model.groups["dp"]
        self.records = self.model.whole_records()
        self.memory = memory_for(self.records)
        self.needs_all = shard == WHOLE_PARAMETERS
        params = self.model.named_pieces()
        trained = set(params.values())
        for param in [p for p in state.optimizer.state if p not in trained]:
            del state.optimizer.state[param]  # of other stages
        snapshot, _ = self.model.checkpoint(None)
        boxes = boxes_of(snapshot.pieces(), params)
        place = dict(self.model.place)
        if not shard:  # replicas have the same
            place.pop("dp", None)
            plain = {n: [list(box) for box in own] for n, own in boxes.items()}
            plain = self.group.objects.broadcast(plain, 0)
            boxes = {n: list(map(TensorBox.parse, own)) for n, own in plain.items()}
        name = ",".join(f"{axis}={at}" for axis, at in place.items()) or "the model"
        here = set(self.model.pipeline.buffers())
        kept = [n for n, buffer in state.model.named_buffers() if buffer in here]

        def buffers() -> dict[str, torch.Tensor]:
            return {n: b for n, b in state.model.named_buffers() if n in kept}

        part = ModelPart(name, params, boxes, state.optimizer, buffers)
        is_alone = bool(shard) or num_replicas == 1
        parts = [part]
        self._shadow = None
        if is_alone and self._copies and group.size > 1:
            self._shadow = Shadow(group, part)
            parts.append(self._shadow.part)
        names = group.objects.all_gather(name)
        self._world, self._num_agreed = group, 0
        return parts, list(dict.fromkeys(names))

    def begin(self, number: int) -> None:
        """See `Replica`."""
        self.model.pipeline.num_steps = number  # on which random numbers depend
        if self._shadow is not None:
            self._shadow.check()
        if self.model.sharding is not None:
            self.model.sharding.begin_step()  # ranks get what others have updated
        if self._shadow is not None:
            self._shadow.note()

    def prepare(self) -> float:
        """See `Replica`: cut and clip gradients, and send them to the neighbour."""
        norm = nan
        if self.model.sharding is not None:
            self.model.sharding.keep_own_gradients()
        if self._clip is not None:
            norm = self.model.clip_grad_norm_(self._clip).item()
        if self._shadow is not None:
            self._shadow.ship()
        return norm

    def agree(self, *, flag: bool) -> bool:
        """See `Replica`."""
        self._num_agreed += 1
        if self._num_agreed == 2 and self.state.others:
            compare_others(self._world, self.state)
        return bool(self._world.all_reduce(torch.tensor([int(flag)]), op="max").item())

    def updated(self) -> None:
        """See `Replica`."""
        self.model.zero_grad()
        if self._shadow is not None:
            self._shadow.check_update()


def _make_equal(group: Group, model: nn.Module) -> None:
    """Give all members the weights and buffers of the first one; a collective."""
    ParamTable.of(model).make_equal(group)
    for buffer in model.buffers():
        group.broadcast(buffer.detach(), 0)


def _restore(state: TrainingState, whole: WholeState, groups: Sequence[Mapping[str, Any]]) -> None:
    """Load a whole state into a model and an optimizer."""
    numbers = training_numbers(state.model, state.optimizer)
    kept = numbers["optimizer"]
    tensors = {n: t for n, t in whole.tensors.items() if not n.startswith("buffer/")}
    plain = [
        {key: to_plain(value, f"options/{number}/{key}", tensors) for key, value in group.items()}
        for number, group in enumerate(groups)
    ]
    merged = [{**mine, **theirs} for mine, theirs in zip(kept["groups"], plain, strict=True)]
    numbers["optimizer"] = {**kept, "groups": merged, "numbers": whole.numbers}
    persistent = state.model.state_dict(keep_vars=True)
    for name, buffer in state.model.named_buffers():
        value = whole.tensors[f"buffer/{name}"]
        if name in persistent:
            tensors[f"model/{name}"] = value
        buffer.data.copy_(value)
    restore_training(Received("the members", tensors, numbers), state.model, state.optimizer)


def elastic_mesh(
    build: Build,
    mesh: str | Callable[[int], str],
    *,
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    shards: int | None = None,
    seed: int = 0,
    clip: float | None = None,
    update: Callable[[], object] | None = None,
    batch_per_rank: RateRule | None = None,
    copies: bool = True,
    checkpoints: str = "",
    checkpoint_every: int = 0,
    evaluate: Callable[[], object] | None = None,
    evaluate_every: int = 0,
    **options: Any,
) -> ElasticTraining:
    """Return a training on a mesh that goes on when ranks die or come; see the module.

    Args:
        build: Returns the whole model and its optimizer, alike on all ranks, and, if there are
            further objects with a state, these by name as a third value. Called in each epoch of
            members.
        mesh: Numbers of ranks along pp, dp and tp, such as `pp=2,dp=2`. With other numbers of ranks
            dp changes, or all ranks are replicas where that is not possible. Or a function that
            returns the mesh of a number of ranks, such as the best one of `braid plan`.
        layers: Returns the model as modules in a row; None for an `nn.Sequential`.
        shards: Number of micro-batches of a step; the number of ranks at first when None. Replicas
            take them in turn, and each is a batch of the pipeline.
        seed: Number that chooses the order of samples, and random numbers.
        clip: Norm of all gradients to which they are clipped; None for no limit.
        update: Called instead of `training.optimizer.step()`; it does not communicate.
        batch_per_rank: See `elastic`; of a replica on a mesh.
        copies: Whether neighbours keep copies of parts that one rank alone has. If such a rank is
            lost without a copy, all go back to the last checkpoint, or the run ends.
        checkpoints: See `elastic`.
        checkpoint_every: See `elastic`.
        evaluate: See `elastic`; it may call `training.model.evaluate`.
        evaluate_every: See `elastic`.
        options: Further arguments of `HybridParallel`, such as `num_microbatches`, `schedule` and
            `shard`: with `shard`, replicas own parts of optimizer states (1), gradients (2) and
            parameters (3).

    Raises:
        ConfigError: An argument makes no sense.
        StaleError: `braid.init()` has not been called.

    Cost of a step: that of the mesh, with one all-reduce of whole gradients over replicas for each
    round of micro-batches, one of 8 bytes, and the neighbour's copy (see `shadow`).
    """
    problems = below(1, shards=shards) if shards is not None else []
    if clip is not None and not clip > 0:
        problems.append(f"clip must be above 0, got {clip}")
    shard = options.get("shard", 0)
    if shard not in {0, 1, 2, 3}:
        problems.append(f"shard must be 0, 1, 2 or 3, got {shard!r}")
    raise_all(problems)
    require_rule(batch_per_rank, shards)

    def mesh_of(num_ranks: int) -> Mesh:
        wanted = Mesh.parse(mesh if isinstance(mesh, str) else mesh(num_ranks))
        if others := [axis for axis in wanted.axes if axis not in AXES]:
            msg = f"an elastic mesh has {', '.join(AXES)}, got {', '.join(others)} in {wanted}"
            raise ConfigError(msg)
        return mesh_for(wanted, num_ranks) if isinstance(mesh, str) else wanted

    if isinstance(mesh, str):
        mesh_of(Mesh.parse(mesh).size)
    replica = MeshReplica(
        build, mesh_of, layers=layers, clip=clip, copies=copies, options={"seed": seed, **options}
    )
    evaluation = evaluation_of(evaluate, evaluate_every)
    saved = checkpoints_in(checkpoints, checkpoint_every)
    return ElasticTraining(
        JobMembers(),
        replica,
        num_shards=shards,
        seed=seed,
        update=update,
        batch_per_rank=batch_per_rank,
        checkpoints=saved,
        evaluation=evaluation,
    )
