"""Parameters of a unit as a flat vector that is sharded over ranks.

    master      this rank's part, as the optimizer sees it: one piece for each parameter
    source      the same values, as other ranks read them; a separate tensor only if the dtype for
                computation differs
    full        the whole vector, gathered from all sources; parameters are views of it

    stage 3     full is in a slot while the unit computes      original parameters are the pieces
    stage 1, 2  full is permanent, source is a part of it      original parameters are the views

A reduce-scatter reduces gradients of the whole vector to gradients of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from braid.comm import Group, Request, Work
from braid.parallel.gradients import ParamRecord, allocator
from braid.parallel.sharding.partition import FlatPartition
from braid.parallel.sharding.slots import Slot
from braid.runtime.torch_internals import own_parameters, share_gradient_hooks

__all__ = ["Dtypes", "FlatShard", "Places"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """Dtypes and memory of a flat vector.

    Attributes:
        compute: Dtype of parameters in forward and backward.
        master: Dtype of the pieces that the optimizer updates.
        reduce: Dtype of gradients as they are summed.
        on_host: Whether the pieces are in host memory, for any device of computation.
        pinned: Whether the host memory is pinned.
    """

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype
    on_host: bool = False
    pinned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Ranks over which flat vectors are sharded and replicated.

    Attributes:
        group: Ranks that own the shards.
        replicas: Ranks that own the same shard; None without replicas.
    """

    group: Group
    replicas: Group | None = None

    @property
    def groups(self) -> list[Group]:
        """Groups that together contain all ranks over which gradients are averaged."""
        return [self.group] if self.replicas is None else [self.group, self.replicas]

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.group.size * (1 if self.replicas is None else self.replicas.size)


