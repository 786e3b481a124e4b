"""Stand-ins for `.grad` of the model's parameters while gradients belong to this rank's pieces.

Problem: at stages 1 and 2 the averages belong to pieces, and the model's parameters would have no
gradient. Programs that change or measure gradients skip parameters without one, by `if p.grad is
not None`; without an error such loops would do nothing.

Idea: `.grad` is an object that raises an error when it is used. It has no memory. Dropping it by
`p.grad = None`, as programs do before the next backward, drops the gradient of the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError
from braid.runtime.torch_internals import can_set_data, tracing_context

__all__ = ["MovedGradient", "moved_gradient"]

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


def moved_gradient(name: str, param: nn.Parameter) -> MovedGradient:
    """Return the stand-in for the gradient of a parameter."""
    hole = torch.full((), torch.nan, dtype=param.dtype, device=param.device)
    moved = hole.expand(param.shape).as_subclass(MovedGradient)
    moved.braid_name = name
    return moved
