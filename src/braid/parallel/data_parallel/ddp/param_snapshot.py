"""Checks that a module still has the parameters with which averaging was set up.

Problem: buckets and hooks belong to tensors of one dtype on one device. `model.half()` keeps the
parameter object and replaces its data; a replaced parameter has no hook and is never averaged.
Both raise errors with names here, instead of being averaged wrongly.

`torch.func.functional_call` replaces parameters by tensors for one forward. Their gradients are
left to the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from braid.errors import ConfigError
from braid.runtime.torch_internals import own_modules, own_parameters
from braid.types import dtype_name, first_few

__all__ = ["ParamSnapshot"]


class ParamSnapshot:
    """Parameters of a wrapped module with their dtypes and devices, to detect later changes.

    Args:
        params: All parameters.
        ignored: Names of parameters that are not averaged: the program may replace or move them.
            Replaced ones stay in memory.
    """

    def __init__(self, params: Iterable[nn.Parameter], ignored: Collection[str] = ()) -> None:
        self._ignored = ignored
        self._params = list(params)  # a later parameter could get the id of one that is freed
        self._known = {id(param): (param.dtype, param.device) for param in self._params}

    def check_module(self, module: nn.Module) -> bool:
        """Check the parameters of a module; see `check`.

        Cost: less than half of a walk through `module.parameters()`, which builds names.
        """
        get, todo, seen = self._known.get, [module], set()
        while todo:
            part = todo.pop()
            if part in seen:
                continue
            seen.add(part)
            for param in own_parameters(part).values():
                if param is not None and get(id(param)) != (param.dtype, param.device):
                    return self.check(module.parameters(), module.named_parameters())
            todo += [child for child in own_modules(part).values() if child is not None]
        return True

    def check(
        self, params: Iterable[torch.Tensor], names: Iterable[tuple[str, torch.Tensor]]
    ) -> bool:
        """Check that parameters are unchanged since wrapping, or replaced for this forward only.

        Args:
            params: Current parameters.
            names: Their names, read only if something differs.

        Returns:
            Whether this forward uses any wrapped parameter that requires a gradient.

        Raises:
            ConfigError: Some parameters are new, converted or moved.
        """
        known = self._known
        if all(known.get(id(param)) == (param.dtype, param.device) for param in params):
            return True
        named = [
            (name, param)
            for name, param in names
            if isinstance(param, nn.Parameter) and name not in self._ignored
        ]
        new = [repr(name) for name, param in named if id(param) not in known]
        if new:
            msg = (
                "parameters have been replaced or added since the module was wrapped: "
                f"{first_few(new, separator='; ')}. Load with load_state_dict(assign=False). Add "
                "layers before wrapping, or wrap again. To replace parameters in one forward only, "
                "pass tensors that are not nn.Parameters to torch.func.functional_call"
            )
            raise ConfigError(msg)
        changed = [
            f"{name!r}, {_spec(*known[id(param)])} then and {_spec(param.dtype, param.device)} now"
            for name, param in named
            if known[id(param)] != (param.dtype, param.device)
        ]
        if not changed:  # functional_call has replaced the other parameters
            return any(param.requires_grad for _, param in named)
        msg = (
            "parameters have been converted or moved since the module was wrapped: "
            f"{first_few(changed, separator='; ')}. Convert and move the module before wrapping "
            "(mixed_precision= computes in 16 bits), or wrap it again"
        )
        raise ConfigError(msg)


def _spec(dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype_name(dtype)} on {device}"
