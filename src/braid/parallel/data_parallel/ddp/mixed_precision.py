"""Forward and backward in 16 bits with parameters and their gradients in 32 bits.

Problem: matrices in bfloat16 multiply faster and their gradients are half as long, but an optimizer
that adds small updates to 16-bit parameters loses most of them.

Idea: the module is called with 16-bit copies instead of its parameters
(`torch.func.functional_call`). Autograd records the copy, so gradients reach the 32-bit parameters
in 32 bits, and averaging does not change.

Layers that keep running statistics (batch normalization) take 16-bit inputs, but need weight and
bias in the dtype of the statistics: if the statistics stay in 32 bits, so do weight and bias.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from braid.comm.autograd.nested import map_tensors
from braid.errors import ConfigError
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm
from braid.runtime.torch_internals import BatchNorm, InstanceNorm, NormBase

__all__ = ["MixedPrecision", "Precision", "precision_of"]

# kernels accept 16-bit inputs with wider weights; a subclass may have another forward
KNOWN_NORMS = {kind.forward for kind in (BatchNorm, nn.SyncBatchNorm, InstanceNorm, SyncBatchNorm)}
WIRES = {torch.bfloat16: "bf16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """Dtypes of a wrapper's forward and sent gradients; None keeps a dtype unchanged.

    Attributes:
        param_dtype: Dtype of parameters and inputs in forward and backward. Parameters of layers
            with running statistics of another dtype keep their dtype.
        reduce_dtype: Dtype in which gradients are sent over a network.
        buffer_dtype: Dtype to which floating buffers are converted at wrapping.
        cast_forward_inputs: Whether to cast floating inputs.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class Precision:
    """Object that calls a module with the dtypes of a `MixedPrecision`.

    Args:
        wanted: Dtypes of the forward.
        module: Module; its buffers are converted.
    """

    def __init__(self, wanted: MixedPrecision, module: nn.Module) -> None:
        self._wanted = wanted
        if wanted.buffer_dtype is not None:
            for owner in module.modules():
                for name, buffer in owner.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(owner, name, buffer.to(wanted.buffer_dtype))

    @property
    def wire(self) -> str | None:
        """Wire format of gradients on a network."""
        dtype = self._wanted.reduce_dtype
        return None if dtype is None or dtype == torch.float32 else WIRES[dtype]

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module and return its outputs."""
        dtype = self._wanted.param_dtype
        if dtype is None:
            return module(*args, **kwargs)
        if self._wanted.cast_forward_inputs:
            args, kwargs = (
                map_tensors(structure, lambda x: x.to(dtype) if x.is_floating_point() else x)
                for structure in (args, kwargs)
            )
        return functional_call(module, _cast(module, dtype), args, kwargs, tie_weights=False)


def _cast(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return parameters in `dtype` by all of their names; tied parameters share one copy."""
    copies: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        as_it_is = _has_statistics_in_another(owner, dtype)
        named_params = owner.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, param in named_params:
            if as_it_is or not param.is_floating_point():
                named[name] = param
            else:
                named[name] = copies.setdefault(id(param), param.to(dtype))
    return named


def _has_statistics_in_another(module: nn.Module, dtype: torch.dtype) -> bool:
    if not isinstance(module, NormBase) or type(module).forward not in KNOWN_NORMS:
        return False
    return module.running_mean is not None and module.running_mean.dtype != dtype


def precision_of(wanted: Any, module: nn.Module) -> Precision:
    """Return the `Precision` that calls `module`.

    Args:
        wanted: A MixedPrecision of this package or of torch; None for no change.
        module: Module to call.

    Raises:
        ConfigError: `wanted` is anything else, or a dtype is not floating.
    """
    if wanted is None:
        return Precision(MixedPrecision(), module)
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    if not all(hasattr(wanted, name) for name in names):
        msg = f"mixed_precision must be a MixedPrecision, got {type(wanted).__name__}"
        raise ConfigError(msg)
    dtypes = {name: getattr(wanted, name) for name in names}
    wrong = [f"{n}={d}" for n, d in dtypes.items() if d is not None and not _floating(d)]
    reduce_dtype = dtypes["reduce_dtype"]
    if reduce_dtype not in {None, torch.float32, *WIRES}:
        wrong.append(f"reduce_dtype={reduce_dtype}")
    if wrong:
        msg = (
            f"mixed_precision got {', '.join(wrong)}: dtypes must be floating, and reduce_dtype "
            "one of float32, bfloat16 and float16"
        )
        raise ConfigError(msg)
    casts = bool(getattr(wanted, "cast_forward_inputs", True))
    return Precision(MixedPrecision(**dtypes, cast_forward_inputs=casts), module)


def _floating(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
