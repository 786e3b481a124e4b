"""In-place changes of optimizers, so that schedulers and scalers keep working.

The object stays the same; its class becomes a subclass of new methods and of its former class.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from braid.errors import ConfigError

__all__ = ["ChangedOptimizer", "change_in_place", "refuse_copy"]


def change_in_place(
    optimizer: torch.optim.Optimizer, methods: type[ChangedOptimizer], **attributes: Any
) -> None:
    """Add the methods of the class `methods`, and attributes, to an optimizer."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (methods, kind), {})
    optimizer.__dict__.update(attributes)


def refuse_copy(name: str) -> NoReturn:
    """Raise, since an object of the kind `name` belongs to this process, and cannot be copied.

    Raises:
        ConfigError: Always.
    """
    msg = f"this {name} cannot be copied or pickled: use state_dict(), and make another {name}"
    raise ConfigError(msg)


class ChangedOptimizer:
    """Methods that are added to every optimizer that averages gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise, since parameters that are added later would not be averaged.

        Raises:
            ConfigError: Always.
        """
        del param_group
        msg = (
            "parameter groups added to a wrapped optimizer would not be averaged: add them before "
            "wrapping, with requires_grad=False if necessary"
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise, since a copy or pickle would share hooks of this optimizer's parameters.

        Raises:
            ConfigError: Always.
        """
        refuse_copy("wrapped optimizer")
