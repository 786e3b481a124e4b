"""An optimizer around another one, for what happens in between or after its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WrappedOptimizer"]


class WrappedOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer inside to learning rate schedulers, scalers and hooks.

    Args:
        optim: The optimizer that takes the steps.
    """

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim  # torch's constructor would make groups and state of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch, replaced by load_state_dict
        """Those of the optimizer inside."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # likewise
        """That of the optimizer inside."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step."""
        return self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer inside."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer inside."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it."""
        self.optim.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the wrapper is one of the optimizer inside."""
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
