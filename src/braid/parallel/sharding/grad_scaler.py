"""Gradient scaler for sharded models."""

from __future__ import annotations

from typing import Any

from braid.parallel.gradients.grad_scaler import AgreedGradScaler
from braid.parallel.sharding.engine import Sharding

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(AgreedGradScaler):
    """A `torch.amp.GradScaler` for a sharded model; see `AgreedGradScaler`.

    Args:
        sharding: Engine of the model.
        options: Arguments of torch's scaler, such as `init_scale`.
    """

    def __init__(self, sharding: Sharding, **options: Any) -> None:
        places = sharding.places
        groups = [group for group in (places.group, places.replicas) if group is not None]
        super().__init__(groups, sharding.flats[0].master_device, **options)
