"""Gradients that are reduced together: one flat buffer, cut into one shard per rank.

    gradients    [ p0 | p1 |      p2      | p3 ]     main_grad of a parameter is a view
    shards       [ rank 0 | rank 1 | rank 2 |..]     of equal length, for the distributed optimizer

With the distributed optimizer the parameters are views of such a buffer as well. Its reduce_scatter
fills a rank's shard of the gradients only, and all_gather returns the shards of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group, Work
from braid.parallel.gradients.flat import FlatBuffer

__all__ = ["BucketOptions", "MegatronBucket"]


class BucketOptions(NamedTuple):
    """Options of the sum of a bucket's gradients over ranks.

    Attributes:
        scale: Factor of gradients.
        scale_after: Whether to multiply after the sum.
        sharded: Whether each rank gets the sum of its shard only.
    """

    scale: float
    scale_after: bool
    sharded: bool


class MegatronBucket:
    """Bucket of parameters; sets their `main_grad`.

    Args:
        params: Parameters of one dtype and device.
        dtype: Dtype of gradients.
        group: Data parallel ranks.
        options: Options of the reduction.

    Attributes:
        grads: Flat gradients.
        values: Flat parameters with the distributed optimizer, else None.
        num_ready: Number of parameters with a gradient from the last micro-batch.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: Group,
        options: BucketOptions,
    ) -> None:
        self.params, self.group, self.options = list(params), group, options
        self.grads = FlatBuffer.for_params(params, group, dtype, align=group.size)
        self.grads.tensor.zero_()
        for param, view in zip(params, self.grads.views, strict=True):
            param.__dict__["main_grad"] = view
        self.values: FlatBuffer | None = None
        if options.sharded:
            self.values = FlatBuffer.for_params(params, group, params[0].dtype, align=group.size)
            for param, view in zip(params, self.values.views, strict=True):
                view.copy_(param.detach())
                param.data = view
        self.num_ready = 0
        self.started = False
        self._work: Work | None = None

    @property
    def shard(self) -> tuple[int, int]:
        """First element of this rank's shard, and the element behind it."""
        length = self.grads.tensor.numel() // self.group.size
        return self.group.rank * length, (self.group.rank + 1) * length

    def start(self, *, force_all_reduce: bool = False) -> None:
        """Start the reduction, unless it was started before."""
        if self.started:
            return
        self.started, flat = True, self.grads.tensor
        if not self.options.scale_after and self.options.scale != 1:
            flat.mul_(self.options.scale)
        if self.group.size == 1 or not flat.numel():
            return
        if self.options.sharded and not force_all_reduce:
            begin, end = self.shard
            self._work = self.group.reduce_scatter(flat, out=flat[begin:end], async_op=True)
        else:
            self._work = self.group.all_reduce(flat, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.options.scale_after and self.options.scale != 1:
            self.grads.tensor.mul_(self.options.scale)
        self.started, self.num_ready = False, 0

    def gather_values(self) -> None:
        """Replace the parameters by the shards of all ranks."""
        if self.values is not None and self.group.size > 1 and self.values.tensor.numel():
            begin, end = self.shard
            flat = self.values.tensor
            self.group.all_gather(flat[begin:end].clone(), out=flat)
