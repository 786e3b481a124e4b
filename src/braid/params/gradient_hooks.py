"""What autograd tells a reducer: that a backward has reached a module, and that a gradient is there.

Problem: a parameter keeps its hooks alive. If they kept the reducer alive, which keeps the parameters, none of them would ever die:
part of that cycle runs through C++, where the garbage collector cannot see it.

Idea: hooks know the methods that they call weakly, and do nothing when their object is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from braid.params.table import ParamRecord

__all__ = ["Forward", "GradientHooks"]


@dataclass(slots=True, eq=False)
class Forward:
    """One forward of a module.

    Attributes:
        weight: What its gradients count, such as its number of samples; one when None.
        counted: Number of averagings before it, while it counts among those that no backward has reached.
    """

    weight: float | None
    counted: int | None


class GradientHooks:
    """Hooks on parameters, and on what forwards return.

    Args:
        records: Parameters by position.
        on_output: Bound method, called with a forward when a backward has reached an output of it.
        on_part: Called with the position of a parameter and a part of its gradient before that is accumulated, or returned by `torch.autograd.grad`; may
            return what is taken instead.
        on_gradient: Called with the position of a parameter whose gradient a backward has accumulated.
    """

    def __init__(
        self,
        records: Sequence[ParamRecord],
        *,
        on_output: Callable[[Forward], None],
        on_part: Callable[[int, torch.Tensor], torch.Tensor | None],
        on_gradient: Callable[[int], None],
    ) -> None:
        self._records = records
        self._on_output = weakref.WeakMethod(on_output)
        self._on_part = weakref.WeakMethod(on_part)
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._by_position: dict[int, RemovableHandle] = {}
        self._weighs = False
        self._part_handles: dict[int, RemovableHandle] = {}

    def place(self, positions: Iterable[int]) -> None:
        """Have hooks on the parameters at these positions, and on no others."""
        wanted = list(positions)
        for position in set(self._by_position).difference(wanted):
            self._by_position.pop(position).remove()
        for position in wanted:
            if position not in self._by_position:
                param = self._records[position].param
                hook = partial(_gradient_came, self._on_gradient, position)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._by_position[position] = handle
        self._remove_parts()
        self.follow()

    def weigh(self) -> None:
        """Call `on_part`, too, from now on."""
        self._weighs = True
        self.follow()

    def follow(self) -> None:
        """Weigh what has been unfrozen meanwhile, too: a frozen parameter takes no such hook."""
        if not self._weighs:
            return
        for position in self._by_position.keys() - self._part_handles.keys():
            param = self._records[position].param
            if param.requires_grad:
                hook = partial(_part_came, self._on_part, position)
                self._part_handles[position] = param.register_hook(hook)  # type: ignore[no-untyped-call]

    def watch(self, outputs: Iterable[torch.Tensor], forward: Forward) -> bool:
        """Have `on_output` called with `forward` when a backward comes to one of these; False if none of them can tell."""
        hook = partial(_output_reached, self._on_output, forward)
        followed = [output for output in outputs if not output.is_leaf]
        for output in followed:  # a hook on a parameter that is returned would stay for ever
            output.register_hook(hook)  # type: ignore[no-untyped-call]
        return bool(followed)

    def __del__(self) -> None:
        self.close()  # hooks whose object is gone would be called for ever

    def close(self) -> None:
        """Remove those on parameters."""
        for handle in self._by_position.values():
            handle.remove()
        self._by_position.clear()
        self._remove_parts()

    def _remove_parts(self) -> None:
        for handle in self._part_handles.values():
            handle.remove()
        self._part_handles.clear()


def _gradient_came(
    on_gradient: weakref.WeakMethod[Callable[[int], None]], position: int, _param: torch.Tensor
) -> None:
    call = on_gradient()
    if call is not None:
        call(position)


def _part_came(
    on_part: weakref.WeakMethod[Callable[[int, torch.Tensor], torch.Tensor | None]],
    position: int,
    grad: torch.Tensor,
) -> torch.Tensor | None:
    call = on_part()
    return None if call is None else call(position, grad)


def _output_reached(
    on_output: weakref.WeakMethod[Callable[[Forward], None]],
    forward: Forward,
    _grad: torch.Tensor,
) -> None:
    call = on_output()
    if call is not None:
        call(forward)
