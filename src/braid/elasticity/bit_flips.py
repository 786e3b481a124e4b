"""Flips bits in the gradients of a rank, as a defective core would, when `braid chaos` asks for it.

A signal begins it and another one ends it. `verify=` of `braid.elastic` must find the rank.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import torch

from braid.parallel.gradients import ParamRecord

__all__ = ["flip_bits_on_signal"]

BYTE, MASK = 2, 0x10  # of the first element: a high bit of the mantissa of a float32


def flip_bits_on_signal() -> Callable[[Sequence[ParamRecord]], None]:
    """For tests: return a function that flips a bit of one gradient between two SIGUSR2 signals.

    Call it with the parameters after each backward. They may be others when members have changed.
    """
    is_on = False

    def toggle(*_: object) -> None:
        nonlocal is_on
        is_on = not is_on

    def flip(records: Sequence[ParamRecord]) -> None:
        grads = [record.param.grad for record in records if record.param.grad is not None]
        if is_on and grads:
            grad = grads[0]
            flat = torch.empty(0, dtype=torch.uint8, device=grad.device)
            flat.set_(grad.untyped_storage())
            flat[grad.storage_offset() * grad.element_size() + BYTE] ^= MASK

    signal.signal(signal.SIGUSR2, toggle)
    return flip
