"""Measures ranks of one host at work together: collectives, messages, optimizer, a pipeline.

All ranks measure at the same time, each on its own cores, so what they share (caches, memory) is
shared as in training. Groups of one size work side by side. Medians over runs count. Tensors are on
the device of the model's parameters, and the clock stops when the device has done its work.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence

import psutil
import torch
from torch import nn

from braid.comm import Group
from braid.comm.autograd.layer_costs import seconds_of
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.parallel.pipeline import Pipeline
from braid.plan.profiling.profile import Curve, HostProfile
from braid.plan.profiling.slowdown import CLIP, step_s

__all__ = ["profile_host"]

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
RUNS = 15
LARGE_RUNS = 5
LARGE = 1 << 22
MICROBATCHES = 8


def profile_host(group: Group, layers: Sequence[nn.Module]) -> HostProfile:
    """Measure communication and optimizer times on the ranks of a host; a collective.

    Args:
        group: All ranks, of one host.
        layers: Layers of a model; their parameters are used to measure an optimizer.

    Cost: some seconds, and 100 MB on each rank.
    """
    device = next((p.device for layer in layers for p in layer.parameters()), torch.device("cpu"))
    collectives = {}
    for size in range(2, group.size + 1):
        if group.size % size:
            continue
        ranks = group.split(group.rank // size)
        assert ranks is not None, "every rank has a color"
        for operation in ("all_reduce", "reduce_scatter", "all_gather"):
            seconds = [_collective_s(group, ranks, operation, nbytes, device) for nbytes in SIZES]
            collectives[f"{operation}/{size}"] = _ascending(SIZES, seconds)
    message = _ascending((0,), (0.0,))
    if group.size > 1:
        message = _ascending(SIZES, [_message_s(group, nbytes, device) for nbytes in SIZES])
    optimizer = _optimizer(group, layers, device)
    # a step of an empty model, without its optimizer and its all-reduce
    empty, x = nn.Linear(1, 1, device=device), torch.ones(1, 1, device=device)
    empty_s = step_s([empty], x, None, group, limit_s=1.0) - optimizer.of(0.0)
    if group.size > 1:
        empty_s -= collectives[f"all_reduce/{group.size}"].of(0.0)
    return HostProfile(
        ranks=group.size,
        collectives=collectives,
        message=message,
        optimizer=optimizer,
        action_s=max(0.0, _action_s(group, device) - (message.of(0.0) if group.size > 1 else 0.0)),
        step_s=max(0.0, empty_s),
        memory_bytes=_memory_bytes(group, device),
        cores=_cores(),
    )


def _cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 0


def _memory_bytes(group: Group, device: torch.device) -> float:
    """Return this rank's share of the device's memory; a collective."""
    if device.type != "cuda":
        return float(psutil.virtual_memory().total) / group.size
    devices = group.all_gather(torch.tensor([device.index])).tolist()
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total / devices.count(device.index)


def _ascending(nbytes: Sequence[int], seconds: Sequence[float]) -> Curve:
    """Return a curve that never falls: a larger message takes no less time."""
    highest, made = 0.0, []
    for value in seconds:
        highest = max(highest, value)
        made.append(highest)
    return Curve(tuple(map(float, nbytes)), tuple(made))


def _median_s(
    group: Group, run: Callable[[], object], device: torch.device, runs: int = RUNS
) -> float:
    """Return the median seconds of a function that all ranks call, of the slowest rank."""
    clock = group.context.clock
    times = []
    for number in range(runs + 1):
        group.barrier()
        seconds = seconds_of(run, [device], clock)[1]
        if number:  # the first one warms up
            times.append(seconds)
    local_s = torch.tensor(statistics.median(times), dtype=torch.float64)
    return float(group.all_reduce(local_s, "max"))


def _collective_s(
    group: Group, ranks: Group, operation: str, nbytes: int, device: torch.device
) -> float:
    count = max(ranks.size, nbytes // 4 // ranks.size * ranks.size)
    whole = torch.ones(count, device=device)
    part = torch.ones(count // ranks.size, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: ranks.all_reduce(whole),
        "reduce_scatter": lambda: ranks.reduce_scatter(whole),
        "all_gather": lambda: ranks.all_gather(part),
    }
    return _median_s(group, calls[operation], device, LARGE_RUNS if nbytes >= LARGE else RUNS)


def _message_s(group: Group, nbytes: int, device: torch.device) -> float:
    """Return the seconds of a message: half of those there and back, between pairs of ranks."""
    peer, x = group.rank ^ 1, torch.ones(max(1, nbytes // 4), device=device)

    def there_and_back() -> None:
        if peer >= group.size:
            return
        if group.rank < peer:
            group.send(x, peer)
            group.recv(x, peer)
        else:
            group.recv(x, peer)
            group.send(x, peer)

    return _median_s(group, there_and_back, device, LARGE_RUNS if nbytes >= LARGE else RUNS) / 2


def _optimizer(group: Group, layers: Sequence[nn.Module], device: torch.device) -> Curve:
    """Return the seconds of clipping and of AdamW, for a half and for all of the layers."""
    points = {}
    for part in (layers[: max(1, len(layers) // 2)], layers):
        params = list(dict.fromkeys(p for layer in part for p in layer.parameters()))
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        optimizer = torch.optim.AdamW(copies, fused=True)
        for copy in copies:
            copy.grad = torch.ones_like(copy)

        def step(
            copies: list[nn.Parameter] = copies, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            clip_whole_(copies, CLIP)
            optimizer.step()

        points[sum(p.nbytes for p in copies)] = _median_s(group, step, device, LARGE_RUNS)
    return _ascending(sorted(points), [points[nbytes] for nbytes in sorted(points)])


def _action_s(group: Group, device: torch.device) -> float:
    """Return the seconds of a forward or backward in a pipeline of almost empty layers."""
    p = group.size
    stages = [nn.Linear(1, 1, bias=False, device=device) for _ in range(p)]
    for stage in stages:
        nn.init.ones_(stage.weight)
    pipeline = Pipeline(stages, num_microbatches=MICROBATCHES, group=group)
    x, y = torch.ones(2, MICROBATCHES, 1, device=device)

    def step() -> None:
        pipeline.step(x, y, loss=nn.functional.mse_loss)
        pipeline.zero_grad()

    # forwards and backwards of the longest way: all micro-batches of one stage, and the others once
    return _median_s(group, step, device) / (2 * (MICROBATCHES + p - 1))
