"""The layers of a module that is a row of layers."""

from __future__ import annotations

from torch import nn

from braid.errors import ConfigError
from braid.runtime.torch_internals import own_modules

__all__ = ["layers_of"]


def layers_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return layers with their names, in order; one that comes twice is there twice.

    Raises:
        ConfigError: The module is no row: it has a forward of its own.
    """
    is_row = isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    )
    if not is_row:
        msg = (
            f"{type(module).__name__} is no row of layers, since it has a forward of its own: "
            "pass an nn.Sequential or a list of modules, or braid.capture(model, example)"
        )
        raise ConfigError(msg)
    # not named_children, which leaves out what comes twice
    return [(name, layer) for name, layer in own_modules(module).items() if layer is not None]
