"""An optimizer around another one, for what happens in between or after its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from braid.errors import ConfigError

__all__ = ["WrappedOptimizer"]


class _Inside:
    """An attribute of the optimizer inside, whoever sets it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: WrappedOptimizer | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.optim, self._name)

    def __set__(self, wrapper: WrappedOptimizer, value: Any) -> None:
        setattr(wrapper.optim, self._name, value)

    def __delete__(self, wrapper: WrappedOptimizer) -> None:
        delattr(wrapper.optim, self._name)


class WrappedOptimizer(torch.optim.Optimizer):
    """Looks like the optimizer inside to learning rate schedulers, scalers and hooks.

    Steps are counted, so all ranks must take equally many. A `torch.amp.GradScaler` leaves steps out on the rank whose gradients overflow, unless the
    optimizer inside is a fused one (`fused=True`), which does so itself.

    Args:
        optim: The optimizer that takes the steps.
    """

    grad_scale = _Inside()  # what a GradScaler hands to fused optimizers during a step
    found_inf = _Inside()

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

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - for those that are not all own
        """Whether a tensor of a checkpoint (`checkpoint.training_tensors`) has another value on other ranks, as far as is known."""
        return True

    def __getstate__(self) -> NoReturn:
        """Ranks cannot be copied.

        Raises:
            ConfigError: Always, under `copy.deepcopy` and `pickle`.
        """
        name = type(self).__name__
        msg = f"expected {name} to stay where it is, found that it is copied or pickled: use state_dict(), and make another {name}"
        raise ConfigError(msg)

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the wrapper is one of the optimizer inside."""
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
