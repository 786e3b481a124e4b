"""Changes of optimizers in place, so that schedulers and scalers keep working.

The object stays; its class becomes one that derives from new methods and from its own class.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from braid.errors import ConfigError

__all__ = ["ChangedOptimizer", "change_in_place", "refuse_copy"]


def change_in_place(
    optimizer: torch.optim.Optimizer, methods: type[ChangedOptimizer], **attributes: Any
) -> None:
    """Give an optimizer new methods and attributes."""
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (methods, kind), {})
    optimizer.__dict__.update(attributes)


def refuse_copy(name: str) -> NoReturn:
    """Refuse to copy or pickle an object that belongs to this process and its ranks.

    Raises:
        ConfigError: Always.
    """
    msg = f"{name} cannot be copied or pickled: use state_dict(), and make another {name}"
    raise ConfigError(msg)


class ChangedOptimizer:
    """Methods that every optimizer which averages gradients gets."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that come later, which would not be averaged.

        Raises:
            ConfigError: Always.
        """
        del param_group
        msg = (
            "parameter groups cannot be added after DistributedOptimizer(): they would not be "
            "averaged. Add them before, frozen if need be"
        )
        raise ConfigError(msg)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copy and pickle, which would share hooks of this optimizer's parameters.

        Raises:
            ConfigError: Always.
        """
        refuse_copy("DistributedOptimizer")
