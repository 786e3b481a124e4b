"""Operations that a captured model would freeze or lose, and the model's line that calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from braid.comm.autograd.nested import flatten
from braid.errors import ConfigError
from braid.runtime.seeding.keyed import DROPOUT, LIKE, TAKES_GENERATOR

__all__ = ["RANDOM", "check_function", "is_sized_by_data", "line"]

# functions that turn data into Python values
REFUSED: dict[Any, str] = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.__bool__: "a condition",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__complex__: "complex()",
    torch.Tensor.__index__: "an index",
    torch.Tensor.__contains__: "a condition",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy()",
    torch.Tensor.is_nonzero: "a condition",
    torch.is_nonzero: "a condition",
    torch.Tensor.equal: "equal()",
    torch.equal: "equal()",
    torch.Tensor.allclose: "allclose()",
    torch.allclose: "allclose()",
}
# calls that a replay would omit
LOST: dict[Any, str] = {
    torch.Tensor.register_hook: "register_hook()",
    torch.Tensor.data.__set__: "an assignment to .data",  # type: ignore[attr-defined]
    torch.Tensor.backward: "backward()",
}
RANDOM = {*TAKES_GENERATOR, *LIKE, *DROPOUT, torch.randint_like, torch.rrelu, torch.alpha_dropout}
# functions with a result size that depends on data
SIZED_BY_DATA: frozenset[Any] = frozenset(
    {
        *(torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere),
        *(torch.masked_select, torch.Tensor.masked_select, torch.unique, torch.Tensor.unique),
        *(torch.unique_consecutive, torch.Tensor.unique_consecutive, torch.bincount),
    }
)
SIZES: frozenset[Any] = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        *(torch.Tensor.size, torch.Tensor.__len__, torch.Tensor.numel, torch.Tensor.nelement),
        torch.numel,
    }
)
TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)  # directory of the recording modules


def check_function(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    is_data: Callable[[torch.Tensor], bool],
    is_unsized: Callable[[torch.Tensor], bool],
) -> None:
    """Raise if a captured graph could not repeat a function, for example because it reads data.

    Args:
        func: The function.
        args: Its arguments.
        is_data: Function that returns whether a tensor depends on data, not only on shapes.
        is_unsized: Function that returns whether a tensor's shape depends on data.

    Raises:
        ConfigError: Its result would be a constant in the graph, or its call would be missing; the
            message has the model's line.
    """
    refused, tensors = REFUSED.get(func), [x for x in args if isinstance(x, torch.Tensor)]
    if refused is not None and any(map(is_data, tensors)):
        msg = (
            f"{refused} at {line()} makes control flow of the model depend on data, which cannot "
            "be captured: move this call into a submodule, or out of the model"
        )
        raise ConfigError(msg)
    if func in SIZES and any(map(is_unsized, tensors[:1])):
        msg = (
            f"the shape of a tensor at {line()} depends on data (by a mask, nonzero() or "
            "unique()), which cannot be captured: move the operation into a submodule"
        )
        raise ConfigError(msg)
    if func in LOST:
        msg = f"{LOST[func]} at {line()} would be lost by capture: move this call into a submodule"
        raise ConfigError(msg)


def is_sized_by_data(target: Any, args: Sequence[Any]) -> bool:
    """Return whether the shape of the result of the function `target` depends on data."""
    if target is torch.Tensor.__getitem__:
        _, index = flatten(args[1:])
        return any(x.dtype in {torch.bool, torch.uint8} for x in index)
    if target in {torch.repeat_interleave, torch.Tensor.repeat_interleave}:
        return any(isinstance(x, torch.Tensor) for x in args[1:])
    return target in SIZED_BY_DATA or (target is torch.where and len(args) == 1)


def line() -> str:
    """Return the model's line that is being executed, or torch's line if there is none."""
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to find the caller
    text = ""
    while frame.f_back is not None and frame.f_code.co_name != "_run_recorded":
        file = frame.f_code.co_filename
        if not file.startswith((HERE, torch.overrides.__file__)):
            if not file.startswith(TORCH):
                return f"{file}:{frame.f_lineno}"
            text = text or f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return text
