"""Gradients of all ranks, averaged bucket by bucket.

A hook on every parameter copies the gradient into its bucket, which lies in shared memory, and makes `.grad` a view of it.
The hook that completes a bucket starts the bucket's persistent request. When backward ends, `finish` takes the steps of all
that has been started and waits for the peers'. Steps in between would not end sooner: sums in shared memory are work for
the same core, and they would drive what backward computes on out of its cache.

    backward   p6 p5 | p4 p3 p2 | p1 p0 |
    bucket 0         >                   :====        > started   = steps
    bucket 1                    >        :====        : finish()
    bucket 2                            >:====

Each bucket ends in one flag per parameter: 1 if this rank has a gradient for it. The flags are summed with the
gradients, so at no extra message every rank knows which parameters have no gradient anywhere; their `.grad` stays None, as
in one process, and nobody has to ask for that beforehand. A gradient accumulated by earlier backwards takes part, whether
or not the last one added to it.

The result equals a loop over the ranks' shards in one process, bit by bit: sums are in the order of ranks, and the
division by their number happens once, at the end (`braid.data_parallel.reference`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from braid.comm import Group, Request, Work
from braid.errors import CommError, ConfigError
from braid.events import Span
from braid.params.bucket_state import BUCKET_CAP_BYTES, BucketState, plan_buckets
from braid.params.flat import FlatBuffer
from braid.params.table import ParamRecord, ParamTable

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages gradients over a group, from hooks.

    Args:
        group: Ranks that train together.
        table: Their parameters; equal on all of them.
        bucket_cap_bytes: See `plan_buckets`.
    """

    def __init__(
        self, group: Group, table: ParamTable, *, bucket_cap_bytes: int = BUCKET_CAP_BYTES
    ) -> None:
        self._group = group
        self._records: tuple[ParamRecord, ...] = table.trained
        plan = plan_buckets([r.spec for r in self._records], bucket_cap_bytes)
        self._state = BucketState(plan, [r.name for r in self._records])
        self._buffers: list[FlatBuffer] = []
        self._requests: list[Request] = []
        self._views: dict[int, torch.Tensor] = {}
        for bucket in plan:
            shapes = [self._records[p].param.shape for p in bucket.members]
            dtype: torch.dtype = getattr(torch, bucket.dtype)
            buffer = FlatBuffer(shapes, dtype, group.empty, num_extra=len(shapes))
            self._buffers.append(buffer)
            self._requests.append(group.persistent("all_reduce", buffer.tensor, op="avg"))
            self._views.update(zip(bucket.members, buffer.views, strict=True))
        self._under_way: dict[int, tuple[Work, Span]] = {}
        self._handles: list[RemovableHandle] = [
            record.param.register_post_accumulate_grad_hook(self._hook(position))  # type: ignore[no-untyped-call]
            for position, record in enumerate(self._records)
        ]
        self.synchronize = True  # False: gradients stay local and accumulate

    @property
    def num_buckets(self) -> int:
        """Number of buckets, and of reductions a step."""
        return len(self._buffers)

    def begin(self) -> None:
        """Call before each forward.

        Raises:
            CommError: The last backward was left by an exception; the other ranks have been told.
        """
        if not self._state.begun:
            return
        reason = f"rank {self._group.context.rank} left backward by an exception"
        for _, span in self._under_way.values():
            span.end()
        self._under_way.clear()
        self._state.reset()
        if self._group.size > 1:
            self._group.abort(reason)
            msg = (
                f"expected the last backward to have ended, found that {reason}; its gradients cannot be averaged, and the "
                "others have been told: resume from a checkpoint"
            )
            raise CommError(msg)

    def finish(self) -> None:
        """Start what has not been started, and wait for all buckets; `.grad` then holds the averages.

        Called by autograd at the end of backward.
        """
        missing: list[tuple[int, int, int]] = []
        for bucket, plan in enumerate(self._state.buckets):
            absent = self._state.missing(bucket)
            for place, position in enumerate(plan.members):
                if position in absent and not self._collect(position):
                    self._views[position].zero_()
                    missing.append((position, bucket, place))
            if bucket not in self._under_way:
                self._start(bucket, [p for p, b, _ in missing if b == bucket])
        for work, span in self._under_way.values():
            with span:
                work.wait()
        for position, bucket, place in missing:
            if self._buffers[bucket].extra[place] != 0:  # some other rank has used it
                self._records[position].param.grad = self._views[position]
        self._under_way.clear()
        self._state.reset()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, position: int) -> Callable[[nn.Parameter], None]:
        # A parameter keeps its hooks alive. If they kept the reducer alive, which keeps the parameters, neither
        # would ever die: part of that cycle runs through C++, where the garbage collector cannot see it.
        reference = weakref.ref(self)

        def on_gradient(_param: nn.Parameter) -> None:
            reducer = reference()
            if reducer is not None and reducer.synchronize:
                reducer._on_gradient(position)  # noqa: SLF001 - its continuation

        return on_gradient

    def _on_gradient(self, position: int) -> None:
        if not self._state.begun:
            # runs when the engine has finished the whole backward, in the thread that called it
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # noqa: SLF001 - there is no public way
        complete = self._state.ready(position)
        self._collect(position)
        if complete is not None:
            self._start(complete, [])

    def _collect(self, position: int) -> bool:
        """Bring a gradient into its bucket; False if there is none.

        A parameter that this backward has not used may hold a gradient all the same, accumulated before.

        Raises:
            ConfigError: It is sparse.
        """
        record, view = self._records[position], self._views[position]
        grad = record.param.grad
        if grad is None:
            return False
        if grad.layout != torch.strided:
            msg = (
                f"expected a dense gradient of {record.name!r}, found one of layout {grad.layout}: make it dense "
                "(sparse=False in nn.Embedding)"
            )
            raise ConfigError(msg)
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
            record.param.grad = view
        return True

    def _start(self, bucket: int, absent: list[int]) -> None:
        buffer, plan = self._buffers[bucket], self._state.buckets[bucket]
        buffer.extra.fill_(1.0)
        for position in absent:
            buffer.extra[plan.members.index(position)] = 0.0
        nbytes = buffer.tensor.numel() * buffer.tensor.element_size()
        span = self._group.context.events.span(
            f"bucket {bucket + 1} of {self.num_buckets}", seq=bucket, nbytes=nbytes
        )
        self._under_way[bucket] = (self._requests[bucket].start(lazily=True), span)
