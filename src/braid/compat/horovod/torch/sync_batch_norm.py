"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

from braid.compat.horovod.session import session
from braid.parallel.data_parallel import SyncBatchNorm as OfGroup

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(OfGroup):
    """torch's SyncBatchNorm over all ranks, on any device, also for inputs with 2 dims.

    Args:
        num_features: Number of channels.
        eps: Number added to the variance.
        momentum: Momentum of the running statistics; a plain average when None.
        affine: Whether to have a weight and a bias.
        track_running_stats: Whether to track running statistics.
        **kwargs: `device` and `dtype`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, session().direct, **kwargs
        )
