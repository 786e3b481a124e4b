"""Values of parameters that are the same on every rank, drawn without torch's default generator."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def filled(module: Module, seed: int = 0) -> Module:
    """Fill all parameters with normal numbers of standard deviation 1/4; return the module."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 4)
    return module
