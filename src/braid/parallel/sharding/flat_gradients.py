"""Gradients of a flat vector: reduced from gradients of whole parameters to averages of pieces.

    backward computes `.grad` of the whole parameters     (this rank's samples)
    launch   copies them into a flat vector               (a slot; at stage 1 separate memory)
             and starts the reduce-scatter
    finish   waits, sums over replicas, and writes the averages to `.grad` of the owned pieces

Sums are in the order of ranks and are divided once, at the end. Averages are added to the pieces'
gradients from earlier backwards. Local accumulation, without sums over ranks, uses the dtype of
these sums: 512 gradients of 1 sum to 512, whereas bfloat16 would stop at 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Request, StepsBy, Work
from braid.parallel.sharding.flat_shard import FlatShard
from braid.parallel.sharding.moved_gradient import MovedGradient, MovedGradients
from braid.parallel.sharding.slots import Slot

__all__ = ["FlatGradients", "sums_in_dtype_of_pieces"]

STAGE_OF_PARAMETERS = 3  # at which pieces are the parameters that programs see


class FlatGradients:
    """Gradients of the parameters that share one flat vector.

    Args:
        flat: The parameters.
        slot: Temporary memory of the whole vector, in the dtype of sums.
        part: Temporary memory of this rank's part, in the dtype of sums; None to sum into the
            memory of the pieces' gradients.

    Attributes:
        flat, slot: Arguments.
        moved: Stand-ins for gradients of the whole parameters.
        is_launched: Whether the sum has been started in this backward.
    """

    def __init__(
        self,
        flat: FlatShard,
        slot: Slot[FlatGradients],
        part: Slot[FlatGradients] | None,
    ) -> None:
        self.flat = flat
        self.slot = slot
        self.is_launched = False
        self._part_slot = part
        partition, places = flat.partition, flat.places
        low, high = partition.bounds[places.group.rank : places.group.rank + 2]
        whole = slot.tensor[: partition.length]
        self._views = [
            whole[start : start + numel].view(shape)
            for start, numel, shape in zip(
                partition.starts, partition.numels, flat.shapes, strict=True
            )
        ]
        if flat.stage == 1 and sums_in_dtype_of_pieces(flat):
            self._memory = whole[low:high]  # the other parts are not needed after the sum
        else:
            self._memory = flat.zeros(high - low)
        self._sum = self._memory if part is None else part.tensor[: high - low]
        self._grads = [flat.shaped(self._memory, i) for i in range(len(flat.pieces))]
        rows = torch.split(whole, list(partition.widths))
        even = len(set(partition.widths)) == 1
        alone = places.replicas is None
        self._request: Request = places.group.persistent(
            "reduce_scatter", whole if even else rows, out=self._sum, op="avg" if alone else "sum"
        )
        self._over_replicas = (
            None if places.replicas is None else places.replicas.persistent("all_reduce", self._sum)
        )
        self._work: Work | None = None
        self._earlier: list[tuple[int, torch.Tensor]] = []
        self._local: dict[int, torch.Tensor] = {}  # local sums in another dtype
        self._has_stepped = self._remains = False  # since the last sum; gradients of a step before
        self.moved = MovedGradients(flat)

    def busy(self) -> list[FlatGradients]:
        """Return the flat gradients that now use the temporary memory (slots) of this vector."""
        slots = [slot for slot in (self.slot, self._part_slot) if slot is not None]
        return list({id(s.holder): s.holder for s in slots if s.holder is not None}.values())

    def kept_memory(self) -> list[torch.Tensor]:
        """Return the memory of this vector alone: all gradients at stage 1, else the pieces'."""
        if self.flat.stage != 1:
            return [self._memory]
        inside = sums_in_dtype_of_pieces(self.flat)
        return [self.slot.tensor] if inside else [self.slot.tensor, self._memory]

    def shared_memory(self) -> list[torch.Tensor]:
        """Return the temporary memory that other vectors use in turn."""
        slots = [self._part_slot] if self.flat.stage == 1 else [self.slot, self._part_slot]
        return [slot.tensor for slot in slots if slot is not None]

    def has_gradients(self) -> list[bool]:
        """Return whether each whole parameter has a gradient on this rank."""
        return [bool(self._grads_of(i)) for i in range(len(self.flat.leaves))]

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of whole parameters that have accumulated on this rank."""
        return [grad for i in range(len(self.flat.leaves)) for grad in self._grads_of(i)]

    def _grads_of(self, index: int) -> list[torch.Tensor]:
        """Return the local sum of a leaf's gradients, and the gradient not added to it yet."""
        grads = self._local.get(index), self.flat.leaves[index].grad
        return [g.detach() for g in grads if g is not None and not isinstance(g, MovedGradient)]

    def accumulate(self, index: int) -> None:
        """Add gradient number `index` to a local sum, if sums have another dtype than gradients."""
        leaf = self.flat.leaves[index]
        self.moved.kept.add(index)
        if leaf.grad is None or leaf.dtype == self.flat.dtypes.reduce:
            return
        grad, leaf.grad = leaf.grad.detach(), None
        if index in self._local:
            self._local[index].add_(grad)
        else:
            self._local[index] = grad.to(self.flat.dtypes.reduce)

    def launch(self) -> None:
        """Copy gradients to temporary memory (two slots, which must be free); start their sum."""
        self.is_launched = True
        self.moved.hide()
        self.slot.holder = self
        if self._part_slot is not None:
            self._part_slot.holder = self
        self._earlier = [
            (i, owned.grad.detach().clone())
            for i, owned in enumerate(self.flat.owned)
            if owned.grad is not None
        ]
        if self._has_stepped:
            counts = [grad.count_nonzero() for _, grad in self._earlier]
            self._remains = bool(counts) and bool(torch.stack(counts).any())
            self._has_stepped = False
        for i, (leaf, view) in enumerate(zip(self.flat.leaves, self._views, strict=True)):
            first, *others = self._grads_of(i) or [view.new_zeros(())]
            view.copy_(first)
            for grad in others:
                view.add_(grad)
            leaf.grad = None
        self.moved.kept.clear()
        self._local.clear()
        self._work = self._request.start(steps_by=StepsBy.WAITER)

    def note_step(self) -> bool:
        """Record a step; return whether gradients of the step before it were in its gradients."""
        remains, self._remains = self._remains, False
        self._has_stepped = self.flat.stage != STAGE_OF_PARAMETERS
        return remains

    def finish(self) -> None:
        """Wait for the averages, and release the temporary memory (slots)."""
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        if self._over_replicas is not None:
            self._over_replicas.start().wait()
            self._sum.div_(self.flat.places.num_ranks)
        if self._sum.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self._sum)
        for slot in (self.slot, self._part_slot):
            if slot is not None and slot.holder is self:
                slot.holder = None

    def deliver(self, has: Sequence[bool]) -> None:
        """Write the averages to the gradients of the owned pieces.

        Args:
            has: Whether any rank had a gradient, for each parameter. Gradients of other parameters
                are unchanged.
        """
        for owned, grad, some in zip(self.flat.owned, self._grads, has, strict=True):
            if some and grad.numel():
                owned.grad = grad
        for i, earlier in self._earlier:
            if has[i]:
                self._grads[i].add_(earlier)
            else:
                self._grads[i].copy_(earlier)
                self.flat.owned[i].grad = self._grads[i]
        self._earlier = []
        if self.flat.stage != STAGE_OF_PARAMETERS:
            self.moved.show(has)

    def drop(self) -> None:
        """Drop the gradients of whole parameters, and discard a sum that was not waited for."""
        self.moved.clear()
        self._local.clear()
        self.is_launched = False


def sums_in_dtype_of_pieces(flat: FlatShard) -> bool:
    """Return whether sums have the dtype and device of the pieces' gradients."""
    same_device = flat.master_device == flat.device
    return flat.dtypes.reduce == flat.dtypes.master and same_device
