"""Gradient scaler for divided models, with agreement on nonfinite gradients.

Each rank has a part of the gradients only. If one rank found infinity and skipped its step, parts
of the model would have taken a step, and others not. So ranks exchange a flag before any of them
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from braid.comm import Group

__all__ = ["AgreedGradScaler"]


class AgreedGradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a model that is divided over the ranks of groups.

    Args:
        groups: Groups with other parts of the model, such as the group of a pipeline, or one group
            for each axis of a mesh.
        device: Device of the gradients.
        options: Arguments of torch's scaler, such as `init_scale`.

    Cost: one all_reduce of 4 bytes per step for each group.
    """

    def __init__(
        self, groups: Sequence[Group], device: torch.device | str = "cpu", **options: Any
    ) -> None:
        self._agreed_device = torch.device(device)
        super().__init__(self._agreed_device.type, **options)
        self._groups = [group for group in groups if group.size > 1]
        # makes the scale, also on ranks of a pipeline that compute no loss
        self.scale(torch.zeros((), device=self._agreed_device))

    def _unscale_grads_(self, *args: Any) -> dict[torch.device, torch.Tensor]:
        """Unscale this rank's gradients, and return whether any rank has nonfinite gradients."""
        known = super()._unscale_grads_(*args)
        nonfinite = torch.zeros(1, dtype=torch.float32, device=self._agreed_device)
        for flag in known.values():
            nonfinite = torch.maximum(nonfinite, flag.reshape(1).to(nonfinite.device))
        for group in self._groups:
            nonfinite = group.all_reduce(nonfinite, op="max")
        return dict.fromkeys(known or [self._agreed_device], nonfinite.reshape(()))
