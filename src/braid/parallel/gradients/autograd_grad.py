"""Facts about the running backward of this thread that autograd does not publish.

`torch.autograd.grad` of parameters is detected, because its results belong to one rank and are
never averaged. Nested backwards are detected too, for example in re-entrant checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.autograd.function import BackwardCFunction

from braid.errors import ConfigError
from braid.parallel.gradients.table import ParamRecord
from braid.runtime.torch_internals import current_graph_task, will_execute

__all__ = ["is_in_backward", "is_nested", "is_returned", "refuse_grad"]

# autograd calls the backward of every autograd.Function of Python through this function
_APPLY = BackwardCFunction.apply.__code__


def is_in_backward() -> bool:
    """Return whether autograd is running in this thread."""
    return current_graph_task() != -1


def is_nested() -> bool:
    """Return whether an autograd.Function has begun this backward inside of another backward."""
    frame = sys._getframe(1)  # noqa: SLF001 - autograd numbers its backwards, but not their nesting
    while frame.f_code is not _APPLY:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


def is_returned(param: torch.Tensor) -> bool:
    """Return whether the running backward is `torch.autograd.grad` of `param`."""
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        will_execute(node)
    except RuntimeError as exc:
        if "autograd.grad" not in str(exc):
            raise
        return True
    return False


def refuse_grad(records: Sequence[ParamRecord]) -> None:
    """Raise if a backward that accumulated no gradient was `torch.autograd.grad` of a parameter.

    Args:
        records: Parameters of the model.

    Raises:
        ConfigError: The backward was `torch.autograd.grad` of a parameter.
    """
    for record in records:
        if record.param.requires_grad and is_returned(record.param):
            msg = (
                f"torch.autograd.grad of {record.name!r} returns this rank's gradient, not the "
                "average. Call loss.backward() and read .grad for the average; for gradients of "
                "one rank, use the wrapped module itself (.module), or no_sync() of an "
                "AveragingOptimizer"
            )
            raise ConfigError(msg)
