"""Base class of optimizers that wrap another optimizer to act between or after its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from braid.parallel.gradients.optimizer_in_place import refuse_copy

__all__ = ["WrappedOptimizer"]


class _Inside:
    """Attribute that is read from and written to the inner optimizer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: WrappedOptimizer | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper.optim, self._name)

    def __set__(self, wrapper: WrappedOptimizer, value: Any) -> None:
        setattr(wrapper.optim, self._name, value)

    def __delete__(self, wrapper: WrappedOptimizer) -> None:
        delattr(wrapper.optim, self._name)


class WrappedOptimizer(torch.optim.Optimizer):
    """Optimizer that looks like its inner optimizer to schedulers, gradient scalers and hooks.

    Steps are counted, so all ranks must take the same number of steps. A `torch.amp.GradScaler`
    skips steps only on the rank with overflowed gradients, unless the inner optimizer is a fused
    one (`fused=True`), which skips them itself.

    Args:
        optim: Inner optimizer, which takes the steps.
    """

    grad_scale = _Inside()  # set by GradScaler during a step of a fused optimizer
    found_inf = _Inside()

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim  # torch's constructor would create separate groups and state

    @property
    # an attribute in torch; load_state_dict replaces it
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        """State of the inner optimizer."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the inner optimizer; `closure` computes the loss again and returns it."""
        return self.optim.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zero if `set_to_none` is False."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, a dict with `params` and options, to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the inner optimizer."""
        self.optim.load_state_dict(state_dict)

    # subclasses use the argument
    def is_own(self, name: str, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Return whether the tensor `name` of a checkpoint may differ between ranks."""
        return True

    def __getstate__(self) -> NoReturn:
        """Raise, because copy and pickle are not supported.

        Raises:
            ConfigError: Always.
        """
        refuse_copy(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner optimizer that the wrapper does not have."""
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
