"""Averages of gradients by NCCL, for replicas on threads with a GPU each.

    thread of replica 0     backward, end of backward ──┐
    thread of replica 1     backward, end of backward ──┴─> one all-reduce for each gradient

The thread that comes last starts the all-reduces, each on the streams of all replicas. Unlike
buckets, they begin when backward has ended. A gradient that was averaged before stays the same, so
several backwards may come before a step.

Source: torch.cuda.nccl, which torch.nn.parallel.comm uses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from braid.errors import ConfigError
from braid.runtime.torch_internals import queue_callback

__all__ = ["NcclAverage", "sum_by_nccl"]

Merge = Callable[[Any, Callable[[list[Any]], Any]], Any]


class NcclAverage:
    """Averages the gradients of one replica with the gradients of the other replicas.

    Args:
        params: Parameters of the replica by name.
        merge: Function that calls another function once, with the arguments of all replicas.
        size: Number of replicas.

    Attributes:
        hooks: Handles of the parameters' hooks.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], merge: Merge, size: int) -> None:
        self._params, self._merge, self._size = params, merge, size
        self._is_queued = False
        self.hooks = [
            param.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
            for param in params.values()
            if param.requires_grad
        ]

    def _has_gradient(self, param: torch.Tensor) -> None:
        del param
        if not self._is_queued:
            self._is_queued = True
            queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        grads = {name: param.grad for name, param in self._params.items()}
        device = next(iter(self._params.values())).device
        self._merge((grads, torch.cuda.current_stream(device)), sum_by_nccl)
        for grad in grads.values():
            if grad is not None:
                grad.div_(self._size)


def sum_by_nccl(
    replicas: Sequence[tuple[Mapping[str, torch.Tensor | None], torch.cuda.Stream]],
) -> None:
    """Replace each replica's gradients by their sums over all replicas.

    Args:
        replicas: Gradients by name, and the stream, of each replica.

    Raises:
        ConfigError: A gradient is not dense, two replicas share a device, or a replica lacks a
            gradient.
    """
    streams = [stream for _, stream in replicas]
    for name in replicas[0][0]:
        grads = [named[name] for named, _ in replicas]
        copies = [grad for grad in grads if grad is not None]
        if not copies:
            continue
        is_dense = torch.cuda.nccl.is_available(copies)  # type: ignore[no-untyped-call]
        if len(copies) < len(grads) or not is_dense:
            devices = ", ".join("none" if grad is None else str(grad.device) for grad in grads)
            msg = (
                f"NcclAllReduce needs a dense, contiguous gradient of {name} in each replica, on "
                f"different GPUs (they are on {devices}): leave cross_device_ops out of "
                "MirroredStrategy"
            )
            raise ConfigError(msg)
        torch.cuda.nccl.all_reduce(copies, streams=streams)  # type: ignore[no-untyped-call]
