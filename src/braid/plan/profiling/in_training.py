"""Measures how much longer layers take in a step of training than alone.

Layers are measured one at a time, so that each has a time. In a step the same layers take longer:
other layers and the optimizer have used the caches, hooks move gradients to where ranks add them
up, and ranks wait for each other. So some steps of data-parallel training are measured, too:

    factor = (step - all-reduce - optimizer - constant overhead) / (sum of the layers' times)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.layer_costs import seconds_of
from braid.comm.autograd.nested import tensors_in
from braid.parallel.gradients import GradientReducer, ParamTable, ReducerOptions
from braid.parallel.pipeline.skip import use_skips
from braid.plan.profiling.host import clip
from braid.plan.profiling.profile import HostProfile

__all__ = ["in_training"]

WARM_UPS, STEPS = 2, 5


def in_training(
    alone_s: float,
    host: HostProfile,
    layers: Sequence[nn.Module],
    x: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    group: Group,
) -> float:
    """Return by what factor layers take longer in a step of training, at least 1; a collective.

    Args:
        alone_s: Sum of the layers' times alone, for a forward and a backward of `x`.
        host: Costs of the ranks.
        layers: The layers, of the same shapes on all ranks; their weights are not changed.
        x: Input of the first layer on this rank.
        loss: Loss of the last layer's output; None for the mean of its numbers.
        group: All ranks.
    """
    model = nn.Sequential(*layers)
    table = ParamTable.of(model)
    # torch's AdamW refuses sparse gradients
    params = [record.param for record in table.requires_grad if not record.sparse]
    if not params:
        return 1.0
    options = ReducerOptions(finite_check="late")
    with closing(GradientReducer(group, table, options)) as reducer:
        step_s = _step_s(model, params, x, loss or _mean, reducer, group)
    nbytes = sum(p.nbytes for p in params)
    rest_s = host.optimizer.of(nbytes) + host.step_s
    if group.size > 1:
        rest_s += host.collectives[f"all_reduce/{group.size}"].of(nbytes)
    return max(1.0, (step_s - rest_s) / alone_s)


def _mean(output: Any) -> torch.Tensor:
    means = [t.float().mean() for t in tensors_in(output) if t.requires_grad]
    return torch.stack(means).sum() if means else torch.zeros(())


def _step_s(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    x: Any,
    loss: Callable[[Any], torch.Tensor],
    reducer: GradientReducer,
    group: Group,
) -> float:
    """Return the median seconds of a step on this rank."""
    optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)  # weights stay as they are

    def step() -> None:
        optimizer.zero_grad()
        reducer.forward_begins()
        with use_skips({}):
            value = loss(model(x))
        if value.requires_grad:
            reducer.register_outputs([value])
            value.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        group.all_gather(value.detach().double().cpu())
        clip(params)
        optimizer.step()

    times = []
    for number in range(WARM_UPS + STEPS):
        group.barrier()
        seconds = seconds_of(step, [params[0].device], group.context.clock)[1]
        if number >= WARM_UPS:
            times.append(seconds)
    model.zero_grad()  # gradients of later backwards are in this rank's memory again
    return statistics.median(times)
