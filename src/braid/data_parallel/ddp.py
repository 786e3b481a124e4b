"""DistributedDataParallel: one replica per process, gradients averaged during backward.

Every rank holds the whole model and its share of the batch. At wrapping, rank 0's parameters and buffers are copied to
all, so that replicas start equal; since they then apply equal gradients, they stay equal, and parameters never travel again.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020. What differs: buckets
leave when they are full, not in order; unused parameters need no flag; sums are in the order of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.params import FlatBuffer, GradientReducer, ParamTable

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Wraps a module so that backward leaves the same averaged gradients on every rank.

    Args:
        module: The same on every rank, up to values.
        process_group: Ranks that train together, such as `braid.init()`.
        bucket_cap_mb: Gradients are reduced in pieces of about this many MiB.
        broadcast_buffers: Copy rank 0's buffers (such as running means) to all before each forward.
        init_sync: Compare parameters and copy rank 0's values at wrapping.

    Raises:
        ConfigError: Nothing to train, or no group.
        MismatchError: Ranks have other parameters; the message shows which.

    Cost:
        A step sends 2 (n-1)/n l bytes a rank, l = bytes of the gradients; in shared memory each rank reads and writes
        2 l / n, most of it while backward computes.

    On failure:
        A lost rank raises PeerLostError in everyone's backward; gradients are then undefined.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Group,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(process_group, Group):
            msg = (  # type: ignore[unreachable]  # users without a type checker
                f"expected a braid Group as process_group, found {type(process_group).__name__}: pass "
                "process_group=braid.init()"
            )
            raise ConfigError(msg)
        table = ParamTable.of(module)
        if not table.trained:
            msg = (
                f"expected at least one parameter that requires a gradient in {type(module).__name__}, found "
                f"{len(table)} frozen ones: there is nothing to average, use the module as it is"
            )
            raise ConfigError(msg)
        self.module = module
        self.process_group = process_group
        self._broadcast_buffers = broadcast_buffers
        if init_sync:
            table.compare(process_group)
            _copy_from_first(process_group, [record.param.detach() for record in table])
            _copy_from_first(process_group, list(module.buffers()))
        self._buffers_of_first = _Buffers(process_group, module)
        self._reducer = GradientReducer(
            process_group, table, bucket_cap_bytes=max(1, int(bucket_cap_mb * (1 << 20)))
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        if torch.is_grad_enabled() and self._reducer.synchronize:
            self._reducer.begin()
        if self._broadcast_buffers and self.training:
            self._buffers_of_first.broadcast()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients local; the next one outside averages the accumulated sum."""
        before = self._reducer.synchronize
        self._reducer.synchronize = False
        try:
            yield
        finally:
            self._reducer.synchronize = before

    @property
    def num_buckets(self) -> int:
        """Number of reductions a step."""
        return self._reducer.num_buckets


class _Buffers:
    """A module's floating and integer buffers, broadcast together: one operation per dtype."""

    def __init__(self, group: Group, module: nn.Module) -> None:
        self._group = group
        self._module = module
        self._flat: dict[tuple[torch.dtype, tuple[torch.Size, ...]], FlatBuffer] = {}

    def broadcast(self) -> None:
        """Copy rank 0's values to all."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        # asked for anew each time: `self.mean = ...` in a forward puts another tensor in the place of the buffer
        for buffer in self._module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, members in by_dtype.items():
            key = dtype, tuple(member.shape for member in members)
            flat = self._flat.get(key)
            if flat is None:
                flat = self._flat[key] = FlatBuffer(key[1], dtype, self._group.empty)
            if self._group.rank == 0:
                for view, buffer in zip(flat.views, members, strict=True):
                    view.copy_(buffer)
            self._group.broadcast(flat.tensor, 0)
            if self._group.rank != 0:
                for view, buffer in zip(flat.views, members, strict=True):
                    buffer.copy_(view)


def _copy_from_first(group: Group, tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for x in tensors:
            group.broadcast(x, 0)
