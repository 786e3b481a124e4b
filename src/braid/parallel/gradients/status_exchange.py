"""The exchange of status vectors: one persistent all-reduce of 64-bit floats."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Group, Work
from braid.parallel.gradients.status import Status, StatusLayout

__all__ = ["StatusExchange"]


class StatusExchange:
    """Exchanges what ranks report beside their gradients.

    Args:
        group: Ranks that train together.
        num_params: Number of parameters.

    Attributes:
        layout: Layout of the vector.
        device: Device on which the group takes small messages.
    """

    def __init__(self, group: Group, num_params: int) -> None:
        kinds = group.engine.device_types
        self.device = torch.device("cpu" if "cpu" in kinds else min(kinds))
        self.layout = StatusLayout(num_params, group.size)
        self._vector = torch.zeros(self.layout.length, dtype=torch.float64, device=self.device)
        self._request = group.persistent("all_reduce", self._vector)

    def run(self, own: Sequence[float], beside: Sequence[Work]) -> Status:
        """Add up the vectors of all ranks; a collective.

        Args:
            own: This rank's vector, see `StatusLayout.encode`.
            beside: Works that are under way meanwhile, and waited for.
        """
        self._vector.copy_(torch.tensor(own, dtype=torch.float64))
        self._request.start().wait()
        for work in beside:
            work.wait()
        return self.layout.decode(self._vector.tolist())
