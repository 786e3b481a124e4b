"""Gradient scaler for sharded models, with agreement on nonfinite gradients.

Each rank has its own pieces only. If one rank found infinity and skipped its step, parts of the
model would have taken a step, and others not. So ranks exchange a flag before any of them steps.
"""

from __future__ import annotations

from typing import Any

import torch

from braid.parallel.sharding.engine import Sharding

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a sharded model.

    Args:
        sharding: Engine of the model.
        options: Arguments of torch's scaler, such as `init_scale`.

    Cost: one all_reduce of 4 bytes per step for each axis of ranks.
    """

    def __init__(self, sharding: Sharding, **options: Any) -> None:
        self._master_device = sharding.flats[0].master_device
        super().__init__(self._master_device.type, **options)
        places = sharding.places
        self._groups = [g for g in (places.group, places.replicas) if g is not None]

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients, and return whether any rank has nonfinite gradients."""
        known = super()._unscale_grads_(*args)
        nonfinite = torch.zeros(1, dtype=torch.float32, device=self._master_device)
        for flag in known.values():
            nonfinite = torch.maximum(nonfinite, flag.reshape(1).to(nonfinite.device))
        for group in self._groups:
            nonfinite = group.all_reduce(nonfinite, op="max")
        return dict.fromkeys(known or [self._master_device], nonfinite.reshape(()))
