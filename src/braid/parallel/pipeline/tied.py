"""Parameters that stages on several ranks share, such as the token embedding of a language model.

Each rank has a copy. After the last backward of a step the gradients of all copies are added, in
the order of ranks, so that equal optimizers keep the copies equal. In a norm over all stages such a
parameter counts once, on the first of its ranks. Stages of one rank share the parameter itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.gradients import fill_missing_gradients
from braid.parallel.pipeline.stage import Layer

__all__ = ["TiedParams"]


class _Tied(NamedTuple):
    """A parameter with copies on several ranks.

    Attributes:
        param: Copy of this rank.
        group: Ranks that have a copy.
    """

    param: nn.Parameter
    group: Group


class TiedParams:
    """Adds the gradients of copies.

    Args:
        parts: Layers of each stage of the whole model.
        homes: Rank of each stage.
        group: Ranks of the pipeline. Groups of the ranks that share are made from it, so this is a
            collective.
    """

    def __init__(
        self, parts: Sequence[Sequence[Layer]], homes: Mapping[int, int], group: Group
    ) -> None:
        ranks: dict[nn.Parameter, set[int]] = {}
        for stage, part in enumerate(parts):
            for layer in part:
                for param in layer.module.parameters():
                    ranks.setdefault(param, set()).add(homes[stage])
        shared = {param: tuple(sorted(own)) for param, own in ranks.items() if len(own) > 1}
        groups = {
            own: group.split(0 if group.rank in own else None)
            for own in sorted(set(shared.values()))
        }
        self._tied = [
            _Tied(param, own_group)
            for param, own in shared.items()
            if (own_group := groups[own]) is not None and group.rank in own
        ]

    @property
    def groups(self) -> list[Group]:
        """Groups of the ranks that share parameters with this one."""
        return list(dict.fromkeys(tied.group for tied in self._tied))

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters of this rank that others share."""
        return [tied.param for tied in self._tied]

    @torch.no_grad()
    def make_equal(self) -> None:
        """Give all copies the values of the first; a collective of their ranks."""
        for param, group in self._tied:
            group.broadcast(param.detach(), 0)

    def add_up(self) -> None:
        """Add the gradients of all copies; a collective of their ranks.

        A parameter that no stage has used keeps the gradient None.

        Cost: one all_reduce of each shared parameter, and one of a byte for each.
        """
        for group in self.groups:
            params = [p for p, own in self._tied if own is group and p.requires_grad]
            for param, grad in fill_missing_gradients(params, [group]):
                param.grad = group.all_reduce(grad)

    def counts_elsewhere(self, param: torch.Tensor) -> bool:
        """Return whether another rank counts this parameter in a norm."""
        return any(tied.param is param and tied.group.rank for tied in self._tied)
