"""Optimizers that torch's `_apply_optimizer_in_backward` has put on parameters.

Problem: their hooks step as soon as a parameter has its gradient, which is this rank's alone, and
drop it. Weights of ranks would differ from the first step on, and nothing would say so.

Idea: as torch's DistributedDataParallel does, take the hooks away when training begins, and take
the steps when a bucket's averages are there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from braid.errors import ConfigError
from braid.params import ParamRecord

__all__ = ["adopt_optimizers", "optimizers_of"]

MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def optimizers_of(param: torch.Tensor) -> Iterable[torch.optim.Optimizer]:
    """Return the optimizers that are on a parameter."""
    own: Iterable[torch.optim.Optimizer] = getattr(param, "_in_backward_optimizers", ())
    return own


def adopt_optimizers(records: Iterable[ParamRecord]) -> bool:
    """Remove the hooks of optimizers that are on parameters; return whether there are any.

    Raises:
        ConfigError: Gradients of such a parameter are sparse.
    """
    own = [record for record in records if optimizers_of(record.param)]
    for record in own:
        if record.sparse:
            msg = (
                f"{record.name!r} has an optimizer in backward and sparse gradients, which are "
                "averaged at the end of backward: give it an optimizer of its own, whose step() "
                "follows backward"
            )
            raise ConfigError(msg)
        # whoever has called torch's function has imported it
        for handle in sys.modules[MODULE].param_to_optim_hook_handle_map.pop(record.param, ()):
            handle.remove()
    return bool(own)
