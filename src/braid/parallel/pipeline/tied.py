"""Parameters that stages on several ranks share, such as the token embedding of a language model.

Each rank has a copy. After the last backward of a step the gradients of all copies are added, in
the order of ranks, so that equal optimizers keep the copies equal. In a norm over all stages, such
a parameter counts once, on its first rank. Stages of one rank share the parameter itself.
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
    """Parameter with copies on several ranks.

    Attributes:
        param: Copy of this rank.
        group: Ranks that have a copy.
    """

    param: nn.Parameter
    group: Group


class TiedParams:
    """Sums of the gradients of parameters that layers of several stages share.

    Args:
        parts: Layers of each stage of the whole model.
        homes: Rank that has each stage.
        group: Ranks of the pipeline. The constructor creates groups of the ranks that share a
            parameter, so it is a collective.
    """

    def __init__(
        self, parts: Sequence[Sequence[Layer]], homes: Mapping[int, int], group: Group
    ) -> None:
        ranks: dict[nn.Parameter, set[int]] = {}
        for stage, part in enumerate(parts):
            for layer in part:
                for param in layer.module.parameters():
                    ranks.setdefault(param, set()).add(homes[stage])
        shared = {
            param: tuple(sorted(holders)) for param, holders in ranks.items() if len(holders) > 1
        }
        groups = {
            holders: group.split(0 if group.rank in holders else None)
            for holders in sorted(set(shared.values()))
        }
        self._tied = [
            _Tied(param, own_group)
            for param, holders in shared.items()
            if (own_group := groups[holders]) is not None and group.rank in holders
        ]

    @property
    def groups(self) -> list[Group]:
        """Groups of ranks that share parameters with this rank."""
        return list(dict.fromkeys(tied.group for tied in self._tied))

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters of this rank that other ranks share."""
        return [tied.param for tied in self._tied]

    @torch.no_grad()
    def make_equal(self) -> None:
        """Set all copies of shared parameters to the first copy; a collective of their ranks."""
        for param, group in self._tied:
            group.broadcast(param.detach(), 0)

    def add_up(self) -> None:
        """Sum the gradients of all copies of each shared parameter; a collective of their ranks.

        A parameter that no stage has used keeps the gradient None.

        Cost: one all_reduce per shared parameter, and one of a byte per parameter.
        """
        for group in self.groups:
            params = [p for p, tied_group in self._tied if tied_group is group and p.requires_grad]
            for param, grad in fill_missing_gradients(params, [group]):
                param.grad = group.all_reduce(grad)

    def counts_elsewhere(self, param: torch.Tensor) -> bool:
        """Return whether another rank with a copy of this parameter counts it in a norm."""
        return any(tied.param is param and tied.group.rank for tied in self._tied)
