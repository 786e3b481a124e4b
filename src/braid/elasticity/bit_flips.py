"""Flips bits in the gradients of a rank, as a defective core would, when `braid chaos` asks for it.

A signal begins it and another one ends it. `verify=` of `braid.elastic` must find the rank.
"""

from __future__ import annotations

import signal

import torch
from torch import nn

__all__ = ["flip_bits_on_signal"]

BYTE, MASK = 2, 0x10  # of the first element: a high bit of the mantissa of a float32


def flip_bits_on_signal(model: nn.Module) -> None:
    """For tests: flip a bit of one gradient in each backward between two SIGUSR2 signals."""
    is_on = False

    def toggle(*_: object) -> None:
        nonlocal is_on
        is_on = not is_on

    def flip(param: torch.Tensor) -> None:
        if is_on and param.grad is not None:
            storage = param.grad.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=param.grad.device).set_(storage)
            flat[param.grad.storage_offset() * param.grad.element_size() + BYTE] ^= MASK

    param = next(param for param in model.parameters() if param.requires_grad)
    param.register_post_accumulate_grad_hook(flip)  # type: ignore[no-untyped-call]
    signal.signal(signal.SIGUSR2, toggle)