class FlatShard:
    """Flat vector of parameters, sharded over ranks.

    Args:
        records: Parameters; all of one device and one dtype.
        partition: Positions of the parameters in the vector, and its cuts.
        places: Ranks that own the shards.
        stage: 1, 2 or 3.
        dtypes: Dtypes.
        title: Name of the vector in reports.
        whole: Whether each parameter belongs to one rank, which owns it in its shape.

    Attributes:
        records, partition, places, stage, dtypes, title, whole: Arguments.
        pieces: Elements of each parameter that this rank owns.
        shapes: Shape of each parameter.
        owned: Parameters of the optimizer: this rank's pieces.
        leaves: Parameters that modules compute with; between uses of a unit at stage 3, they have
            no values.
        sites: For each parameter, the modules and names under which it is registered.
        is_entered: Whether the modules have the whole parameters instead of this rank's pieces.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        partition: FlatPartition,
        places: Places,
        *,
        stage: int,
        dtypes: Dtypes,
        title: str,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        self.records = records
        self.partition = partition
        self.stage = stage
        self.dtypes = dtypes
        self.title = title
        self.sites: list[list[tuple[nn.Module, str]]] = []
        self.is_entered = False
        self.places = places
        rank = places.group.rank
        self._low, self._high = partition.bounds[rank : rank + 2]
        self.pieces = partition.pieces(rank)
        self.device = records[0].param.device
        self.master_device = torch.device("cpu") if dtypes.on_host else self.device
        self.allocate = allocator(
            places.group, "cpu" if self.device.type == "cpu" else str(self.device)
        )
        self._full: torch.Tensor | None = None
        self._slot: Slot[FlatShard] | None = None
        self._gathering: Work | None = None
        self._request: Request | None = None
        self.shapes = [record.param.shape for record in records]
        self._make_master([record.param.detach() for record in records])
        self._holes = [_hole(shape, dtypes.compute, self.device) for shape in self.shapes]
        self.owned, self.leaves = self._make_params()
        self._attach()

    @property
    def numel(self) -> int:
        """Number of elements of all parameters, without gaps."""
        return sum(self.partition.numels)

    @property
    def requires_grad(self) -> bool:
        """Whether a parameter requires a gradient."""
        return any(owned.requires_grad for owned in self.owned)

    @property
    def is_whole(self) -> bool:
        """Whether the whole vector has been gathered."""
        return self._full is not None and self._gathering is None

    @property
    def full(self) -> torch.Tensor | None:
        """The whole vector, if it is gathered or being gathered."""
        return self._full

    def moved(self) -> list[str]:
        """Return the names of parameters that are replaced, or no longer in this memory."""
        memory, params = self._master, self.owned
        if self._slot is None:
            assert self._full is not None
            memory, params = self._full, self.leaves
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
        registered = self.owned if self.stage == 3 and not self.is_entered else self.leaves
        return [
            record.name
            for record, param, kept, sites in zip(
                self.records, params, registered, self.sites, strict=True
            )
            if (param.numel() and not begin <= param.data_ptr() < end)
            or any(_is_replaced(module, name, kept) for module, name in sites)
        ]

    def zeros(self, numel: int) -> torch.Tensor:
        """Return `numel` zeros with the dtype, device and pinning of the pieces."""
        pinned = self.dtypes.pinned and self.device.type == "cuda"
        dtype, device = self.dtypes.master, self.master_device
        return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pinned)

    # Parameters

    def use_slot(self, slot: Slot[FlatShard] | None) -> None:
        """Gather into the temporary memory `slot` from now on; into the kept vector if None."""
        self._slot = slot
        target = self._full if slot is None else slot.tensor[: self.partition.length]
        assert target is not None, "without a slot, the whole vector is kept"
        self._target = target
        rows = torch.split(target, list(self.partition.widths))
        group = self.places.group
        even = len(set(self.partition.widths)) == 1
        self._request = group.persistent("all_gather", self._source, out=target if even else rows)

    @property
    def slot(self) -> Slot[FlatShard] | None:
        """Temporary memory of the whole vector; None if the vector has separate memory."""
        return self._slot

    def kept_memory(self) -> list[torch.Tensor]:
        """Return the memory that is held between uses, without duplicates."""
        kept = [self._source] if self._slot is not None or self._full is None else [self._full]
        if self._master.data_ptr() != self._source.data_ptr():
            kept.append(self._master)
        return kept

    def refresh(self) -> None:
        """Copy the optimizer's values to the memory that other ranks read, if it is separate."""
        if self._source.data_ptr() != self._master.data_ptr():
            self._source.copy_(self._master, non_blocking=self.dtypes.pinned)

    def start_gather(self) -> None:
        """Start to gather the whole vector into its temporary memory, which must be free."""
        if self._gathering is not None:
            return
        assert self._request is not None, "use_slot comes first"
        if self._slot is not None:
            if self._full is not None:
                return
            self._slot.holder = self
        self._full = self._target
        self._gathering = self._request.start()

    def finish_gather(self) -> None:
        """Wait for the whole vector, and make parameters views of it."""
        if self._gathering is None:
            return
        work, self._gathering = self._gathering, None
        work.wait()
        if self._slot is not None:
            self._show()

    def gather_aside(self) -> torch.Tensor:
        """Gather the whole vector into new memory, and return it."""
        return self._gathered(self._source)

    def _gathered(self, shard: torch.Tensor) -> torch.Tensor:
        full = self.allocate((self.partition.length,), shard.dtype)
        self.places.group.all_gather(shard, out=torch.split(full, list(self.partition.widths)))
        return full

    def use_aside(self) -> None:
        """Gather into new memory, since the slot is in use; parameters become views of it."""
        self._full = self.gather_aside()
        self._show()

    def release(self) -> None:
        """Free the whole vector; parameters then have no values."""
        if self._slot is None or self._full is None:
            return
        if self._gathering is not None:
            work, self._gathering = self._gathering, None
            work.wait()
        for leaf, hole in zip(self.leaves, self._holes, strict=True):
            leaf.data = hole
        self._full = None
        if self._slot.holder is self:
            self._slot.holder = None

    def offset_of(self, address: int) -> int:
        """Return the index of the element at an address; -1 if it is outside of the vector."""
        if self._full is None:
            return -1
        offset = address - self._full.data_ptr()
        size = self._full.element_size()
        return offset // size if 0 <= offset < self.partition.length * size else -1

    def named_sites(self) -> Iterator[tuple[ParamRecord, Sequence[tuple[nn.Module, str]]]]:
        """Yield each parameter with the modules and names of its registrations."""
        yield from zip(self.records, self.sites, strict=True)

    def enter(self) -> None:
        """Register the whole parameters in the modules."""
        self.is_entered = True
        if self.stage == 3:
            _register(self.sites, self.leaves)
            for owned, leaf in zip(self.owned, self.leaves, strict=True):
                share_gradient_hooks(owned, leaf)  # which programs register on the model's pieces

    def leave(self) -> None:
        """Register this rank's pieces as parameters of the modules."""
        self.is_entered = False
        if self.stage == 3:
            _register(self.sites, self.owned)

    def _show(self) -> None:
        assert self._full is not None
        views = _views(self._full, self.partition, self.shapes)
        for leaf, owned, view in zip(self.leaves, self.owned, views, strict=True):
            leaf.data = view
            if leaf.requires_grad != owned.requires_grad:
                leaf.requires_grad_(owned.requires_grad)

    def _make_master(self, values: Sequence[torch.Tensor]) -> None:
        """Allocate this rank's shard, and copy its part of the parameters' values into it."""
        dtypes, width = self.dtypes, self._high - self._low
        same = dtypes.compute == dtypes.master and self.master_device == self.device
        if self.stage == 3:
            self._source = self.allocate((width,), dtypes.compute).zero_()
        else:
            self._full = self.allocate((self.partition.length,), dtypes.compute).zero_()
            views = _views(self._full, self.partition, self.shapes)
            for view, value in zip(views, values, strict=True):
                view.copy_(value)
            self._source = self._full[self._low : self._high]
        self._master = self._source if same else self.zeros(width)
        for piece, value in zip(self.pieces, values, strict=True):
            self._master[piece.start : piece.start + piece.numel].copy_(
                value.reshape(-1)[piece.begin : piece.end]
            )

    def _make_params(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the optimizer's parameters, and the parameters that modules compute with."""
        owned, leaves = [], []
        for index, record in enumerate(self.records):
            needed = record.param.requires_grad
            part = self.shaped(self._master, index)
            record.param.grad = None  # its shape is wrong at stage 3; no optimizer drops it
            if self.stage == 3:
                record.param.data = part
                owned.append(record.param)
                empty = torch.empty(0, dtype=self.dtypes.compute, device=self.device)
                leaves.append(nn.Parameter(empty, requires_grad=needed))
            else:
                owned.append(nn.Parameter(part, requires_grad=needed))
                leaves.append(record.param)
        return owned, leaves

    def whole_values(self) -> list[torch.Tensor]:
        """Gather the whole parameters in the dtype of the model, in new memory; a collective."""
        dtype: torch.dtype = getattr(torch, self.records[0].spec.dtype)
        self.refresh()
        exact = self._source if self.dtypes.compute == dtype else self._master
        full = self._gathered(exact.to(self.device)).to(dtype)
        return [view.clone() for view in _views(full, self.partition, self.shapes)]

    def undo(self) -> None:
        """Restore whole values of the original parameters, in separate memory."""
        for record, value in zip(self.records, self.whole_values(), strict=True):
            record.param.data = value
            if self.stage == 3:
                record.param.grad = None  # the gradient of this rank's piece
        self.leave()

    def keep_own_gradients(self, copied_rank: int | None) -> dict[str, torch.Tensor]:
        """Set the pieces' gradients from whole gradients; see `Sharding.keep_own_gradients`."""
        copied_grads: dict[str, torch.Tensor] = {}
        rank = self.places.group.rank if copied_rank is None else copied_rank
        for record, leaf, owned, piece, copied in zip(
            *(self.records, self.leaves, self.owned, self.pieces, self.partition.pieces(rank)),
            strict=True,
        ):
            grad, leaf.grad, owned.grad = leaf.grad, None, None
            if grad is None:
                continue
            values = grad.reshape(-1)
            if piece.numel:
                owned.grad = values[piece.begin : piece.end].view_as(owned).to(owned)
            if copied_rank is not None and copied.numel:
                copied_grads[record.name] = values[copied.begin : copied.end].to(owned)
        return copied_grads

    def shaped(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        """Return this rank's shard of parameter number `index`, as a view of the flat `memory`.

        A parameter without dims keeps its shape on its owner, so that optimizer states have the
        same shapes as in one process.
        """
        piece, shape = self.pieces[index], self.shapes[index]
        part = memory[piece.start : piece.start + piece.numel]
        if not self.whole and (shape or not piece.numel):
            return part
        return part.view(shape if piece.numel else (0, *shape[1:]))

    def _attach(self) -> None:
        if self.stage == 3:
            for leaf, hole in zip(self.leaves, self._holes, strict=True):
                leaf.data = hole
        else:
            self._show()


def _views(
    full: torch.Tensor, partition: FlatPartition, shapes: Sequence[torch.Size]
) -> list[torch.Tensor]:
    starts, numels = partition.starts, partition.numels
    return [
        full[start : start + numel].view(shape)
        for start, numel, shape in zip(starts, numels, shapes, strict=True)
    ]


def _hole(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of NaN without memory, which exposes use of a freed parameter."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def _is_replaced(module: nn.Module, name: str, kept: nn.Parameter) -> bool:
    """Return whether another parameter is registered; `functional_call` registers tensors."""
    current = own_parameters(module).get(name)
    return isinstance(current, nn.Parameter) and current is not kept


def _register(
    sites: Sequence[Sequence[tuple[nn.Module, str]]], params: Sequence[nn.Parameter]
) -> None:
    for param_sites, param in zip(sites, params, strict=True):
        for module, name in param_sites:
            if type(module).__setattr__ is nn.Module.__setattr__:
                own_parameters(module)[name] = param
            else:  # for example nn.LSTM, which also keeps its weights in a list
                setattr(module, name, param)
