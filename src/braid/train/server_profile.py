"""A rank of `braid profile -n N --servers`, which measures a parameter server of N servers.

The first worker writes the curve. A measured step is the part of a training step after backward:
clip and push gradients, update on the servers with AdamW, pull. The curve has two points: half of
the model's layers, and all of them.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn

from braid import context, ps
from braid.comm import Group
from braid.parallel.gradients.exact_norm import clip_whole_
from braid.plan.profiling import Curve
from braid.train.models import layers_of
from braid.train.profile_request import ProfileRequest

__all__ = ["main", "measured"]

RUNS = 9
CLIP = 1.0
ADAMW = partial(torch.optim.AdamW, lr=1e-6, fused=True)


def measured(request: ProfileRequest, group: Group) -> Curve | None:
    """Return seconds per step by bytes of parameters (None except on the first worker)."""
    clock = group.context.clock
    torch.manual_seed(0)  # equal values on all nodes
    layers = [layer for _, layer in layers_of(request.target, request.model, request.context).named]
    parts = {"half": layers[: max(1, len(layers) // 2)], "all": layers}
    points = {}
    with ps.join(group, group.size // 2) as node:
        served = [
            ps.ParameterServer(nn.ModuleList(part), node, ADAMW, name=name)
            for name, part in parts.items()
        ]
        if not node.is_worker:
            node.serve()
            return None
        for server in served:
            params, times = list(server.module.parameters()), []
            for _ in range(RUNS + 1):
                for param in params:
                    param.grad = torch.ones_like(param)
                start_ns = clock.now_ns()
                clip_whole_(params, CLIP)
                server.step()
                server.wait()
                times.append((clock.now_ns() - start_ns) / 1e9)
            points[float(sum(p.nbytes for p in params))] = statistics.median(times[1:])
    nbytes = sorted(points)
    seconds = [max(points[size] for size in nbytes[: i + 1]) for i in range(len(nbytes))]
    return Curve(tuple(nbytes), tuple(seconds)) if node.number == 0 else None


def main(request: ProfileRequest) -> None:
    """Measure on this rank as `request` asks; the first worker writes the curve to a file."""
    curve = measured(request, context.init())
    if curve is not None:
        Path(request.out).write_bytes(msgspec.json.encode(curve))
    context.shutdown()
