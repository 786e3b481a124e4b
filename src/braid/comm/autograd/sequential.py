"""A chain of layers, with the segments of a plan recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm.autograd.recompute import Around, checkpoint
from braid.comm.autograd.recompute_plan import RecomputePlan, equal_segments
from braid.comm.autograd.recompute_policy import RecomputePolicy

__all__ = ["checkpoint_sequential"]


def checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    plan: int | RecomputePlan,
    x: Any,
    *,
    preserve_rng_state: bool | Sequence[torch.Generator] = True,
    early_stop: bool = True,
    around: Around | None = None,
    policy: RecomputePolicy | None = None,
) -> Any:
    """Call `functions` in sequence, recomputing the segments that `plan` selects.

    Args:
        functions: Layers, such as an nn.Sequential.
        plan: A plan from `recompute_plan`, or a number of equal segments; all but the last are then
            recomputed.
        x: Input of the first layer.
        preserve_rng_state: As for `checkpoint`.
        early_stop: As for `checkpoint`.
        around: As for `checkpoint`.
        policy: As for `checkpoint`, for each recomputed segment.

    Returns:
        The result of the last layer.

    Raises:
        ConfigError: The plan is for another number of layers.

    Cost: see `RecomputePlan.peak_bytes` and `recomputed_s`.
    """
    layers = list(functions)
    if isinstance(plan, int):
        plan = equal_segments(len(layers), plan)
    plan.check(len(layers))
    for start, stop, recomputed in plan.segments:
        segment = _chained(layers[start:stop])
        if recomputed:
            x = checkpoint(
                segment,
                x,
                preserve_rng_state=preserve_rng_state,
                early_stop=early_stop,
                around=around,
                policy=policy,
            )
        else:
            x = segment(x)
    return x


def _chained(layers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return layers as one function, or as one nn.Sequential if all are modules."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    if len(modules) == len(layers):
        return nn.Sequential(*modules)

    def call(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return call
