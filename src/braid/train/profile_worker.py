"""A rank of `braid profile -n N`: all ranks measure the same layers at the same time.

Rank 0 writes the profile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from braid import context
from braid.comm import Group
from braid.parallel.pipeline.microbatches import num_rows
from braid.plan.profiling import LayerProfile, Profile, profile_host, profile_layers, slowdown
from braid.train.config import MODELS
from braid.train.device import CPU, RankDevice, choose_device, compute_deterministically
from braid.train.models import gpt, gpt_name, layers_of
from braid.train.profile_request import ProfileRequest

__all__ = ["main", "measured"]


def measured(request: ProfileRequest, group: Group, place: RankDevice = CPU) -> Profile:
    """Measure the ranks and a model, unsharded and tensor-parallel; a collective.

    Returns:
        Rank 0's profile.
    """
    compute_deterministically()  # the same algorithms as `braid train`
    options: dict[str, Any] = {"device": place.device, "dtype": request.dtype}
    layers = layers_of(request.target, request.model, request.context, **options)
    modules = [layer for _, layer in layers.named]
    host = profile_host(group, modules)
    sizes = _tensor_sizes(request, group.size)
    seconds = request.seconds / len(sizes)
    measure = partial(profile_layers, model=layers.model, rows=request.rows, group=group)
    ratios: dict[int, float] = {}  # by rows

    def in_step(x: Any, alone_s: float) -> float:
        ratio = slowdown(alone_s, host, modules, x, layers.loss, group, limit_s=seconds)
        return ratios.setdefault(num_rows(x), ratio)

    group.barrier()  # all ranks measure at the same time
    whole = measure(
        layers.named, layers.sample, loss=layers.loss, seconds=seconds, slowdown=in_step
    )
    shared = {}
    for tensor in sizes[1:]:
        shard = gpt(request.model, request.context, tensor=tensor, **options)
        sized = measure(shard.named, shard.sample, ranks=shard.ranks, seconds=0.0)
        tensor_group = group.split(group.rank // tensor)
        assert tensor_group is not None, "every rank has a color"
        together = gpt(request.model, request.context, group=tensor_group, **options)
        timed = measure(
            together.named,
            together.sample,
            loss=layers.loss,
            seconds=seconds,
            slowdown=lambda x, _alone_s: ratios[num_rows(x)],
        )
        both = zip(sized.layers, timed.layers, strict=True)
        shared[tensor] = tuple(_with_times(layer, other) for layer, other in both)
    profile = replace(
        whole,
        shared=shared,
        context=request.context if request.model else 0,
        host=host,
        dtype=request.dtype,
    )
    agreed = group.objects.broadcast(msgspec.json.encode(profile), 0)
    return msgspec.json.decode(agreed, type=Profile)


def _with_times(layer: LayerProfile, other: LayerProfile) -> LayerProfile:
    """Return a tensor-parallel layer with measured times that include its all-reduces."""
    return replace(
        layer,
        forward_s=other.forward_s,
        input_grad_s=other.input_grad_s,
        weight_grad_s=other.weight_grad_s,
        split_s=other.split_s,
        reduces=0,
    )


def _tensor_sizes(request: ProfileRequest, num_ranks: int) -> list[int]:
    """Return the tensor-parallel sizes to measure; 1 is the first."""
    if not request.model:
        return [1]
    heads = MODELS[gpt_name(request.model)].heads
    return [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and heads % n == 0]


def main(request: ProfileRequest) -> None:
    """Measure on this rank as `request` asks; rank 0 writes the profile to a file."""
    group, here = context.init(), context.membership().environment
    place = choose_device(request.device, here.local_rank, here.local_world_size)
    place.make_current()
    profile = measured(request, group, place)
    if group.rank == 0:
        profile.write(request.out)
    context.shutdown()
