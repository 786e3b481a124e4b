"""Stand-ins for `.grad` of the model's parameters while gradients belong to this rank's pieces.

Problem: at stages 1 and 2 the averages belong to pieces, and the model's parameters would have no
gradient. Programs that change or measure gradients skip parameters without one, by `if p.grad is
not None`; without an error such loops would do nothing.

Idea: `.grad` is an object that raises an error when it is used. It has no memory. Dropping it by
`p.grad = None`, as programs do before the next backward, drops the gradient of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from braid.errors import ConfigError
from braid.parallel.sharding.flat_shard import FlatShard
from braid.runtime.torch_internals import can_set_data, tracing_context

__all__ = ["MovedGradient", "MovedGradients"]

# what may be asked of a gradient without its values
_FORM = {
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
            *("is_sparse", "is_cuda", "is_cpu", "is_meta"),
        )
    ),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride),
    *(torch.Tensor.is_floating_point, torch.Tensor.is_complex),
}
# what `to` and such of a model call; if they change parameters, the engine's next forward raises
_MOVES = {
    *(torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.share_memory_),
    *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16),
    getattr(torch.Tensor.data, "__set__"),  # noqa: B009 - a descriptor, unknown to mypy
}


class MovedGradient(torch.Tensor):
    """Gradient of a whole parameter that is stored in pieces; each use raises ConfigError."""

    braid_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the form of the gradient, such as its shape.

        Raises:
            ConfigError: The function needs values.
        """
        if func in _MOVES:
            return args[0]
        if func is can_set_data:
            return True
        if func in _FORM or tracing_context() is not None:  # torch.compile only looks at forms
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg])]
        name = next((x.braid_name for x in flat if isinstance(x, cls)), "a parameter")
        msg = (
            f"the gradient of {name} is stored in pieces, one on each rank, since the optimizer's "
            "states are sharded: change gradients of the parameters in optimizer.param_groups, "
            "and clip by clip_grad_norm_ of the result of shard_optimizer"
        )
        raise ConfigError(msg)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument
        return f"<gradient of {self.braid_name}, stored in pieces>"

    def __format__(self, _spec: str) -> str:
        return repr(self)


class MovedGradients:
    """Stand-ins for the gradients of the parameters in a flat vector.

    Args:
        flat: The parameters; their averages belong to pieces.

    Attributes:
        kept: Indices of whole parameters with a local gradient of `no_sync`.
    """

    def __init__(self, flat: FlatShard) -> None:
        self.kept: set[int] = set()
        self._flat = flat
        self._made: dict[int, MovedGradient] = {}  # by the index of the whole parameter
        self._shown: set[int] = set()  # whole parameters with a stand-in as gradient
        self._hidden: set[int] = set()  # their stand-in is removed while a backward runs

    def show(self, has: Sequence[bool]) -> None:
        """Set stand-ins for gradients that exist on any rank or were hidden."""
        for i, (record, leaf) in enumerate(zip(self._flat.records, self._flat.leaves, strict=True)):
            if has[i] or i in self._hidden:
                if i not in self._made:
                    hole = torch.full((), torch.nan, dtype=leaf.dtype, device=leaf.device)
                    self._made[i] = hole.expand(leaf.shape).as_subclass(MovedGradient)
                    self._made[i].braid_name = record.name
                leaf.grad = self._made[i]
                self._shown.add(i)
        self._hidden.clear()

    def hide(self) -> None:
        """Remove stand-ins, so that gradients can accumulate; drop gradients that have none."""
        for i in self._shown:
            leaf = self._flat.leaves[i]
            if leaf.grad is None:  # dropped by the program
                self._flat.owned[i].grad = None
            elif leaf.grad is self._made[i]:
                leaf.grad = None
                self._hidden.add(i)
        self._shown.clear()

    def check_step(self) -> None:
        """Prepare a step: drop gradients that the program has dropped, and look for new ones.

        Raises:
            ConfigError: The program has set the gradient of a whole parameter.
        """
        for i, leaf in enumerate(self._flat.leaves):
            grad = leaf.grad
            if grad is None and i in self._shown:
                self._flat.owned[i].grad = None  # dropped by the program
            elif grad is not None and grad is not self._made.get(i) and i not in self.kept:
                name = self._flat.records[i].name
                msg = (
                    f"{name!r} has a gradient that this step would not use, since at stage "
                    f"{self._flat.stage} gradients belong to pieces: set .grad of the parameters "
                    "in optimizer.param_groups"
                )
                raise ConfigError(msg)

    def clear(self) -> None:
        """Drop all gradients of whole parameters."""
        for leaf in self._flat.leaves:
            leaf.grad = None
        for indices in (self._shown, self._hidden, self.kept):
            indices.clear()
