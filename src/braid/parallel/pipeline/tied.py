"""Parameters that several layers share, such as the token embedding of a language model.

Each rank with such a layer has a copy. After the last backward of a step the gradients of all
copies are added, in the order of ranks, so that equal optimizers keep the copies equal. In a norm
over all stages, such a parameter counts once, on its first rank.

Layers of one rank share the parameter itself. In a step, the later layers use leaves with the same
memory, so that each layer's gradient is summed over micro-batches before layers are added:

    embedding and head on two ranks      sum of e over micro-batches, plus sum of h
    both on one rank, without leaves     sum of e + h over micro-batches: other bits
    both on one rank, with a leaf        sum of e over micro-batches, plus sum of h

So the bits of a parameter that two layers share do not depend on the number of stages, unless the
parameter has hooks of autograd, which get the gradient of all layers of a rank together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import NamedTuple

import torch
from torch import jit, nn

from braid.comm import Group
from braid.parallel.gradients import fill_missing_gradients
from braid.parallel.pipeline.stage import Layer, Stage
from braid.runtime.torch_internals import accumulate_hooks, gradient_hooks

__all__ = ["TiedParams"]


class _Tied(NamedTuple):
    """Parameter with copies on several ranks.

    Attributes:
        param: Copy of this rank.
        group: Ranks that have a copy.
    """

    param: nn.Parameter
    group: Group


class _LaterUse(NamedTuple):
    """Layer that uses a parameter which an earlier layer of this rank has.

    Attributes:
        stage: Stage of the layer.
        layer: Name of the layer.
        name: Name of the parameter in the layer.
    """

    stage: int
    layer: str
    name: str


class TiedParams:
    """Sums of the gradients of parameters that several layers share.

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
        self._stages: dict[nn.Parameter, set[int]] = {}  # of this rank
        self._later: dict[nn.Parameter, list[_LaterUse]] = {}
        for stage, part in enumerate(parts):
            for layer in part:
                for name, param in layer.module.named_parameters(remove_duplicate=False):
                    ranks.setdefault(param, set()).add(homes[stage])
                    if homes[stage] != group.rank:
                        continue
                    if param in self._stages and not _has_script(layer.module):
                        use = _LaterUse(stage, layer.name, name)
                        self._later.setdefault(param, []).append(use)
                    self._stages.setdefault(param, set()).add(stage)
        self._leaves: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._missing: dict[nn.Parameter, set[int]] = {}
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
    def params(self) -> set[nn.Parameter]:
        """Parameters of this rank that several layers share."""
        return {*(tied.param for tied in self._tied), *self._later}

    @contextmanager
    def separate_uses(self, stages: Mapping[int, Stage]) -> Iterator[None]:
        """Context of a step in which each layer of this rank has its own gradient.

        Args:
            stages: Stages of this rank, by number.
        """
        for param, uses in self._later.items():
            if gradient_hooks(param) or accumulate_hooks(param):
                continue  # which see the gradient of all layers
            self._missing[param] = set(self._stages[param])
            self._leaves[param] = [param.detach().requires_grad_(param.requires_grad) for _ in uses]
            for use, leaf in zip(uses, self._leaves[param], strict=True):
                stages[use.stage].replaced.setdefault(use.layer, {})[use.name] = leaf
        try:
            yield
        finally:
            self._leaves.clear()
            self._missing.clear()
            for stage in stages.values():
                stage.replaced.clear()

    @torch.no_grad()
    def complete(self, stage: int) -> None:
        """Add the gradients of later layers, after the last backward of all stages that have them.

        Args:
            stage: Stage of this rank with a complete gradient.
        """
        for param, missing in self._missing.items():
            if stage not in missing:
                continue
            missing.discard(stage)
            if missing:
                continue
            for leaf in self._leaves[param]:
                grads = [grad for grad in (param.grad, leaf.grad) if grad is not None]
                grads.sort(key=lambda grad: grad.is_sparse)  # torch adds sparse to dense only
                param.grad = reduce(torch.add, grads) if grads else None

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


def _has_script(module: nn.Module) -> bool:
    """Return whether parts are compiled by torch.jit, so that parameters cannot be replaced."""
    return any(isinstance(part, jit.ScriptModule) for part in module.modules())
