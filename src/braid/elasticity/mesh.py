"""The model of `braid.elastic_mesh`: a part on a mesh, another one when ranks die or come.

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(...)
        return model, torch.optim.AdamW(model.parameters())

    with braid.elastic_mesh(build, "pp=2,dp=2", shard=1) as training:
        for epoch in training.epochs(3):
            for x, y in training.batches(loader):
                with training.step():
                    training.model.step(x, y, loss=nn.functional.mse_loss)

Each epoch of members has another division of the model, a `HybridParallel`. Replicas along dp
take the micro-batches of a step in turn, as ranks with a whole model do (`training`), so the bits
do not depend on their number. Weights that stages share are added up in another order on another
number of stages, so last bits differ then.

    epoch of members   4 ranks: pp=2,dp=2  ── rank 3 dies ──>  3 ranks: dp=3
    state              parts of 4 ranks     ── boxes ──>       parts of 3 ranks

A neighbour copies parts that only one rank, or only one of several hosts, has (`shadow`). All
members agree on each step before they update: then everyone has its gradients, so after a loss all
of them either make the update or repeat the step. Nobody goes back.

Source: D. Narayanan et al., SC 2021, section 3, for the mesh; I. Jang et al., "Oobleck", SOSP 2023,
for going on with another mesh of those that are left.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from braid.comm import Group
from braid.elasticity.gradient_sums import memory_for
from braid.elasticity.parts import ModelPart, TensorBox, boxes_of
from braid.elasticity.redistribution import LostStateError, NewestState, fill, newest_state
from braid.elasticity.saving import TrainingCheckpoints
from braid.elasticity.shadow import Shadow, crosses_hosts, is_on_one_host
from braid.elasticity.state_transfer import (
    TrainingState,
    broadcast_values,
    check_same_training,
    compare_others,
    refuse_extra_states,
)
from braid.elasticity.weight_digest import WeightBox, weight_digest
from braid.errors import CheckpointError, ConfigError
from braid.parallel.gradients import FlatBuffer, ParamRecord, ParamTable
from braid.parallel.hybrid import HybridParallel
from braid.programs.layout import Mesh
from braid.runtime.tensor_buffers import checksum

__all__ = ["Build", "MeshReplica"]

LOG = logging.getLogger(__name__)

MOST_STAGES = 1 << 16
RANDOM = {torch.Tensor.uniform_, torch.Tensor.normal_}
WHOLE_PARAMETERS = 3  # stage of sharding at which all ranks gather parameters in each forward

Build = Callable[[], tuple[Any, ...]]


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
        mesh: Function that returns the mesh for a number of ranks.
        layers: See `elastic_mesh`.
        clip: See `elastic_mesh`.
        copies: See `elastic_mesh`.
        options: Arguments of `HybridParallel`.

    Attributes:
        model: The model on the mesh of this epoch.
        optimizer: Optimizer of the model.
        has_times: Whether the model is on the CPU; see `Replica`.
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
        # torch imports its compiler with the first optimizer: before other ranks wait for this one
        self._first: TrainingState | None = self._made()
        self.has_times = all(p.is_cpu for p in self._first.model.parameters())

    @property
    def spent_ns(self) -> int:
        """Nanoseconds spent in communication; see `Replica`."""
        return self.model.spent_ns

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of the model on the current mesh."""
        return self.state.optimizer

    def enter(
        self,
        group: Group,
        num_steps: Sequence[int],
        progress: dict[str, Any],
        checkpoints: TrainingCheckpoints,
    ) -> None:
        """Continue with these members from the newest state; see `Replica.enter`.

        Raises:
            CheckpointError: A part of the state is lost, and no checkpoint exists.
            ConfigError: No mesh fits the members, or the model cannot be divided by the mesh.
        """
        mesh = self._mesh_of(group.size)
        is_first = max(num_steps) < 0
        with contextlib.nullcontext() if is_first else _NoInitialValues():
            state = self._first or self._made()
        self._first = None
        check_same_training(group, num_steps, state, progress)
        if not is_first:
            for param in state.model.parameters():
                param.detach().zero_()  # alike on all ranks until `_restore`
        last = max(self._divisions, default=-1)
        if self._divisions:  # which has gone on since
            self._divisions[last] = self._divisions[last]._replace(progress=dict(progress))
        number = 1 + max(group.objects.all_gather(last))
        held = None
        if is_first:
            stored = checkpoints.load(group, state)
            newest = group.objects.broadcast(dict(stored or progress), 0)
            ParamTable.of(state.model).make_equal(group)
            for buffer in state.model.buffers():
                group.broadcast(buffer.detach(), 0)
        else:
            try:
                parts = {number: division.parts for number, division in self._divisions.items()}
                names = {number: division.names for number, division in self._divisions.items()}
                held = newest_state(group, parts, names)
            except LostStateError as error:
                reason = str(error) if self._copies else f"{error}, and ranks keep no copies"
                stored = checkpoints.load(group, state)
                if stored is None:
                    advice = "save one earlier" if checkpoints else "pass checkpoints="
                    advice += "" if self._copies else ", or keep copies"
                    msg = f"{reason}; there is no checkpoint to go back to: {advice}"
                    raise CheckpointError(msg) from error
                step, newest = max(num_steps), stored
                if not group.rank and step > stored["num_steps"]:
                    steps = f"from step {step} to {stored['num_steps']}"
                    LOG.warning("%s: the training goes back %s, its last checkpoint", reason, steps)
        part, all_names = self._divide(state, mesh, group)
        if held is not None:
            newest = self._restore(group, held, part)
        copies = self._copy_part(part)
        self._divisions[number] = _Division([part, *copies], all_names, state, dict(newest))
        progress.update(newest)
        group.barrier()  # after it all members can go on from here
        self._divisions = {number: self._divisions[number]}

    @property
    def part_names(self) -> list[str]:
        """Names of the parts of the state on this member; none if no member keeps copies."""
        parts = self._divisions[max(self._divisions)].parts if self._copies else []
        return [part.name for part in parts]

    def _restore(self, group: Group, held: NewestState, part: ModelPart) -> Mapping[str, Any]:
        """Put the newest state of the members into a new part; returns the values beside it."""
        old, beside = self._divisions.get(held.division), None
        compare_others(group, None if old is None else old.state)
        if old is not None and group.rank == held.root:
            groups = [
                {key: value for key, value in options.items() if key != "params"}
                for options in old.state.optimizer.param_groups
            ]
            others = {name: other.state_dict() for name, other in old.state.others.items()}
            beside = {"groups": groups, "others": others, "progress": dict(old.progress)}
        values = broadcast_values(group, held.root, beside)
        fill(group, held, [] if old is None else old.parts, part)
        if self.model.sharding is not None:  # so that all ranks get the new values
            self.model.sharding.share_step()
            self.model.sharding.share()
        state = self.state
        for options, others in zip(state.optimizer.param_groups, values["groups"], strict=True):
            options.update(others)
        for name, other in state.others.items():
            other.load_state_dict(values["others"][name])
        newest: Mapping[str, Any] = values["progress"]
        return newest

    def _made(self) -> TrainingState:
        model, optimizer, *others = self._build()
        refuse_extra_states(model)
        strangers = {p for group in optimizer.param_groups for p in group["params"]}
        strangers -= set(model.parameters())
        if strangers:
            msg = (
                f"the optimizer that build() returns has {len(strangers)} parameters that are not "
                "the model's: make it from model.parameters()"
            )
            raise ConfigError(msg)
        modes = {}  # train() or eval(), as the program has called them
        if self._divisions:
            modes = {name: old.training for name, old in self.state.model.named_modules()}
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        return TrainingState(model, optimizer, others[0] if others else {})

    def _divide(
        self, state: TrainingState, mesh: Mesh, group: Group
    ) -> tuple[ModelPart, list[str]]:
        """Divide the model; a collective.

        Returns:
            The part of this rank, and the names of all.
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
        before, self.records = self.records, self.model.whole_records()
        kinds = [[(r.names, r.spec) for r in records] for records in (before, self.records)]
        if kinds[0] != kinds[1]:
            self.memory = memory_for(self.records)
        self.needs_all = shard == WHOLE_PARAMETERS
        params = self.model.named_pieces()
        trained = set(params.values())
        for param in [p for p in state.optimizer.state if p not in trained]:
            del state.optimizer.state[param]  # of other stages
        snapshot, _ = self.model.checkpoint(None)
        boxes = boxes_of(snapshot.pieces(), params)
        self._saved = [WeightBox(n, box, params[n]) for n, of_n in boxes.items() for box in of_n]
        for axis in ("tp", "dp", "pp"):  # one rank writes what several of them have
            plain = {n: [list(box) for box in of_param] for n, of_param in boxes.items()}
            for of_peer in self.model.groups[axis].objects.all_gather(plain):
                for name, of_param in of_peer.items():
                    if name not in boxes and name in params and params[name].numel():
                        boxes[name] = list(map(TensorBox.parse, of_param))
        place = dict(self.model.place)
        if not shard:  # replicas have the same
            place.pop("dp", None)
        name = ",".join(f"{axis}={at}" for axis, at in place.items()) or "the model"
        here = set(self.model.pipeline.buffers())
        kept = [n for n, buffer in state.model.named_buffers() if buffer in here]

        def buffers() -> dict[str, torch.Tensor]:
            return {n: b for n, b in state.model.named_buffers() if n in kept}

        names = group.objects.all_gather(name)
        self._world, self._num_agreed = group, 0
        part = ModelPart(name, params, boxes, state.optimizer, buffers)
        return part, list(dict.fromkeys(names))

    def _copy_part(self, part: ModelPart) -> list[ModelPart]:
        """Copy the part of a neighbour, if a rank or a host alone has a part; a collective."""
        self._shadow = None
        if not self._copies or self._world.size == 1:
            return []
        is_sharded = self.model.sharding is not None
        is_alone = is_sharded or self.group.size == 1
        is_alone |= is_on_one_host(self.group) and not is_on_one_host(self._world)
        has_grads = is_sharded and (crosses_hosts(self.group) or not crosses_hosts(self._world))
        alone, with_grads = zip(*self._world.objects.all_gather((is_alone, has_grads)), strict=True)
        if not any(alone):
            return []
        is_sent = not all(with_grads)
        self._shadow = Shadow(self._world if is_sent else self.group, part, is_sent=is_sent)
        return [self._shadow.part]

    def weights(self, num_steps: int) -> dict[str, float]:
        """Return a digest of the weights that this rank saves; see `Replica.weights`."""
        params = list(self.state.model.parameters())
        is_shared = len(list(self.state.model.named_parameters(remove_duplicate=False))) > len(
            params
        )
        num_stages = self.model.groups["pp"].size if is_shared else 1
        order = self.model.groups["tp"].size * MOST_STAGES + num_stages
        is_on_cpu = all(param.device.type == "cpu" for param in params)
        return weight_digest(self._saved, num_steps, order=order if is_on_cpu else -1)

    def digests(self) -> dict[str, int]:
        """Return digests of the parameters of this rank's part; see `Replica.digests`."""
        part = self._divisions[max(self._divisions)].parts[0]
        of_model = (e for e in part.entries() if e.name.startswith("model/"))
        return {f"{e.name} {e.boxes}": checksum(e.tensor) for e in of_model}

    def begin(self, number: int) -> None:
        """Begin micro-batch `number`; see `Replica.begin`."""
        self.model.pipeline.num_steps = number  # on which random numbers depend
        if self._shadow is not None:
            self._shadow.check()
        if self.model.sharding is not None:
            self.model.sharding.begin_step()

    def note_sent(self, sums: dict[int, float] | None) -> None:
        """Add checksums of the values that stages send to `sums`; see `Replica.note_sent`."""

        def note(place: int, tensor: torch.Tensor) -> None:
            assert sums is not None
            sums[place] = crc32(checksum(tensor).to_bytes(4, "big"), int(sums.get(place, 0)))

        self.model.pipeline.on_sent = None if sums is None else note

    def prepare(self) -> float:
        """Shard and clip gradients, of the copied part too; see `Replica.prepare`."""
        norm, copied = nan, dict[str, torch.Tensor]()
        if self.model.sharding is not None:
            rank = None if self._shadow is None else self._shadow.copied_rank
            copied = self.model.sharding.keep_own_gradients(rank)
        if self._clip is not None:
            norm = self.model.clip_grad_norm_(self._clip, copies=copied.values()).item()
        if self._shadow is not None:
            self._shadow.prepare(copied)
        return norm

    def agree(self, *, flag: bool) -> bool:
        """Wait until all members have what their updates need; see `Replica.agree`."""
        self._num_agreed += 1
        if self._num_agreed == 2:  # after a step, which makes states
            for part in self._divisions[max(self._divisions)].parts:
                part.numbers()  # which refuses some
            if self.state.others:
                compare_others(self._world, self.state)
        return bool(self._world.all_reduce(torch.tensor([int(flag)]), op="max").item())

    def updated(self) -> None:
        """Record that the update has been made; see `Replica.updated`."""
        self.model.zero_grad()
        if self._shadow is not None:
            self._shadow.check_update()

    def share(self) -> None:
        """Gather parameters that are whole on each rank; see `Replica.share`."""
        if self.model.sharding is not None:
            self.model.sharding.share()
        if self._shadow is not None:
            self._shadow.note()


class _NoInitialValues(TorchFunctionMode):
    """Leaves out the initial values of parameters: the values of other ranks follow."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_initial = func in RANDOM or getattr(func, "__module__", "") == "torch.nn.init"
        tensor = args[0] if args else kwargs.get("tensor")
        if is_initial and isinstance(tensor, nn.Parameter):
            return tensor
        return func(*args, **kwargs)
