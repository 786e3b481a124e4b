"""Autograd hooks that report when a backward reaches a module, and when a gradient is ready.

Problem: a parameter keeps its hooks alive. If hooks kept the reducer alive, which keeps the
parameters, none of them would ever be freed: part of that cycle is in C++, invisible to the
garbage collector.

Idea: hooks hold their listener weakly, and do nothing when it is gone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from braid.parallel.gradients.table import ParamRecord
from braid.runtime.torch_internals import accumulate_hooks

__all__ = ["ForwardPass", "GradientHooks", "GradientListener"]


@dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward pass of a module.

    Attributes:
        weight: Loss weight of the forward's gradients, such as its number of samples; None for 1.
        open: Number of averagings before the forward; None once a backward has reached the forward.
    """

    weight: float | None
    open: int | None


class GradientListener:
    """Base class for objects that the hooks notify; each method does nothing by default."""

    def on_output(self, forward: ForwardPass, /) -> None:
        """Called when a backward has reached an output of a forward pass."""

    def on_partial_grad(self, position: int, grad: torch.Tensor, /) -> torch.Tensor | None:
        """Called before a partial gradient is accumulated, or returned by torch.autograd.grad.

        Args:
            position: Position of the parameter.
            grad: The partial gradient.

        Returns:
            The gradient to use instead; None to use `grad`.
        """

    def on_gradient(self, position: int, /) -> None:
        """Called when a backward has accumulated the gradient of parameter number `position`."""


class GradientHooks:
    """Hooks on parameters, and on the outputs of forward passes.

    Args:
        records: Parameters by position.
        listener: Called by the hooks; held weakly.
        partial_grads: Whether `on_partial_grad` is called from the start.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        listener: GradientListener,
        *,
        partial_grads: bool = False,
    ) -> None:
        self._records = records
        self._listener = weakref.ref(listener)
        self._handles: dict[int, RemovableHandle] = {}
        self._partial_grads = partial_grads
        self._partial_handles: dict[int, RemovableHandle] = {}

    def attach(self, positions: Iterable[int]) -> None:
        """Register hooks on the parameters at these positions, and remove all others."""
        wanted = list(positions)
        for position in self._handles.keys() - wanted:
            self._handles.pop(position).remove()
        for position in wanted:
            if position not in self._handles:
                param = self._records[position].param
                hook = partial(_on_gradient, self._listener, position)
                with _unfrozen(param):
                    handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._handles[position] = handle
        self._remove_partial()
        self.refresh()

    def register_partial_grad_hooks(self) -> None:
        """Call `on_partial_grad` from now on."""
        self._partial_grads = True
        self.refresh()

    def refresh(self) -> None:
        """Register partial gradient hooks on all parameters with hooks."""
        if not self._partial_grads:
            return
        for position in self._handles.keys() - self._partial_handles.keys():
            param = self._records[position].param
            hook = partial(_on_partial_grad, self._listener, position)
            with _unfrozen(param):
                self._partial_handles[position] = param.register_hook(hook)  # type: ignore[no-untyped-call]

    def are_last(self, position: int) -> bool:
        """Return whether this object has registered the last hook of a parameter."""
        hooks = accumulate_hooks(self._records[position].param) or {}
        return not hooks or next(reversed(hooks)) == self._handles[position].id

    def register_outputs(self, outputs: Iterable[torch.Tensor], forward: ForwardPass) -> bool:
        """Call `on_output` with `forward` when a backward reaches an output.

        Return False if backward can reach no output.
        """
        hook = partial(_on_output, self._listener, forward)
        inner = [output for output in outputs if not output.is_leaf]
        for output in inner:  # a hook on a returned parameter would never be removed
            output.register_hook(hook)  # type: ignore[no-untyped-call]
        return bool(inner)

    def __del__(self) -> None:
        self.close()  # otherwise hooks without a listener would still be called

    def close(self) -> None:
        """Remove the hooks on parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._remove_partial()

    def _remove_partial(self) -> None:
        for handle in self._partial_handles.values():
            handle.remove()
        self._partial_handles.clear()


@contextlib.contextmanager
def _unfrozen(param: torch.Tensor) -> Iterator[None]:
    """Allow hooks on a frozen parameter inside the context, which are called once it is trained."""
    before = param.requires_grad
    param.requires_grad_()
    try:
        yield
    finally:
        param.requires_grad_(before)


def _on_gradient(
    reference: weakref.ref[GradientListener], position: int, param: torch.Tensor
) -> None:
    # autograd also calls hooks when a function returned None for the gradient; any other hook may
    # have dropped a gradient, which listeners refuse
    is_undefined = param.grad is None and len(accumulate_hooks(param) or ()) == 1
    listener = reference()
    if listener is not None and not is_undefined:
        listener.on_gradient(position)


def _on_partial_grad(
    reference: weakref.ref[GradientListener], position: int, grad: torch.Tensor
) -> torch.Tensor | None:
    listener = reference()
    return None if listener is None else listener.on_partial_grad(position, grad)


def _on_output(
    reference: weakref.ref[GradientListener], forward: ForwardPass, _grad: torch.Tensor
) -> None:
    listener = reference()
    if listener is not None:
        listener.on_output(forward)
