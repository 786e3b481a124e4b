"""Sharding engine: units, flat vectors, gradients, and an optimizer on this rank's pieces.

                     stage 1              stage 2              stage 3
    parameters       whole                whole                sharded, gathered during use
    gradients        whole                sharded              sharded
    optimizer        sharded              sharded              sharded

    backward         reduce-scatter of gradients, unit by unit
    step             on this rank's pieces
    after the step   all-gather of parameters                  (before use, unit by unit)

Sums are in the order of ranks and divided once. So all stages are bitwise equal to one process that
runs the ranks' samples in turn, for elementwise optimizers, and for other optimizers if each
parameter belongs to one rank.

Source: S. Rajbhandari et al., "ZeRO", SC 2020; Y. Zhao et al., "PyTorch FSDP", VLDB 2023.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.gradients import ParamRecord, ParamTable
from braid.parallel.gradients.exact_norm import clip_pieces_, exact_norm
from braid.parallel.gradients.lost_requests import reclaim_lost_requests
from braid.parallel.gradients.optimizer_in_place import refuse_copy
from braid.parallel.sharding.flat_gradients import FlatGradients, sums_in_dtype_of_pieces
from braid.parallel.sharding.flat_shard import FlatShard, Places
from braid.parallel.sharding.layouts import SHARD, layouts_of
from braid.parallel.sharding.offload import StatesOnDisk
from braid.parallel.sharding.options import ShardingOptions
from braid.parallel.sharding.partition import assign_owners, by_elements, by_owners
from braid.parallel.sharding.policies import DiskOffloadPolicy
from braid.parallel.sharding.reducer import ShardReducer
from braid.parallel.sharding.residency import Residency, Unit
from braid.parallel.sharding.slots import Slot, plan_slots
from braid.parallel.sharding.torch_functions import check_unchanged, guard, release
from braid.parallel.sharding.units import (
    MARK,
    UnitSpec,
    check_params,
    check_shapes,
    default_units,
    divide_into_units,
)
from braid.programs.layout import Mesh
from braid.runtime.torch_internals import own_parameters
from braid.types import dtype_name

__all__ = ["Sharding", "sharding_of"]

REPLICA = "replica"


class Sharding:
    """Engine that shards the parameters, gradients and optimizer states of a model over ranks.

    Args:
        model: Model to train; the same on all ranks, except for values. Changed in place.
        group: Ranks that own the shards.
        options: Stage, units, dtypes and checks.
        replicas: Ranks that own the same shard; gradients are averaged over them as well. None if
            there are no replicas.

    Attributes:
        model, options: Arguments.
        places: Ranks that own shards, and ranks that own copies of the same shard.
        disk: Files of the optimizer's states, if they are offloaded.
        layouts: Layouts of the flat vectors of parameters.
        table: Parameters by name; the same objects as in the model.
        flats: Flat vectors of parameters, first those of the root unit (the model itself).
        gradients: Gradients of the flat vectors, in the order of backward.
        reducer: Averages these gradients.
        units: Modules with parameters that are gathered together, first the root unit.
        shares_late: Whether the optimizer's step is local: stepped parameters are gathered when
            `share` is called, or the next step begins.

    Raises:
        ConfigError: The model cannot be sharded; the message has all problems.
        MismatchError: Parameters or options differ between ranks; the message shows which.

    Cost: stages 1 and 2 send 2 l (n-1)/n bytes per rank and step, l = bytes of all parameters, as
        data parallel training does; stage 3 sends 3 l (n-1)/n, less the bytes of the root and of
        the last unit if they stay gathered.

    On failure: a lost rank raises PeerLostError in forward, backward or step on all other ranks. An
        exception in the backward of one rank raises CommError in the backward of all others when
        that rank begins its next forward; gradients of the step are dropped, and all may continue.
        After an exception in its forward at stage 3, the others wait until their deadline.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        options: ShardingOptions | None = None,
        *,
        replicas: Group | None = None,
    ) -> None:
        self.options = options or ShardingOptions()
        self.model = model
        self.places = Places(group=group, replicas=replicas)
        check_shapes(model)
        axes = (
            {SHARD: group.size} if replicas is None else {REPLICA: replicas.size, SHARD: group.size}
        )
        self.layouts = layouts_of(self.options.stage, Mesh(axes))
        self.table = ParamTable.of(model, self.options.ignored)
        check_params(model, self.table)
        modules = self.options.units
        specs = divide_into_units(
            model, default_units(model) if modules is None else modules, self.table
        )
        self.shares_late = False
        self._has_shared = True
        self._compare([spec.name for spec in specs])
        sites = _sites_of(model)
        flats = [self._make_flats(spec) for spec in specs]
        for flat in (flat for unit_flats in flats for flat in unit_flats):
            flat.sites = [sites.get(id(p), []) for p in (r.param for r in flat.records)]
            flat.leave()
        self.flats = [flat for unit_flats in flats for flat in unit_flats]
        self._use_param_slots(specs, flats)
        self.units = [
            Unit(spec.name, spec.module, unit_flats, frees_after_forward=self._frees(spec))
            for spec, unit_flats in zip(specs, flats, strict=True)
        ]
        self.gradients = self._make_gradients()
        self.reducer = ShardReducer(
            self.gradients,
            self.places.groups,
            self._before_backward_ends,
            self._on_backward_ended,
        )
        self._residency = Residency(
            self.units,
            self.reducer.backward_begins,
            self._before_forward,
            lambda unit: self.reducer.complete(unit.flats),
            keeps_last=self.options.reshard_after_forward is None,
        )
        policy = self.options.offload
        self.disk = (
            StatesOnDisk(policy.directory, group.context.rank)
            if isinstance(policy, DiskOffloadPolicy)
            else None
        )
        setattr(model, MARK, self)
        for record in self.table:
            setattr(record.param, MARK, True)
        self._guard = guard(self)

    def owned(self) -> Iterator[tuple[ParamRecord, nn.Parameter]]:
        """Yield each parameter of the model with this rank's shard of it."""
        for flat in self.flats:
            yield from zip(flat.records, flat.owned, strict=True)

    def places_by_name(self) -> dict[str, tuple[FlatShard, int]]:
        """Return the flat vector of each parameter and the index in it, by name."""
        return {r.name: (flat, i) for flat in self.flats for i, r in enumerate(flat.records)}

    def ignored(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are not sharded, by name."""
        named = self.model.named_parameters()
        return {name: param for name, param in named if name in self.options.ignored}

    def pieces(self) -> list[torch.Tensor]:
        """Return the gradients of the parameter pieces that this rank owns."""
        return [owned.grad for _, owned in self.owned() if owned.grad is not None]

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients as one vector, of order `norm_type` (such as 2 or inf).

        A collective, with the same result on all ranks and for any number of them.
        """
        return exact_norm(self.pieces(), [self.places.group], norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`; a collective.

        Args:
            max_norm: Largest norm of all gradients together.
            norm_type: Order of the norm, such as 2 or infinity.
            error_if_nonfinite: Whether to raise an error if the norm is NaN or infinite.

        Returns:
            The norm before scaling.
        """
        return clip_pieces_(
            self.pieces(),
            max_norm,
            [self.places.group],
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )

    def zero_grad(self) -> None:
        """Drop all gradients, including local gradients from `no_sync`."""
        self.reducer.drop()
        for _, owned in self.owned():
            owned.grad = None

    def whole_records(self) -> list[ParamRecord]:
        """Return the parameters that modules compute with; `no_sync` leaves gradients on them."""
        return [
            record._replace(param=leaf)
            for flat in self.flats
            for record, leaf in zip(flat.records, flat.leaves, strict=True)
        ]

    def keep_own_gradients(self, copied_rank: int | None = None) -> dict[str, torch.Tensor]:
        """Set the pieces' gradients from whole gradients, which must be equal on all ranks.

        Args:
            copied_rank: Rank with pieces that this rank copies; None for none.

        Returns:
            The gradients of the copied pieces by parameter name, without shapes.
        """
        copied: dict[str, torch.Tensor] = {}
        for flat in self.flats:
            copied |= flat.keep_own_gradients(copied_rank)
        return copied

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients stay local; the next backward outside averages.

        Cost: memory for whole gradients.
        """
        return self.reducer.no_sync()

    def begin_step(self) -> None:
        """Begin a step: share the last optimizer step's results, and record the order of units.

        A forward of the model calls this method; engines that run parts of the model must call it.
        """
        self.share()
        self._residency.begin()

    def average(self) -> None:
        """Average the local gradients from backwards inside of `no_sync`; a collective.

        For engines that run several backwards per step, such as pipelines.
        """
        self.reducer.average()

    def share_step(self) -> None:
        """Gather the parameters that an optimizer's step has changed on all ranks; a collective.

        No-op at stage 3, because parameters are gathered before use.
        """
        self._has_shared = False
        self.reducer.note_step()
        if not self.shares_late:
            self.share()

    def share(self) -> None:
        """Gather what `share_step` has left for later; a collective, unless there is nothing."""
        if self._has_shared:
            return
        self._has_shared = True
        for flat in self.flats:
            if flat.slot is None:
                flat.refresh()
                flat.start_gather()
        for flat in self.flats:
            if flat.slot is None:
                flat.finish_gather()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which the model has whole parameters for reading; a collective."""
        self._residency.gather_all()
        try:
            yield
        finally:
            self._residency.free_all()

    def undo(self) -> None:
        """Restore whole parameters on all ranks, in separate memory; a collective.

        The optimizer still refers to the pieces and cannot be used any more. Gradients of pieces
        are dropped.
        """
        self._residency.free_all()
        self.close()
        for flat in self.flats:
            flat.undo()

    def close(self) -> None:
        """Remove the hooks from the model; not a collective.

        Call it after the last backward; further calls do nothing. At stage 3 the parameters remain
        this rank's pieces: call `undo` instead to keep the model. An engine that is
        garbage-collected with its model needs no `close`. The group's next engine reuses its
        channels.
        """
        if sharding_of(self.model) is not self:
            return
        self._residency.close()
        self.reducer.hide_moved()
        self.reducer.close()
        delattr(self.model, MARK)
        for record in self.table:
            delattr(record.param, MARK)
        release(self, self._guard)

    def _compare(self, units: Sequence[str]) -> None:
        """Compare parameters and options across ranks, and copy the values of the first rank."""
        arguments = {**self.options.in_common(), "units": list(units)}
        for group in (self.places.group, self.places.replicas):
            if group is None:
                continue
            if self.options.init_sync:
                self.table.make_equal(group, arguments)
                for buffer in self.model.buffers():
                    group.broadcast(buffer.detach(), 0)
            else:
                self.table.compare(group, arguments)
            reclaim_lost_requests(group)

    def _make_flats(self, spec: UnitSpec) -> list[FlatShard]:
        """Create the flat vectors of a unit, separate for each dtype and for frozen parameters."""
        kinds: dict[tuple[torch.dtype, bool], list[ParamRecord]] = {}
        for record in spec.records:
            kinds.setdefault((record.param.dtype, record.param.requires_grad), []).append(record)
        options, group = self.options, self.places.group
        flats = []
        for (dtype, _), records in kinds.items():
            numels = [record.param.numel() for record in records]
            if options.whole:
                owners = [self._owner_of(record) for record in records]
                partition = by_owners(numels, owners, group.size)
            else:
                partition = by_elements(numels, group.size)
            flats.append(
                FlatShard(
                    records,
                    partition,
                    self.places,
                    stage=options.stage,
                    dtypes=options.dtypes_of(dtype),
                    title=f"{spec.name or 'root'} ({dtype_name(dtype)})",
                    whole=options.whole,
                )
            )
        return flats

    def _owner_of(self, record: ParamRecord) -> int:
        if not hasattr(self, "_owners"):
            numels = [r.param.numel() for r in self.table]
            owners = assign_owners(numels, self.places.group.size)
            self._owners = {id(r.param): o for r, o in zip(self.table, owners, strict=True)}
        return self._owners[id(record.param)]

    def _frees(self, spec: UnitSpec) -> bool:
        """Return whether a unit is freed between forward and backward."""
        wanted = self.options.reshard_after_forward
        return bool(spec.name) if wanted is None else wanted

    def _use_param_slots(self, specs: Sequence[UnitSpec], flats: Sequence[list[FlatShard]]) -> None:
        """Assign slots to vectors; units gathered at the same time have different slots."""
        if self.options.stage != 3:
            for flat in self.flats:
                flat.use_slot(None)
            return
        keys = [
            (spec.depth, index % 2, number) if spec.name and self._frees(spec) else (index, number)
            for index, (spec, unit_flats) in enumerate(zip(specs, flats, strict=True))
            for number in range(len(unit_flats))
        ]
        slots: list[Slot[FlatShard]] = plan_slots(
            keys,
            [flat.partition.length for flat in self.flats],
            [flat.dtypes.compute for flat in self.flats],
            [flat.allocate for flat in self.flats],
        )
        for flat, slot in zip(self.flats, slots, strict=True):
            flat.use_slot(slot)

    def _make_gradients(self) -> list[FlatGradients]:
        """Return the gradients in the order of backward; the root's are last."""
        flats = [flat for flat in reversed(self.flats) if flat.requires_grad]
        lengths = [flat.partition.length for flat in flats]
        dtypes = [flat.dtypes.reduce for flat in flats]
        keeps = self.options.stage == 1
        slots: list[Slot[FlatGradients]] = plan_slots(
            [index if keeps else index % 2 for index in range(len(flats))],
            lengths,
            dtypes,
            [flat.allocate for flat in flats],
        )
        parts: list[Slot[FlatGradients]] = plan_slots(
            [index % 2 for index in range(len(flats))],
            [max(flat.partition.widths) if _sums_aside(flat) else 0 for flat in flats],
            dtypes,
            [flat.allocate for flat in flats],
        )
        return [
            FlatGradients(flat, slot, part if _sums_aside(flat) else None)
            for flat, slot, part in zip(flats, slots, parts, strict=True)
        ]

    def _before_forward(self) -> None:
        """Check at the begin of a forward that the sharded parameters have not been changed.

        If the last backward raised, the other ranks are notified first.

        Raises:
            ConfigError: See `check_unchanged`.
        """
        if self.reducer.is_in_backward:
            for unit in self._residency.shadow_backward():
                self.reducer.complete(unit.flats)
            self.reducer.abandon()
        check_unchanged(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, since a copy or pickle would share the ranks' memory and channels.

        Raises:
            ConfigError: Always.
        """
        refuse_copy("sharded model")

    def _before_backward_ends(self) -> None:
        self._residency.reach_rest()

    def _on_backward_ended(self) -> None:
        self._residency.end_backward()

    def __repr__(self) -> str:
        numel = sum(flat.numel for flat in self.flats)
        return (
            f"Sharding(stage {self.options.stage}, {len(self.units)} units, {numel} numbers over "
            f"{self.places.group!r})"
        )


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return the engine that has sharded a model; None if it is not sharded."""
    engine = vars(model).get(MARK)
    return engine if isinstance(engine, Sharding) else None


def _sums_aside(flat: FlatShard) -> bool:
    """Return whether sums need separate memory beside the gradients of the pieces."""
    return flat.stage == 1 or not sums_in_dtype_of_pieces(flat)


def _sites_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules and names under which each parameter is registered."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, param in own_parameters(module).items():
            if param is not None:
                sites.setdefault(id(param), []).append((module, name))
    return sites
