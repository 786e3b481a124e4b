"""A rank of `braid profile -n N`: all ranks measure the same layers at the same time.

Rank 0 writes the profile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from braid import context
from braid.comm import Group
from braid.plan.profiling import LayerProfile, Profile, profile_host, profile_layers
from braid.train.config import MODELS
from braid.train.device import CPU, RankDevice, choose_device, compute_deterministically
from braid.train.models import gpt, gpt_name, layers_of
from braid.train.profile_request import ProfileRequest

__all__ = ["main", "measured", "profiled_layers"]


def measured(request: ProfileRequest, group: Group, place: RankDevice = CPU) -> Profile:
    """Measure a model and the ranks, and return rank 0's profile; a collective."""
    layers = layers_of(request.target, request.model, request.context, device=place.device)
    host = profile_host(group, [layer for _, layer in layers.named])
    return msgspec.structs.replace(profiled_layers(request, group, place), host=host)


def profiled_layers(request: ProfileRequest, group: Group, place: RankDevice = CPU) -> Profile:
    """Measure a model's layers, unsharded and tensor-parallel; a collective."""
    sizes = [1]
    if request.model:
        heads = MODELS[gpt_name(request.model)].heads
        sizes = [n for n in range(1, group.size + 1) if group.size % n == 0 and heads % n == 0]
    compute_deterministically()  # the same algorithms as `braid train`
    options: dict[str, Any] = {"device": place.device, "dtype": request.dtype}
    profiles: dict[int, Profile] = {}
    for tensor in sizes:
        layers = layers_of(request.target, request.model, request.context, tensor=tensor, **options)
        group.barrier()  # all ranks measure at the same time
        measure = partial(profile_layers, model=layers.model, rows=request.rows, group=group)
        seconds = request.seconds / len(sizes)
        if tensor == 1:
            profiles[1] = measure(layers.named, layers.sample, loss=layers.loss, seconds=seconds)
            continue
        sized = measure(layers.named, layers.sample, ranks=layers.ranks, seconds=0.0)
        tensor_group = group.split(group.rank // tensor)
        assert tensor_group is not None, "every rank has a color"
        together = gpt(request.model, request.context, group=tensor_group, **options)
        timed = measure(together.named, together.sample, loss=layers.loss, seconds=seconds)
        both = zip(sized.layers, timed.layers, strict=True)
        made = tuple(_with_times(layer, other) for layer, other in both)
        profiles[tensor] = msgspec.structs.replace(sized, layers=made)
    others = {n: profile.layers for n, profile in profiles.items() if n > 1}
    context_bytes = request.context if request.model else 0
    profile = msgspec.structs.replace(
        profiles[1], shared=others, context=context_bytes, dtype=request.dtype
    )
    agreed = group.objects.broadcast(msgspec.json.encode(profile), 0)
    return msgspec.json.decode(agreed, type=Profile)


def _with_times(layer: LayerProfile, other: LayerProfile) -> LayerProfile:
    """Return a tensor-parallel layer with measured times that include its all-reduces."""
    return msgspec.structs.replace(
        layer,
        forward_s=other.forward_s,
        input_grad_s=other.input_grad_s,
        weight_grad_s=other.weight_grad_s,
        reduces=0,
    )


def main(request: ProfileRequest) -> None:
    """Measure on this rank as `request` asks; rank 0 writes the profile to a file."""
    group, here = context.init(), context.membership().environment
    place = choose_device(request.device, here.local_rank, here.local_world_size)
    place.make_current()
    profile = measured(request, group, place)
    if group.rank == 0:
        profile.write(request.out)
    context.shutdown()
