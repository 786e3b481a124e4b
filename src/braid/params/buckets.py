"""The buckets of a plan as memory and requests: gradients come in, averages come out.

Each bucket is one flat buffer in memory that all ranks can read, with a view per parameter, and one persistent request. When a gradient
comes it is copied into its view, which becomes the parameter's `.grad`: from then on there is one copy of it, and what later
backwards add to it goes into the bucket by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from braid.comm import Group, Request, Work
from braid.events import Span
from braid.params.bucket_state import Bucket
from braid.params.flat import FlatBuffer, allocator
from braid.params.grad_bucket import GradBucket, Hook, Steps, steps_of
from braid.params.table import ParamRecord

__all__ = ["Buckets", "StateHook"]

StateHook = tuple[object, Hook]


class Buckets:
    """Buffers and requests of a plan.

    Args:
        group: Ranks that reduce together.
        plan: Equal on all of them.
        records: Parameters by position.
        wire: Format in which gradients cross a network.
        check_all: Whether all numbers are looked at for NaN and Inf, or one of each gradient.
    """

    def __init__(
        self,
        group: Group,
        plan: Sequence[Bucket],
        records: Mapping[int, ParamRecord],
        *,
        wire: str | None = None,
        check_all: bool = False,
    ) -> None:
        self.plan = tuple(plan)
        self._group = group
        self._records = records
        self._check_all = check_all
        self._buffers: list[FlatBuffer] = []
        self._requests: list[Request] = []
        self._firsts: list[torch.Tensor] = []
        self.views: dict[int, torch.Tensor] = {}
        for bucket in plan:
            shapes = [records[p].param.shape for p in bucket.members]
            dtype: torch.dtype = getattr(torch, bucket.dtype)
            buffer = FlatBuffer(shapes, dtype, allocator(group, bucket.device))
            self._buffers.append(buffer)
            numbers = None if dtype != torch.float32 else wire
            self._requests.append(
                group.persistent("all_reduce", buffer.tensor, op="avg", wire=numbers)
            )
            self._firsts.append(buffer.firsts())
            self.views.update(zip(bucket.members, buffer.views, strict=True))
        self._under_way: dict[int, tuple[Steps, Span]] = {}

    @property
    def sizes_bytes(self) -> list[int]:
        """Of each buffer."""
        return [b.tensor.numel() * b.tensor.element_size() for b in self._buffers]

    def collect(self, position: int) -> bool:
        """Bring a gradient into its bucket; False if there is none."""
        param, view = self._records[position].param, self.views[position]
        grad = param.grad
        if grad is None:
            return False
        if grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride():
            view.copy_(grad)
            param.grad = view
        return True

    def spoiled(self, number: int) -> list[int]:
        """Positions whose gradients are not finite, as far as they are looked at."""
        buffer, bucket = self._buffers[number], self.plan[number]
        if self._check_all:
            if bool(buffer.tensor.abs().sum().isfinite()):
                return []
            good = torch.stack([view.isfinite().all() for view in buffer.views]).tolist()
        else:
            firsts = buffer.tensor[self._firsts[number]].isfinite()
            if bool(firsts.all()):
                return []
            good = firsts.tolist()
        return [p for p, ok in zip(bucket.members, good, strict=True) if not ok]

    def start(self, number: int, hook: StateHook | None) -> None:
        """Let a bucket go, by its request or by a hook.

        Raises:
            ConfigError: The hook answers something else than it may.
        """
        buffer, bucket = self._buffers[number], self.plan[number]
        nbytes = buffer.tensor.numel() * buffer.tensor.element_size()
        span = self._group.context.events.span(
            f"bucket {number + 1} of {len(self.plan)}", seq=number, nbytes=nbytes
        )
        if hook is None:
            work: Work = self._requests[number].start(lazily=True)
            self._under_way[number] = (_one(work), span)
            return
        state, call = hook
        shown = GradBucket(
            number,
            buffer.tensor,
            gradients=buffer.views,
            parameters=[self._records[p].param for p in bucket.members],
            names=[self._records[p].name for p in bucket.members],
            last=number == len(self.plan) - 1,
        )
        self._under_way[number] = (steps_of(call(state, shown), shown), span)

    def wait(self, done: Callable[[int], object] | None = None) -> None:
        """Wait for all buckets on their way, those of several steps in turns.

        Args:
            done: Called with the number of each when it is there, while others are still on their way.
        """
        left = dict(sorted(self._under_way.items()))
        self._under_way.clear()
        try:
            while left:
                for number, (steps, span) in list(left.items()):
                    work = next(steps, None)
                    if work is None:
                        span.end()
                        del left[number]
                        if done is not None:
                            done(number)
                    else:
                        work.wait()
        finally:
            for _, span in left.values():
                span.end()

    def scale(self, number: int, factor: float) -> None:
        """Multiply the gradients of a bucket."""
        self._buffers[number].tensor.mul_(factor)

    def zero(self, positions: Sequence[int]) -> None:
        """Let these gradients be zeros."""
        for position in positions:
            self.views[position].zero_()

    def __repr__(self) -> str:
        return f"Buckets({len(self.plan)} buckets, {sum(self.sizes_bytes)} bytes)"


def _one(work: Work) -> Steps:
    yield work
