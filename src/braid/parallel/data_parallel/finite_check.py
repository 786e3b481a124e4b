"""The check for NaN and infinity of methods that average parameters instead of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel.finite import NonFiniteError
from braid.types import first_few

__all__ = ["FiniteCheck"]

CHOICES = ("ignore", "warn", "raise")


class FiniteCheck:
    """Names the parameters that are NaN or infinite, before an average replaces them.

    An average is not finite if the share of any rank is not. So all ranks see it in their own
    copy of the average, and only then ask each other whose share it was.

    Args:
        nonfinite: "ignore", "warn" (once) or "raise", the same on all ranks.
        method: Name of the method that averages, for messages.

    Raises:
        ConfigError: `nonfinite` is something else.

    Cost:
        A pass over the average; where it is not finite, one over the parameters and an
        all_gather of a byte for each parameter.
    """

    def __init__(self, nonfinite: str, method: str) -> None:
        if nonfinite not in CHOICES:
            known = ", ".join(map(repr, CHOICES))
            msg = f"nonfinite={nonfinite!r} is unknown to {method}; choose one of {known}"
            raise ConfigError(msg)
        self.nonfinite = nonfinite
        self._method = method
        self._warned = False

    def __call__(
        self,
        averages: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        group: Group,
        step: int,
    ) -> None:
        """Check averages that have not been written to the parameters; a collective if one fails.

        Raises:
            NonFiniteError: An average is not finite, and `nonfinite` is "raise".
        """
        if self.nonfinite == "ignore" or all(map(_is_finite, averages)):
            return
        cause = f"{_cause(params, group)} in step {step} of {self._method}"
        if self.nonfinite == "raise":
            msg = (
                f"{cause}. No parameter has been changed: each rank still has its own. Look at "
                "the batches of that rank, lower the learning rate or clip gradients"
            )
            raise NonFiniteError(msg)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{cause}; the averaged parameters of all ranks contain it now. Later ones are "
                "not reported: nonfinite='raise' stops before that, 'ignore' turns the check off",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_finite(flat: torch.Tensor) -> bool:
    total = flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32))
    return bool(total.isfinite()) or bool(flat.isfinite().all())  # a sum may overflow


def _cause(params: Sequence[torch.Tensor], group: Group) -> str:
    """Describe which parameters are not finite on which ranks; a collective."""
    flags = [not bool(param.isfinite().all()) for param in params]
    own = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    table = group.all_gather(own).view(group.size, -1)
    ranks = [str(group.ranks[int(row)]) for row in table.any(1).nonzero()]
    positions = [int(column) for column in table.any(0).nonzero()]
    if not ranks:
        return "the average is not finite although the parameters of every rank are"
    names = [f"{position} of shape {list(params[position].shape)}" for position in positions]
    plural = "s" if len(ranks) > 1 else ""
    where = f"on rank{plural} {', '.join(ranks)}"
    return f"NaN or infinity in parameter {first_few(names, 5)} {where}"
