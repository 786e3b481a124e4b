"""Sizes of the axes of sequences (cp) and experts (ep) that a plan may use for a model.

The engines decide: a GPT of `braid train` takes positions beside its tokens, so its sequences can
be sharded; a captured model does not. Ranks that share a sequence have two chunks of it each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any, NamedTuple, cast

from torch import nn

from braid.parallel.expert_parallel import expert_modules

__all__ = ["expert_axis", "sequence_axis"]

LARGEST = 64  # ranks of an axis


class AxisSizes(NamedTuple):
    """Numbers of ranks that an axis may have, and sentences on why there are no others."""

    sizes: Sequence[int]
    left_out: Sequence[str] = ()


def sequence_axis(context: int, *, has_attention: bool) -> AxisSizes:
    """Return the numbers of ranks over which a model's sequences can be sharded.

    Args:
        context: Positions of a sequence, for a GPT of `braid train`; 0 for another model.
        has_attention: Whether a layer of the model is known to have attention.
    """
    if has_attention and context:
        return AxisSizes(
            [1, *(n for n in range(2, min(LARGEST, context) + 1) if context % (2 * n) == 0)]
        )
    if has_attention:
        why = "a captured model does not support sharded sequences"
    elif context:
        why = "the profile does not mark layers with attention; make it again with `braid profile`"
    else:
        return AxisSizes((1,))
    return AxisSizes((1,), (f"Axis cp is left out: {why}.",))


def expert_axis(layers: Iterable[nn.Module]) -> AxisSizes:
    """Return the numbers of ranks over which all experts of a model's layers can be sharded."""
    numbers = [
        cast("Any", module).num_experts
        for layer in layers
        for module in expert_modules(layer).values()
    ]
    common = gcd(*numbers)
    return AxisSizes([1, *(n for n in range(2, min(LARGEST, common) + 1) if common % n == 0)])
