"""Guards the optimizer: steps only in updates, with the rate for this number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from braid.errors import ConfigError
from braid.parallel.gradients.incomplete import Use, forget_incomplete, note_incomplete, params_of

__all__ = ["UpdateGuard"]


class UpdateGuard:
    """Raises if the loop steps the optimizer itself; scales its learning rate in each step.

    Attributes:
        is_updating: Whether the gradients belong to a whole step.
    """

    def __init__(self) -> None:
        self.is_updating = False
        self._hooks = ExitStack()
        self._factor = 1.0
        self._rates: list[Any] = []

    def watch(self, optimizer: Optimizer, rate_factor: float) -> None:
        """Guard this optimizer instead of an earlier one.

        Args:
            optimizer: The optimizer.
            rate_factor: Factor of the optimizer's learning rate during its steps.
        """
        self.close()
        self._factor = rate_factor
        params = params_of(optimizer)
        note_incomplete(self, lambda _: params, _refusal)
        self._hooks.callback(forget_incomplete, self)
        before = optimizer.register_step_pre_hook(self._before_step)
        self._hooks.callback(before.remove)
        if rate_factor != 1.0:
            self._hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
        hooks: Any = before.hooks_dict_ref()
        hooks.move_to_end(before.id, last=False)  # `shadow` copies the options then

    def close(self) -> None:
        """Stop guarding the optimizer."""
        self._hooks.close()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Allow steps of the optimizer inside the block."""
        self.is_updating = True
        try:
            yield
        finally:
            self.is_updating = False

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self.is_updating:
            msg = (
                "optimizer.step() was called by the loop: training.step() calls it after the "
                "last micro-batch of a step; pass other changes of the model as the function "
                "update="
            )
            raise ConfigError(msg)
        if self._factor != 1.0:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self._factor

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def _refusal(guard: UpdateGuard, _: object, use: Use) -> str:
    """Return why a function of torch cannot be used on gradients of one micro-batch."""
    if guard.is_updating:
        return ""
    return (
        f"torch's {use} was called by the loop, where gradients are of one micro-batch: call it in "
        "the function update=, which gets the mean gradients, or pass clip= to braid.elastic_mesh"
    )
