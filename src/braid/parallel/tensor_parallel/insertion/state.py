"""State of a model besides its inputs, on which a captured graph depends.

A graph holds the parameters themselves. So their values may change in place, and their modes and
dtypes lead to a graph of their own; but a parameter or a module that another one has replaced would
be left out in silence, and is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from braid.errors import ConfigError
from braid.runtime.torch_internals import own_buffers, own_parameters

__all__ = ["ModelState"]


class ModelState:
    """Modules and parameters of a divided model.

    Args:
        model: The model, after its parameters were divided.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module, list(module.children()), list(own_parameters(module).values()))
            for name, module in model.named_modules()
        ]
        self._params = list(model.parameters())

    def key(self) -> Any:
        """Return what a graph depends on: modes, frozen parameters, dtypes, buffers.

        Raises:
            ConfigError: A parameter or module has been replaced.
        """
        for name, module, children, params in self._modules:
            if not _same(list(own_parameters(module).values()), params):
                replaced = "its parameters"
            elif not _same(list(module.children()), children):
                replaced = "modules in it"
            else:
                continue
            msg = (
                f"{name or 'the model'} has {replaced} replaced since parallelize, and its graph "
                "has those of before: change parameters in place (such as load_state_dict without "
                "assign=True), or undivide(model, group) first and parallelize again"
            )
            raise ConfigError(msg)
        return (
            tuple(module.training for _, module, _, _ in self._modules),
            tuple((x.requires_grad, x.dtype, x.device) for x in self._params),
            tuple(id(x) for _, module, _, _ in self._modules for x in own_buffers(module).values()),
        )


def _same(own: list[Any], before: list[Any]) -> bool:
    return len(own) == len(before) and all(a is b for a, b in zip(own, before, strict=True))
