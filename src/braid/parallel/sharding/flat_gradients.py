"""Gradients of a flat vector: from those of whole parameters to averages of the owned pieces.

    backward leaves `.grad` of the whole parameters       (this rank's samples)
    launch   copies them into a flat vector               (a slot, or at stage 1 memory of its own)
             and starts the reduce-scatter
    finish   waits, sums over replicas, and puts the averages into `.grad` of the owned pieces

Sums are in the order of ranks and are divided once, at the end. Averages are added to what the
pieces have from earlier backwards. What accumulates locally, without sums over ranks, has the dtype
of these sums: 512 gradients of 1 are 512, where bfloat16 would end at 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Request, StepsBy, Work
from braid.parallel.sharding.flat_shard import FlatShard
from braid.parallel.sharding.slots import Slot

__all__ = ["FlatGradients", "sums_in_dtype_of_pieces"]


class FlatGradients:
    """Gradients of a flat vector.

    Args:
        flat: The parameters.
        slot: Memory of the whole vector, in the dtype of sums.
        part: Memory of this rank's part, in the dtype of sums; None to sum into the memory of the
            pieces' gradients.

    Attributes:
        flat: As given.
        slot: As given.
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
        self._local: dict[int, torch.Tensor] = {}  # sums of leaves of another dtype than the sums'

    def busy(self) -> list[FlatGradients]:
        """Return the gradients that use the slots now."""
        slots = [slot for slot in (self.slot, self._part_slot) if slot is not None]
        return list({id(s.holder): s.holder for s in slots if s.holder is not None}.values())

    def kept_memory(self) -> list[torch.Tensor]:
        """Return memory that is this vector's alone: all gradients at stage 1, else the pieces'."""
        if self.flat.stage != 1:
            return [self._memory]
        inside = sums_in_dtype_of_pieces(self.flat)
        return [self.slot.tensor] if inside else [self.slot.tensor, self._memory]

    def shared_memory(self) -> list[torch.Tensor]:
        """Return memory that other vectors use, too."""
        slots = [self._part_slot] if self.flat.stage == 1 else [self.slot, self._part_slot]
        return [slot.tensor for slot in slots if slot is not None]

    def has_gradients(self) -> list[bool]:
        """Return whether each whole parameter has a gradient on this rank."""
        return [bool(self._grads_of(i)) for i in range(len(self.flat.leaves))]

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of whole parameters that have accumulated on this rank."""
        return [grad for i in range(len(self.flat.leaves)) for grad in self._grads_of(i)]

    def _grads_of(self, index: int) -> list[torch.Tensor]:
        """Return the local sum of a leaf's gradients, and the gradient that is not in it."""
        grads = self._local.get(index), self.flat.leaves[index].grad
        return [grad.detach() for grad in grads if grad is not None]

    def accumulate(self, index: int) -> None:
        """Add a whole parameter's gradient to its local sum, if that has another dtype."""
        leaf = self.flat.leaves[index]
        if leaf.grad is None or leaf.dtype == self.flat.dtypes.reduce:
            return
        grad, leaf.grad = leaf.grad.detach(), None
        if index in self._local:
            self._local[index].add_(grad)
        else:
            self._local[index] = grad.to(self.flat.dtypes.reduce)

    def launch(self) -> None:
        """Take the gradients of the whole parameters and start their sum; both slots are free."""
        self.is_launched = True
        self.slot.holder = self
        if self._part_slot is not None:
            self._part_slot.holder = self
        self._earlier = [
            (i, owned.grad.detach().clone())
            for i, owned in enumerate(self.flat.owned)
            if owned.grad is not None
        ]
        for i, (leaf, view) in enumerate(zip(self.flat.leaves, self._views, strict=True)):
            first, *others = self._grads_of(i) or [view.new_zeros(())]
            view.copy_(first)
            for grad in others:
                view.add_(grad)
            leaf.grad = None
        self._local.clear()
        self._work = self._request.start(steps_by=StepsBy.WAITER)

    def finish(self) -> None:
        """Wait for the averages; the slots are free then."""
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
        """Give the owned pieces their averages.

        Args:
            has: Whether some rank had a gradient of each parameter. Others keep what they have.
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

    def reset(self) -> None:
        """Begin a new backward."""
        self.is_launched = False

    def drop(self) -> None:
        """Drop the gradients of whole parameters, and forget a sum that was never waited for."""
        for leaf in self.flat.leaves:
            leaf.grad = None
        self._local.clear()
        self.is_launched = False


def sums_in_dtype_of_pieces(flat: FlatShard) -> bool:
    """Return whether sums have the dtype and the device of the pieces' gradients."""
    same_device = flat.master_device == flat.device
    return flat.dtypes.reduce == flat.dtypes.master and same_device
