"""Measures how much longer layers take in a step of training than alone.

Layers are measured one at a time, so that each has a time. In a step the same layers take longer:
other layers and the optimizer have used the caches, hooks copy gradients into buckets, and ranks
wait for each other. So some steps of data-parallel training are measured, too:

    slowdown = (step - all-reduce - optimizer - step of an empty model) / (sum of the layers' times)

It applies to every micro-batch, although a part of it (the hooks) does not depend on the rows. So
models with layers of only microseconds are predicted less well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.layer_costs import seconds_of
from braid.comm.autograd.nested import map_tensors, tensors_in
from braid.parallel.gradients import GradientReducer, ParamTable, ReducerOptions
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.parallel.pipeline.layer_runs import as_input
from braid.parallel.pipeline.skip import use_skips
from braid.plan.profiling.profile import HostProfile

__all__ = ["CLIP", "slowdown", "step_s"]

MAX_STEPS = 6  # after one that warms up
CLIP = 1.0

Loss = Callable[[Any], torch.Tensor]


def slowdown(
    alone_s: float,
    host: HostProfile,
    layers: Sequence[nn.Module],
    x: Any,
    loss: Loss | None,
    group: Group,
    *,
    limit_s: float,
) -> float:
    """Return the time of layers in a step, relative to their time alone; a collective.

    Args:
        alone_s: Sum of the layers' times alone, for a forward and a backward of `x`.
        host: Costs of the ranks.
        layers: The layers, with the same shapes on all ranks; they stay as they are.
        x: Input of the first layer on this rank.
        loss: Loss of the last layer's output; None for the mean of its numbers.
        group: All ranks.
        limit_s: Seconds to measure for, after the first step; at least one more step is measured.

    Returns:
        The ratio, at least 1; 1 for layers without gradients.
    """
    nbytes = sum(p.nbytes for p in _trained(nn.Sequential(*layers)))
    if not nbytes:
        return 1.0
    rest_s = host.optimizer.of(nbytes) + host.step_s
    if group.size > 1:
        rest_s += host.collectives[f"all_reduce/{group.size}"].of(nbytes)
    return max(1.0, (step_s(layers, x, loss, group, limit_s) - rest_s) / alone_s)


def step_s(
    layers: Sequence[nn.Module], x: Any, loss: Loss | None, group: Group, limit_s: float
) -> float:
    """Return the median seconds of a data-parallel step on this rank; see `slowdown`."""
    model = nn.Sequential(*layers)
    params = _trained(model)
    # stepped instead of the parameters, which keep their values
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = torch.optim.AdamW(copies, fused=True)
    options = ReducerOptions(finite_check="late")

    def step(x: Any, reducer: GradientReducer) -> None:
        model.zero_grad()
        reducer.forward_begins()
        with use_skips({}):
            value = (loss or _mean)(model(x))
        if value.requires_grad:
            reducer.register_outputs([value])
            value.backward()  # type: ignore[no-untyped-call]  # torch's signature is untyped
        group.all_gather(value.detach().double().cpu())
        for copy, param in zip(copies, params, strict=True):
            copy.grad = param.grad
        clip_whole_(copies, CLIP)
        optimizer.step()

    times: list[float] = []
    num_steps = 1
    with closing(GradientReducer(group, ParamTable.of(model), options)) as reducer:
        while len(times) <= num_steps:
            fresh = map_tensors(x, as_input)  # the first layer may change it in place
            group.barrier()
            call = partial(step, fresh, reducer)
            times.append(seconds_of(call, [params[0].device], group.context.clock)[1])
            if len(times) == 1:
                most = min(MAX_STEPS, max(1.0, limit_s / times[0]))
                num_steps = int(group.broadcast(torch.tensor(float(most)), 0))
    model.zero_grad()  # gradients of later backwards are in this rank's memory again
    return statistics.median(times[1:])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _mean(output: Any) -> torch.Tensor:
    means = [t.float().mean() for t in tensors_in(output) if t.requires_grad]
    return torch.stack(means).sum() if means else torch.zeros(())
